"""Pipeline groups inside a rank process: real vLLM coordinators, with or without the plugin."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vllm_pp_plugin import config, plugin
from vllm_pp_plugin.seams.standalone import make_coordinator


def arm(worker_class: type | None = None, **settings: Any) -> None:
    """Install the plugin's seams in this process, as a worker does."""
    from vllm_pp_plugin.seams.facts import Situation

    plugin.settle(config.parse({"async_sends": True, **settings}), Situation("cpu", 2, True, worker_class))


@contextmanager
def plugin_group(settings: dict[str, Any] | None = None, ranks: list[list[int]] | None = None):
    """A pipeline group with the plugin; destroyed at the end."""
    arm(**(settings or {}))
    group = make_coordinator(group_ranks=ranks)
    try:
        yield group
    finally:
        group.destroy()
        plugin.disarm()


@contextmanager
def stock_group():
    """A pipeline group of stock vLLM."""
    plugin.disarm()
    group = make_coordinator()
    try:
        yield group
    finally:
        group.destroy()


def barrier() -> None:
    """All ranks of the world meet."""
    dist.barrier()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two messages are the same: keys in order, dtypes, shapes and bits."""
    if list(left) != list(right):
        return False
    for key, value in left.items():
        other = right[key]
        if isinstance(value, torch.Tensor):
            same = (
                isinstance(other, torch.Tensor)
                and value.dtype == other.dtype
                and value.shape == other.shape
                and torch.equal(_bits(value), _bits(other))
            )
            if not same:
                return False
        elif value != other:
            return False
    return True
