"""CUDA and ROCm through PyTorch's "cuda" device; pipeline messages travel on NCCL."""

from __future__ import annotations

from vllm_pp_plugin.devices.base import DeviceBackend
from vllm_pp_plugin.hookspecs import hookimpl

__all__ = ["CudaBackend"]


class CudaBackend(DeviceBackend):
    """CUDA and ROCm: the defaults of :class:`DeviceBackend` hold, NCCL's works answer ``is_completed()`` by event."""

    name = "cuda"
    communicator_name = "Cuda"


@hookimpl(trylast=True)
def vllm_pp_device_backend(device_type: str) -> DeviceBackend | None:
    """Tensors of the "cuda" device."""
    return CudaBackend() if device_type == "cuda" else None
