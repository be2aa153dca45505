"""Real vLLM with pipeline parallelism gives the tokens and logprobs of one rank: the oracle is PP=1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import OLD, VERSIONS
from tests.support.engine import prompts, run_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

# Chunks of 128 tokens; several requests at once, some far longer than a chunk; the second round repeats the first
# (prefix cache) and adds new requests.
ENGINE = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "enable_prefix_caching": True}
FIRST = prompts(9, 3, 700, seed=1)
REQUESTS = [
    {"prompts": FIRST, "max_tokens": 24},
    {"prompts": [*FIRST, *prompts(3, 100, 400, seed=2)], "max_tokens": 24},
]
SAME_KERNELS = 5e-6
"""fp32 noise in logprobs between one rank and two, both eager: 5e-7 seen."""
OTHER_KERNELS = 5e-5
"""The same where compiled kernels or TP's all-reduce sum in another order: 1.1e-5 seen, stock vLLM too."""

ON = {"async_sends": True, "cpu_eager_pp": True}
OFF = {"async_sends": False, "cpu_eager_pp": False}
SEND_SEAMS = {
    "DeviceCommunicatorBase.__init__",
    "GroupCoordinator.isend_tensor_dict",
    "GroupCoordinator.send_tensor_dict",
    "GroupCoordinator.destroy",
    "CPUWorker.sleep",
}
REPAIR = "CPUModelRunner.sync_and_gather_intermediate_tensors"

VLLM = pytest.mark.parametrize("vllm", [None, OLD], ids=[VERSIONS["main"], OLD])


@pytest.fixture(scope="module")
def oracle() -> Callable[[str | None], dict[str, Any]]:
    """The answers of one rank, by vLLM version; computed once."""
    known: dict[str | None, dict[str, Any]] = {}

    def get(vllm: str | None) -> dict[str, Any]:
        if vllm not in known:
            known[vllm] = run_engine({**ENGINE, "enforce_eager": True}, REQUESTS, vllm=vllm, plugin=ON)
        return known[vllm]

    return get


def installed(worker: dict[str, Any]) -> set[str]:
    """Short names of the seams that are in vLLM's classes in a worker."""
    return {row["target"].split(":")[1] for row in worker["seams"] if row["state"] == "installed"}


def check_answers(result: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Same tokens, logprobs within fp32 noise, and the second round really used the prefix cache."""
    compared = 0
    for answers, wanted in zip(result["answers"], expected["answers"], strict=True):
        for answer, want in zip(answers, wanted, strict=True):
            assert answer["tokens"] == want["tokens"]
            worst = max(abs(a - b) for a, b in zip(answer["logprobs"], want["logprobs"], strict=True))
            assert worst <= tolerance
            compared += len(want["tokens"])
    assert compared == 24 * (9 + 12)
    assert sum(answer["cached"] for answer in result["answers"][1]) > 1000


def check_on(result: dict[str, Any], seams: set[str]) -> None:
    """Both workers run on our sends, and nothing was left in flight or went wrong."""
    assert result["returncode"] == 0
    first, last = result["workers"]
    assert installed(first) == installed(last) == seams
    assert any("vllm_pp_plugin" in path for path in first["files"])
    assert first["problems"] == last["problems"] == []
    (channel,) = first["channels"]
    assert channel["name"] == "pp:0"
    assert channel["sends"] > 30
    assert "terminate called" not in result["log"]
    lines = [line for line in result["log"].splitlines() if "vllm-pp-plugin 0" in line]
    assert len(lines) == 1, "one line at the start says what is on"
    assert "INFO" in lines[0]
    assert "async_sends" in lines[0]


@VLLM
def test_eager(vllm: str | None, oracle: Callable[[str | None], dict[str, Any]]) -> None:
    """Eager mode, which stock vLLM on CPU cannot run with two ranks; workers are spawned."""
    result = run_engine(
        {**ENGINE, "enforce_eager": True, "pipeline_parallel_size": 2},
        REQUESTS,
        vllm=vllm,
        plugin=ON,
        VLLM_WORKER_MULTIPROCESSING_METHOD="spawn",
    )
    check_answers(result, oracle(vllm), SAME_KERNELS)
    check_on(result, SEND_SEAMS | {REPAIR})


@VLLM
def test_compiled(vllm: str | None, oracle: Callable[[str | None], dict[str, Any]]) -> None:
    """Compiled, with the settings of a user who says nothing."""
    result = run_engine({**ENGINE, "pipeline_parallel_size": 2}, REQUESTS, vllm=vllm, timeout=500)
    check_answers(result, oracle(vllm), OTHER_KERNELS)
    check_on(result, SEND_SEAMS)


@VLLM
def test_everything_off(vllm: str | None, oracle: Callable[[str | None], dict[str, Any]]) -> None:
    """Installed but off is stock: no seam and no door is left in the workers, and the tokens are right."""
    result = run_engine({**ENGINE, "pipeline_parallel_size": 2}, REQUESTS, vllm=vllm, plugin=OFF, timeout=500)
    check_answers(result, oracle(vllm), OTHER_KERNELS)
    for worker in result["workers"]:
        names = {row["target"].split(":")[1] for row in worker["seams"]}
        assert names >= SEND_SEAMS | {REPAIR, "EngineArgs.create_engine_config", "WorkerBase.__init__"}
        assert {row["state"] for row in worker["seams"]} == {"not installed"}
        # Not our own bookkeeping: where the code of the methods is.
        assert all("vllm_pp_plugin" not in path for path in worker["files"]), worker["files"]
        assert {row["state"] for row in worker["features"]} == {"off"}
        assert worker["channels"] == []


@VLLM
def test_nothing_to_do_on_one_rank(vllm: str | None, oracle: Callable[[str | None], dict[str, Any]]) -> None:
    """The oracle itself ran with the plugin installed and asked for, and without any seam."""
    (worker,) = oracle(vllm)["workers"]
    assert installed(worker) == set()
    assert {row["state"] for row in worker["features"]} == {"not needed"}


def test_tensor_and_pipeline_parallel(oracle: Callable[[str | None], dict[str, Any]]) -> None:
    """TP=2 x PP=2: slices through the all-gather; workers are forked from the engine's process."""
    result = run_engine(
        {**ENGINE, "enforce_eager": True, "pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        REQUESTS,
        plugin=ON,
        timeout=500,
        VLLM_WORKER_MULTIPROCESSING_METHOD="fork",
    )
    check_answers(result, oracle(None), OTHER_KERNELS)
    assert len(result["workers"]) == 4
    assert all(installed(worker) == SEND_SEAMS | {REPAIR} for worker in result["workers"])
    assert [len(worker["channels"]) for worker in result["workers"]] == [1, 1, 1, 1]


def test_stock_eager_dies() -> None:
    """What the repair repairs; when this fails, vLLM has repaired it and the seam can go."""
    with pytest.raises(AssertionError) as caught:
        run_engine(
            {**ENGINE, "enforce_eager": True, "pipeline_parallel_size": 2},
            REQUESTS[:1],
            plugin={"cpu_eager_pp": False},
        )
    assert "assert self.intermediate_tensors is not None" in str(caught.value)
