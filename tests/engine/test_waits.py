"""A worker no longer waits for the previous step's send."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OLD, VERSIONS
from tests.support import pace
from tests.support.engine import prompts, run_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize("vllm", [None, OLD], ids=[VERSIONS["main"], OLD])
def test_worker_does_not_wait_for_a_slow_last_rank(tmp_path: Path, vllm: str | None) -> None:
    """Three ranks; each layer of the last one sleeps 20 ms; 640 tokens in chunks of 64.

    The middle rank has its next input while the last rank is still busy with the step before. Stock lets it wait:
    in the send (0.28), or for the last send at the top of the step (0.29 and later). Real engines, sleeping layers;
    stock and plugin differ in one setting. (With two ranks vLLM's window of two never gets that far ahead.)
    """
    path = pace.install(tmp_path)
    records: dict[bool, dict[str, Any]] = {}
    answers = {}
    for async_sends in (False, True):
        result = run_engine(
            {"max_num_batched_tokens": 64, "max_num_seqs": 8, "enforce_eager": True, "pipeline_parallel_size": 3},
            [{"prompts": prompts(5, 128, 128, seed=3), "max_tokens": 4}],
            vllm=vllm,
            plugin={"async_sends": async_sends, "cpu_eager_pp": True},
            PYTHONPATH=path,
            **{pace.SLEEP_ENV: "2:0.02"},
        )
        records[async_sends] = next(w["record"] for w in result["workers"] if w["rank"] == 1)
        answers[async_sends] = [answer["tokens"] for answer in result["answers"][0]]
    assert answers[True] == answers[False]
    stock, ours = (record["wait_s"] + record["isend_s"] for record in (records[False], records[True]))
    steps = records[False]["steps"]
    assert steps >= 10
    assert stock > 0.01 * steps, f"stock did not wait, so this run shows nothing: {records}"
    assert ours < stock / 5, f"stock {stock:.3f} s, plugin {ours:.3f} s over {steps} steps: {records}"
    assert records[True]["wait_s"] < records[False]["wait_s"] / 5 or vllm == OLD, "0.28 waits inside the send"
