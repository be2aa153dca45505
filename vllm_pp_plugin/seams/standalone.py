"""A pipeline group outside an engine, for benchmarks and tests: vLLM's own coordinator over all ranks."""

from __future__ import annotations

from typing import Any

__all__ = ["make_coordinator"]


def make_coordinator(name: str = "pp", backend: str = "gloo", group_ranks: list[list[int]] | None = None) -> Any:
    """Build a ``GroupCoordinator``; torch.distributed must be initialised.

    Args:
        name: Group name. "pp" makes it a pipeline group, which is the plugin's where its seams are installed.
        backend: torch.distributed backend of the device group.
        group_ranks: Global ranks of every group; by default one group of all.
    """
    import torch.distributed as dist
    from vllm.distributed.parallel_state import GroupCoordinator

    return GroupCoordinator(
        group_ranks=group_ranks or [list(range(dist.get_world_size()))],
        local_rank=dist.get_rank(),
        torch_distributed_backend=backend,
        use_device_communicator=True,
        group_name=name,
    )
