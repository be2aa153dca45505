"""``CPUModelRunner``: makes the receive buffer that eager mode with pipeline parallelism lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_pp_plugin.seams.seam import Seam, SeamInfo

__all__ = ["cpu_eager_pp"]


def cpu_eager_pp() -> Seam:
    """The seam. The method stands on GPUModelRunner; only the CPU runner's class is given the wrapper."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.intermediate_tensors is None:
                self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                    batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
                )
            return original(self, *args, **kwargs)

        return sync_and_gather_intermediate_tensors

    return Seam(
        SeamInfo(
            target="vllm.v1.worker.cpu_model_runner:CPUModelRunner.sync_and_gather_intermediate_tensors",
            feature="cpu_eager_pp",
            why="With enforce_eager=True the CPU warm-up returns before the dummy run that makes this buffer, "
            "and the first request dies: assert self.intermediate_tensors is not None.",
            how="Makes the buffer on first use, with the arguments of the dummy run.",
            versions="seen in 0.28.0, 0.31.0 and 0.32.0",
            removal="when the CPU runner makes the buffer in eager mode",
        ),
        parameters=("self", "num_tokens", "intermediate_tensors", "sync_self"),
        make=make,
    )
