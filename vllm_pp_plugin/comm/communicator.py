"""Communicator classes: the platform's own class, plus pipeline sends that keep their own buffers.

``CpuPPCommunicator``, ``CudaPPCommunicator``, ``NpuPPCommunicator``, ``XpuPPCommunicator`` are composed when
they are needed, from whatever class the platform names (a vendor's too)::

    composed = compose(platform_class, "Npu")

Only the communicator of a pipeline group becomes one; TP, EP and DP groups keep the platform's class.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm_pp_plugin.comm import agreement
from vllm_pp_plugin.comm.channel import SendChannel
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.devices.base import DeviceBackend

if TYPE_CHECKING:
    import torch

    from vllm_pp_plugin.comm.handles import SourceReusable
    from vllm_pp_plugin.comm.header import Header

__all__ = ["AGREEMENT_TIMEOUT_S", "AsyncSendMixin", "compose", "open_channels", "sends"]

logger = logging.getLogger("vllm.pp_plugin")

AGREEMENT_TIMEOUT_S = 30.0
"""Seconds that ranks with a shared-memory path wait for the others' votes (ranks build a group together)."""

_open: list[AsyncSendMixin] = []


class AsyncSendMixin:
    """What a pipeline group's communicator has over the platform's.

    The mixin's own ``__init__`` is not used: the channel is opened by :meth:`open_pp_channel`, since a
    platform's class may be built before the plugin sees the object.
    """

    # Facts that every communicator of vLLM has.
    device: torch.device
    cpu_group: Any
    device_group: Any
    ranks: list[int]
    rank_in_group: int
    world_size: int
    unique_name: str

    _pp_channel: SendChannel | None = None
    _pp_platform_dicts: bool | None = None
    _pp_speaks_dicts: bool | None = None
    _pp_voted: bool = False

    def open_pp_channel(self, backend: DeviceBackend, config: PluginConfig) -> None:
        """Make this communicator send asynchronously.

        Args:
            backend: The device.
            config: Bounds and times.
        """
        self._pp_channel = SendChannel(
            self.unique_name,
            self.cpu_group,
            self.device_group if self.device_group is not None else self.cpu_group,
            self.ranks,
            self.rank_in_group,
            backend,
            config,
            self.device,
        )
        _open.append(self)

    @property
    def pp_channel(self) -> SendChannel | None:
        """The channel, or None where the group stays with stock sends."""
        return self._pp_channel

    def pp_isend(
        self,
        header: Header,
        tensors: Sequence[tuple[str, torch.Tensor]],
        dst: int,
        *,
        donate: bool = False,
    ) -> list[SourceReusable]:
        """See :meth:`SendChannel.isend`."""
        assert self._pp_channel is not None
        return self._pp_channel.isend(header, tensors, dst, donate=donate)

    def pp_send(self, header: Header, tensors: Sequence[tuple[str, torch.Tensor]], dst: int) -> None:
        """See :meth:`SendChannel.send`."""
        assert self._pp_channel is not None
        self._pp_channel.send(header, tensors, dst)

    # -- which path: vLLM asks a CPU communicator whether it sends whole dictionaries itself --------------

    @property
    def supports_tensor_dict(self) -> bool:
        """Whether vLLM must send dictionaries through the platform's own (shared-memory) path.

        vLLM reads it once, on every rank, while it builds the group: this is where the ranks agree.
        """
        if self._pp_speaks_dicts is None:
            self._pp_speaks_dicts = self._choose_path()
        return self._pp_speaks_dicts

    @supports_tensor_dict.setter
    def supports_tensor_dict(self, value: bool) -> None:
        self._pp_platform_dicts = value
        self._pp_speaks_dicts = None

    def _choose_path(self) -> bool:
        platform = self._pp_platform_dicts
        if platform is None:
            # Set on the object before it became one of ours, or on its class.
            platform = self.__dict__.get("supports_tensor_dict")
        if platform is None:
            platform = bool(getattr(super(), "supports_tensor_dict", False))
        if self._pp_channel is None:
            return platform
        store = _group_store(self.cpu_group)
        if not self._pp_voted:  # asked again after a change of mind, it still is one rank
            self._pp_voted = True
            agreement.vote(store, self.unique_name, self.world_size)
        if not platform:
            return False  # gloo is stock's path here too, whatever the others do
        if agreement.decide(store, self.unique_name, AGREEMENT_TIMEOUT_S) == agreement.ON:
            return False
        logger.warning(
            "async_sends steps aside on group %s: not every rank has the plugin with async_sends on, and "
            "stock vLLM uses shared memory on this host; all its ranks use shared memory",
            self.unique_name,
        )
        self._close_channel(0.0)
        return True

    # -- fences ------------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Drain, then let the platform release what it can (vLLM's sleep)."""
        self._drain_then("suspend")

    def checkpoint_prepare(self) -> None:
        """Drain, then prepare the platform's state for a checkpoint."""
        self._drain_then("checkpoint_prepare")

    def _drain_then(self, method: str) -> None:
        if self._pp_channel is not None:
            self._pp_channel.drain()
        platform = getattr(super(), method, None)
        if platform is not None:  # older vLLM versions do not have it
            platform()

    def destroy(self) -> None:
        """Close the channel, then destroy the platform's communicator."""
        self.close_pp_channel()
        platform = getattr(super(), "destroy", None)
        if platform is not None:
            platform()

    def close_pp_channel(self, deadline_s: float | None = None) -> None:
        """End what is in flight by the deadline (``drain_deadline_s``); must precede the groups' destruction.

        The channel stays, closed: a later send gets a clear error.
        """
        if self._pp_channel is not None:
            late = self._pp_channel.close(deadline_s)
            if late is not None:
                logger.error("%s. The group was aborted", late)
        if self in _open:
            _open.remove(self)

    def _close_channel(self, deadline_s: float) -> None:
        self.close_pp_channel(deadline_s)
        self._pp_channel = None


def sends(communicator: object) -> TypeGuard[AsyncSendMixin]:
    """Whether a communicator is ours and has not stepped aside."""
    return isinstance(communicator, AsyncSendMixin) and communicator.pp_channel is not None


def open_channels() -> list[SendChannel]:
    """The channels of this process that are open."""
    return [comm.pp_channel for comm in _open if comm.pp_channel is not None]


@functools.cache
def compose(platform_class: type, prefix: str) -> type:
    """The platform's communicator class plus :class:`AsyncSendMixin`.

    Args:
        platform_class: The class that the platform or a vendor builds.
        prefix: First part of the new name: ``"Npu"`` gives ``NpuPPCommunicator``.

    Returns:
        A subclass of both; the same one each time.
    """
    if issubclass(platform_class, AsyncSendMixin):
        return platform_class
    doc = f"{platform_class.__qualname__} with asynchronous pipeline sends."
    return type(f"{prefix}PPCommunicator", (AsyncSendMixin, platform_class), {"__doc__": doc})


def _group_store(group: Any) -> Any:
    from torch.distributed.distributed_c10d import _get_process_group_store

    return _get_process_group_store(group)


# A forked child has the channels' records but not their threads: nothing there is its own to close.
os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    """Close every open channel at exit: a thread left in gloo would end the process by an abort."""
    for comm in list(_open):
        try:
            comm.close_pp_channel()
        except Exception:  # the others must be closed too
            logger.exception("group %s could not be closed", comm.unique_name)
