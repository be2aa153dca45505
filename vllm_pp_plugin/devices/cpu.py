"""CPU: everything travels on gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_pp_plugin.devices.base import Completion, DeviceBackend
from vllm_pp_plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

__all__ = ["CpuBackend"]

_POOL_BYTES = 128 * 1024 * 1024
"""Host memory that a group keeps for its next sends."""


class CpuBackend(DeviceBackend):
    """The host itself."""

    name = "cpu"
    communicator_name = "Cpu"

    def __init__(self) -> None:
        from vllm_pp_plugin.devices.pool import BufferPool

        self._pool = BufferPool(_POOL_BYTES)

    def private_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the base class; the memory is used again."""
        return self._pool.copy_of(tensor)

    def recycle(self, copies: Sequence[torch.Tensor]) -> None:
        """See the base class."""
        self._pool.give_back(copies)

    def adopt_thread(self, device: torch.device) -> None:
        """Nothing to do."""

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
