"""CPU: everything travels on gloo."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pp_plugin.devices.base import Completion, DeviceBackend
from vllm_pp_plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

__all__ = ["CpuBackend"]


class CpuBackend(DeviceBackend):
    """The host itself."""

    name = "cpu"
    communicator_name = "Cpu"

    def completion(self, tensor: torch.Tensor) -> Completion:
        """gloo can only be waited for."""
        return Completion.WAIT

    def available(self) -> bool:
        """Always."""
        return True

    def describe(self) -> dict[str, Any]:
        """See the base class."""
        return {**super().describe(), "evidence": "tested with real vLLM engines"}


@hookimpl(trylast=True)
def vllm_pp_device_backend(device_type: str) -> DeviceBackend | None:
    """CPU tensors and CPU platforms."""
    return CpuBackend() if device_type == "cpu" else None
