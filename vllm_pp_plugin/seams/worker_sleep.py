"""``Worker.sleep``: nothing may be in flight when a worker gives its memory or its groups back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_pp_plugin.comm.communicator import open_channels
from vllm_pp_plugin.seams.seam import Seam, SeamInfo

__all__ = ["worker_sleep"]


def worker_sleep(worker_class: type | None) -> Seam:
    """The seam on the class in whose body the worker's ``sleep`` stands (vLLM's or a vendor's).

    Args:
        worker_class: The worker's class, or None to look at vLLM's own GPU worker.
    """
    owner = None
    target = "vllm.v1.worker.gpu_worker:Worker.sleep"
    if worker_class is not None:
        owner = next((c for c in worker_class.__mro__ if "sleep" in c.__dict__), worker_class)
        target = f"{owner.__module__}:{owner.__qualname__.split('.')[-1]}.sleep"

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
            for channel in open_channels():
                channel.drain()
            return original(self, *args, **kwargs)

        return sleep

    return Seam(
        SeamInfo(
            target=target,
            feature="async_sends",
            why="vllm-ascend waits for the send handles before it destroys its HCCL groups on sleep; our "
            "handles do not wait for the peer. vLLM up to 0.28 has no other fence.",
            how="Drains every open channel first; an error after drain_deadline_s, with everything kept. In a worker "
            "it is the class in whose body its own sleep stands; `vllm-pp doctor` shows vLLM's GPU worker.",
            versions="0.23.0 and later",
            removal="with isend_tensor_dict",
        ),
        parameters=("self", "level"),
        make=make,
        owner=owner,
    )
