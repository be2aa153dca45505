"""All ranks of a group speak the same transport, or a rank hangs.

On CPU hosts with AVX-512, stock vLLM sends pipeline messages through shared memory, whereas this package
speaks gloo. So the ranks agree when the group is built. A collective would hang where a rank does not have
the plugin, hence a vote in the group's key-value store: "on" needs every rank's vote, and anybody whose
patience ends writes "aside" instead. The first decision written stands for all.
"""

from __future__ import annotations

import datetime
from typing import Any, Protocol

__all__ = ["ASIDE", "ON", "Store", "decide", "vote"]

ON = "on"
ASIDE = "aside"

_PREFIX = "vllm_pp_plugin/async_sends"


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> Any: ...


def vote(store: Store, group: str, world_size: int) -> None:
    """Say that this rank can speak gloo. The last of the group writes the decision.

    Args:
        store: The group's key-value store.
        group: The group's unique name, the same on all its ranks.
        world_size: Ranks in the group.
    """
    if store.add(f"{_PREFIX}/{group}/votes", 1) == world_size:
        store.compare_set(f"{_PREFIX}/{group}/decision", "", ON)


def decide(store: Store, group: str, timeout_s: float) -> str:
    """The decision of the group.

    Args:
        store: The group's key-value store.
        group: The group's unique name.
        timeout_s: Seconds to wait for the other ranks; then this rank decides to step aside, unless the
            others have decided in that very moment.

    Returns:
        ``"on"`` or ``"aside"``: the same on every rank that asks, whenever it asks.
    """
    key = f"{_PREFIX}/{group}/decision"
    try:
        store.wait([key], datetime.timedelta(seconds=timeout_s))
    except RuntimeError:
        pass  # torch's stores report a time-out as DistStoreError, a RuntimeError
    return store.compare_set(key, "", ASIDE).decode()
