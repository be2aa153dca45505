"""What the ranks of the fault tests do."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.support.groups import arm
from vllm_pp_plugin.errors import SendError
from vllm_pp_plugin.seams.standalone import make_coordinator

_group: Any = None
_DEADLINE_S = 50.0


def build_group(**settings: Any) -> None:
    """A pipeline group that lives on between scenarios."""
    global _group
    arm(**settings)
    _group = make_coordinator()
    dist.barrier()


def _send() -> None:
    _group.isend_tensor_dict({"hidden_states": torch.ones(300_000), "residual": torch.ones(300_000)})


def send_some() -> None:
    """Messages that nobody takes."""
    for _ in range(3):
        _send()


def send_until_error() -> dict[str, Any]:
    """Send now and then until the plugin raises; what it said."""
    begun = time.monotonic()
    while time.monotonic() - begun < _DEADLINE_S:
        try:
            _send()
        except SendError as exc:
            seconds = time.monotonic() - begun
            channel = _group.device_communicator.pp_channel
            try:
                _send()
                again = "none"
            except SendError as second:
                again = type(second).__name__
            channel.drain(10)
            return {
                "error": type(exc).__name__,
                "peer": exc.peer,
                "keys": exc.keys,
                "text": str(exc),
                "again": again,
                "seconds": seconds,
                "pending": channel.stats().pending,
            }
        time.sleep(0.1)  # the pace of a sender, not synchronisation
    raise AssertionError(f"no error within {_DEADLINE_S} s: {_group.device_communicator.pp_channel.stats()}")


def exit_now() -> None:
    """End the process the ordinary way, without destroying anything."""
    sys.exit(0)


def send_on_a_broken_connection() -> dict[str, Any]:
    """Break every connection of the group from this side, then send: the posting itself fails."""
    from vllm_pp_plugin.devices import abort_gloo_group

    abort_gloo_group(_group.cpu_group, _group.rank_in_group)
    try:
        _send()
    except SendError as exc:
        return {"error": type(exc).__name__, "peer": exc.peer, "keys": exc.keys, "text": str(exc)}
    raise AssertionError("the send went through")
