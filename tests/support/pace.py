"""A vLLM plugin of the tests: slows decoder layers down and times what a worker waits for.

It is loaded by vLLM through an entry point of its own (see :func:`install`), in every process. Layers are paced by
a sleep, so that a rank is slow without using a core; everything else is real.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

SLEEP_ENV = "PP_TEST_LAYER_SLEEP"  # "rank:seconds", a layer of that pipeline rank sleeps so long


def install(folder: Path) -> str:
    """Write a distribution with the entry point into ``folder``; put the result on PYTHONPATH."""
    info = folder / "pp_test_pace-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pp-test-pace\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npp_test_pace = tests.support.pace:register\n")
    return str(folder)


class _Timed:
    """A send handle whose wait() is timed."""

    def __init__(self, handle: Any, record: dict[str, float]) -> None:
        self._handle, self._record = handle, record

    def is_completed(self) -> bool:
        return bool(self._handle.is_completed())

    def wait(self) -> None:
        begun = time.perf_counter()
        self._handle.wait()
        self._record["wait_s"] += time.perf_counter() - begun


def register() -> None:
    """Wrap the worker's step and the decoder layer."""
    from vllm.model_executor.models.llama import LlamaDecoderLayer
    from vllm.v1.worker.gpu_worker import Worker

    if hasattr(Worker, "pp_test_record"):
        return
    Worker.pp_test_record = {"steps": 0, "wait_s": 0.0, "isend_s": 0.0}
    step = Worker.execute_model

    @functools.wraps(step)
    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        record = Worker.pp_test_record
        record["steps"] += 1
        self._pp_send_work = [_Timed(handle, record) for handle in self._pp_send_work]
        _time_isend(record)
        return step(self, *args, **kwargs)

    Worker.execute_model = execute_model
    slow_rank, seconds = os.environ[SLEEP_ENV].split(":")
    forward = LlamaDecoderLayer.forward

    @functools.wraps(forward)
    def paced(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.distributed.parallel_state import get_pp_group

        if get_pp_group().rank_in_group == int(slow_rank):
            time.sleep(float(seconds))
        return forward(self, *args, **kwargs)

    LlamaDecoderLayer.forward = paced


def _time_isend(record: dict[str, float]) -> None:
    """Time the pipeline group's sends, whoever makes them."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if "isend_tensor_dict" in vars(group):
        return
    isend = group.isend_tensor_dict

    def isend_tensor_dict(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return isend(*args, **kwargs)
        finally:
            record["isend_s"] += time.perf_counter() - begun

    group.isend_tensor_dict = isend_tensor_dict
