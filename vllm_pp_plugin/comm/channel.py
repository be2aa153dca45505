"""Messages from one rank to others of its group, in stock vLLM's wire format, without waiting.

A message is a dictionary of tensors and other values. On the wire it is: the length of the pickled metadata
(one int64), the pickle, then every tensor that is not empty. The first two and all CPU tensors travel on the
cpu group, device tensors on the device group; each peer takes them in the order sent.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vllm_pp_plugin.comm.handles import SOURCE_REUSABLE, SourceReusable
from vllm_pp_plugin.comm.header import Header
from vllm_pp_plugin.comm.ledger import LedgerStats, PendingSend, SendLedger
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.devices.base import Completion, DeviceBackend
from vllm_pp_plugin.errors import DrainTimeoutError, SendFailedError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SendChannel"]


class SendChannel:
    """The sending side of a group.

    Args:
        name: The group's name, e.g. ``"pp:0"``.
        cpu_group: gloo group for metadata and CPU tensors.
        device_group: The device's group; may be the cpu group.
        ranks: Global ranks of the group, in group order.
        rank_in_group: This process's place in ``ranks``.
        backend: The device.
        config: Bounds and times.
        device: The rank's device, which the channel's threads make current.
    """

    def __init__(
        self,
        name: str,
        cpu_group: ProcessGroup,
        device_group: ProcessGroup,
        ranks: Sequence[int],
        rank_in_group: int,
        backend: DeviceBackend,
        config: PluginConfig,
        device: torch.device,
    ) -> None:
        self.name = name
        self.backend = backend
        self._cpu_group = cpu_group
        self._device_group = device_group
        self._ranks = list(ranks)
        self._rank_in_group = rank_in_group
        # A message is several sends; two threads must not mix theirs.
        self._wire = threading.Lock()
        self._ledger = SendLedger(name, config, self._abort, lambda: backend.adopt_thread(device))

    def isend(
        self,
        header: Header,
        tensors: Sequence[tuple[str, torch.Tensor]],
        dst: int,
        *,
        donate: bool = False,
    ) -> list[SourceReusable]:
        """Send without waiting; every source may be overwritten or freed when this returns.

        Blocks only at the bounds ``max_pending_sends`` and ``max_retained_bytes``.

        Args:
            header: What the receiver takes first.
            tensors: Names and tensors, without the empty ones, in the order the receiver expects.
            dst: Rank in the group.
            donate: The caller gives the tensors away and will not write to them again: no copy is made of
                those that are contiguous.

        Returns:
            One handle for the metadata, then one a tensor; each may be waited for, which returns at once.

        Raises:
            SendError: An earlier send failed, the deadline passed, or the group is closed.
        """
        self._post(header, tensors, dst, donate)
        return [SOURCE_REUSABLE] * (1 + len(tensors))

    def send(self, header: Header, tensors: Sequence[tuple[str, torch.Tensor]], dst: int) -> None:
        """Send, and return when the peer has taken it; nothing stays in flight. See :meth:`isend`."""
        self._ledger.wait(self._post(header, tensors, dst, donate=True))

    def drain(self, deadline_s: float | None = None) -> None:
        """Block until nothing is in flight.

        Args:
            deadline_s: Seconds; by default ``drain_deadline_s``.

        Raises:
            DrainTimeoutError: Something is still in flight then.
        """
        self._ledger.drain(deadline_s)

    def close(self, deadline_s: float | None = None) -> DrainTimeoutError | None:
        """Drain and end the channel's threads; what is late is aborted. Safe to call again."""
        return self._ledger.close(deadline_s)

    def stats(self) -> LedgerStats:
        """Counters."""
        return self._ledger.stats()

    def _post(
        self, header: Header, tensors: Sequence[tuple[str, torch.Tensor]], dst: int, donate: bool
    ) -> PendingSend:
        peer = self._ranks[dst]
        nbytes = header.nbytes + sum(t.numel() * t.element_size() for _, t in tensors)
        with self._ledger.admit(peer, tuple(key for key, _ in tensors), nbytes) as send:
            # All copies before the first byte leaves: an error here (out of memory) must not leave the
            # peer with half a message.
            owned: list[torch.Tensor] = []
            copies: list[torch.Tensor] = []
            for _, tensor in tensors:
                if donate and tensor.is_contiguous():
                    owned.append(tensor)
                else:
                    copies.append(self.backend.private_copy(tensor))
                    owned.append(copies[-1])
            if copies:
                send.recycle = lambda: self.backend.recycle(copies)
            with self._wire:
                self._put(send, header.length, peer, Completion.WAIT)
                self._put(send, header.pickled, peer, Completion.WAIT)
                for tensor in owned:
                    self._put(send, tensor, peer, self.backend.completion(tensor))
        return send

    def _put(self, send: PendingSend, tensor: torch.Tensor, peer: int, rule: Completion) -> None:
        send.retained.append(tensor)
        group = self._cpu_group if tensor.is_cpu else self._device_group
        try:
            work = dist.isend(tensor, dst=peer, group=group)
        except RuntimeError as exc:
            # A connection that broke since the last look of the drain; torch names an address, we name the rank.
            raise SendFailedError(
                f"group {self.name}: cannot send to rank {peer} ({send.names}): {exc}. "
                f"Rank {peer} may have ended (look at its log), or the transport refuses "
                f"{tensor.dtype} on {tensor.device}",
                peer=peer,
                keys=send.keys,
            ) from exc
        if work is not None:
            send.works.append((rule, work))

    def _abort(self) -> None:
        groups = [self._cpu_group]
        if self._device_group is not self._cpu_group:
            groups.append(self._device_group)
        self.backend.abort(groups, self._rank_in_group)
