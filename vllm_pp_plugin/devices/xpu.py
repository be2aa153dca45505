"""Intel XPU through PyTorch's "xpu" device; pipeline messages travel on XCCL."""

from __future__ import annotations

from vllm_pp_plugin.devices.base import DeviceBackend
from vllm_pp_plugin.hookspecs import hookimpl

__all__ = ["XpuBackend"]


class XpuBackend(DeviceBackend):
    """Intel XPU: the defaults of :class:`DeviceBackend` hold, XCCL's works answer ``is_completed()`` by event."""

    name = "xpu"
    communicator_name = "Xpu"


@hookimpl(trylast=True)
def vllm_pp_device_backend(device_type: str) -> DeviceBackend | None:
    """Tensors of the "xpu" device."""
    return XpuBackend() if device_type == "xpu" else None
