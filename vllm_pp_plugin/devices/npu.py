"""Ascend NPU through PyTorch's "npu" device; pipeline messages travel on HCCL."""

from __future__ import annotations

from vllm_pp_plugin.devices.base import DeviceBackend
from vllm_pp_plugin.hookspecs import hookimpl

__all__ = ["NpuBackend"]


class NpuBackend(DeviceBackend):
    """Ascend NPU: the defaults of :class:`DeviceBackend` hold, HCCL's works answer ``is_completed()`` by event."""

    name = "npu"
    communicator_name = "Npu"


@hookimpl(trylast=True)
def vllm_pp_device_backend(device_type: str) -> DeviceBackend | None:
    """Tensors of the "npu" device."""
    return NpuBackend() if device_type == "npu" else None
