"""What the plugin has to know about a device: how to copy, how a send completes, how to abort a group."""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["Completion", "DeviceBackend", "abort_gloo_group"]

logger = logging.getLogger("vllm.pp_plugin")

# A tag that no vLLM message uses, so that the receive below can never take a real message. Where a host has several
# network interfaces, gloo chooses one by tag % count: vLLM's tag is 0, and this one is divisible by 1 to 16.
_POISON_TAG = 720720
_POISON_TIMEOUT = timedelta(milliseconds=20)


class Completion(enum.Enum):
    """How one learns that a send is over and its buffer is free."""

    WAIT = "wait"
    """Only ``wait()`` tells, once, from a thread that may block (gloo: ``is_completed()`` can be true too
    early, and a second ``wait()`` never returns)."""

    POLL = "poll"
    """``is_completed()`` tells, from any thread and without blocking the device (NCCL, HCCL, XCCL: an event
    query). It is also true for failed work, so ``wait()`` follows once it is true."""


def abort_gloo_group(group: ProcessGroup, group_rank: int) -> None:
    """End everything that is pending on a gloo group, so that threads blocked in ``wait()`` return.

    gloo's own ``abort()`` and ``shutdown()`` leave such threads blocked (tried on torch 2.13); what does end
    them is a wait that times out, since it closes every connection of the group. So a receive that nobody
    will answer is posted and allowed to time out. The group is unusable afterwards.

    Args:
        group: A process group with the gloo backend.
        group_rank: This process's rank in it.
    """
    import torch

    # All of them: the receive from one whose connection is closed already fails at once and closes nothing.
    for other in range(group.size()):
        if other == group_rank:
            continue
        try:
            group.recv([torch.empty(1, device="cpu")], other, _POISON_TAG).wait(_POISON_TIMEOUT)
        except RuntimeError:
            continue  # the time-out that closes the connections, or they are closed already


def _transport(group: ProcessGroup, device_type: str) -> str | None:
    """Name of the backend that serves a device in a group, or None."""
    import torch

    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return None


class DeviceBackend:
    """A device as the plugin sees it. Vendors derive from this class and return it from their hook.

    The defaults are those of an accelerator with a PyTorch backend whose collective works can be polled.

    Attributes:
        name: ``torch.device.type`` of the device, e.g. ``"npu"``.
        communicator_name: Prefix of the composed communicator class: ``"Npu"`` gives ``NpuPPCommunicator``.
    """

    name: str = ""
    communicator_name: str = ""

    def private_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy that only the send owns.

        On a device it is enqueued on the current stream, like the send after it, so no event and no
        ``record_stream`` is needed: the collective library orders its own stream after the current one, and
        the ledger keeps the copy until the send's work has completed.

        Args:
            tensor: Any strided tensor; not modified.

        Returns:
            A new tensor of the same shape and dtype, in contiguous layout.
        """
        import torch

        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def recycle(self, copies: Sequence[torch.Tensor]) -> None:
        """Take back private copies that nobody reads any more; by default they are just dropped.

        Called by a helper thread, and never for a send that failed.
        """

    def adopt_thread(self, device: torch.device) -> None:
        """Make ``device`` current in the calling thread.

        Called first in each helper thread of a group: a new thread starts on device 0, where asking a work would
        open a context of its own (CUDA), or has no context at all (Ascend).
        """
        import torch

        module = getattr(torch, self.name, None)
        set_device = getattr(module, "set_device", None)
        if device.index is not None and set_device is not None:
            set_device(device)

    def completion(self, tensor: torch.Tensor) -> Completion:
        """How a send of ``tensor`` completes. CPU tensors travel on gloo on every platform."""
        return Completion.WAIT if tensor.is_cpu else Completion.POLL

    def abort_device_group(self, group: ProcessGroup) -> None:
        """End what is pending on the device's group. Called from a helper thread, at most once."""
        import torch

        backend = group._get_backend(torch.device(self.name))
        abort = getattr(backend, "abort", None)
        if callable(abort):
            abort()

    def abort(self, groups: Sequence[ProcessGroup], group_rank: int) -> None:
        """End what is pending on ``groups`` (the cpu group and, where it differs, the device group).

        A group that cannot be ended is logged and does not save the others.
        """
        for group in groups:
            for end in self._ends(group, group_rank):
                try:
                    end()
                except Exception:  # whatever a transport raises when it is already broken
                    logger.exception("a group could not be aborted")

    def _ends(self, group: ProcessGroup, group_rank: int) -> list[Callable[[], None]]:
        """How to end a group: it may hold gloo, the device's transport, or both.

        The group itself is asked, since torch.distributed names mixed groups "cpu:gloo,cuda:nccl" and forgets groups
        that were destroyed.
        """
        ends: list[Callable[[], None]] = []
        if _transport(group, "cpu") == "gloo":
            ends.append(functools.partial(abort_gloo_group, group, group_rank))
        if _transport(group, self.name) not in (None, "gloo"):
            ends.append(functools.partial(self.abort_device_group, group))
        return ends

    def available(self) -> bool:
        """Whether such a device is present in this process. Must not initialise it."""
        import torch

        module = getattr(torch, self.name, None)
        return bool(module is not None and module.is_available())

    def describe(self) -> dict[str, Any]:
        """Facts for ``vllm-pp doctor``: strings and numbers only."""
        return {"name": self.name, "available": self.available(), "evidence": "written, never run on hardware"}
