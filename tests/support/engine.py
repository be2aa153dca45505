"""Starts real vLLM engines on this machine's CPU for the tests."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.world import ROOT

MODELS = ROOT / ".cache" / "models"


def toy_model(**recipe: Any) -> Path:
    """The toy model, built once per recipe by an interpreter of its own (it needs torch)."""
    name = "toy-" + "-".join(f"{k}{v}" for k, v in sorted(recipe.items())) if recipe else "toy"
    code = (
        "import json, sys, pathlib; from vllm_pp_plugin.bench.toy_model import build; "
        "build(pathlib.Path(sys.argv[1]), **json.loads(sys.argv[2]))"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(MODELS / name), json.dumps(recipe)],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    return MODELS / name


def environment(ranks: int, vllm: str | None = None, **extra: str) -> dict[str, str]:
    """Environment of an engine with ``ranks`` workers, which share this machine's two cores."""
    path = [str(ROOT), *extra.pop("PYTHONPATH", "").split(os.pathsep)]
    if vllm is not None:
        path.insert(0, str(ROOT / ".cache" / "vllm" / vllm))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(r % 2) for r in range(ranks)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc with a function of the tests
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def run_engine(
    llm: dict[str, Any],
    requests: list[dict[str, Any]],
    *,
    vllm: str | None = None,
    plugin: dict[str, Any] | None = None,
    timeout: float = 280,
    main: str = "tests.support.engine_main",
    **extra: str,
) -> dict[str, Any]:
    """Start an engine, ask, stop it.

    Args:
        llm: Arguments of ``LLM``; ``pipeline_parallel_size`` and ``tensor_parallel_size`` count the workers.
        requests: ``{"prompts": [[token ids]], "max_tokens": n}``, asked one after the other.
        vllm: Version under ``.cache/vllm``, or None for the environment's own.
        plugin: ``additional_config["pp_plugin"]``.
        timeout: Seconds for everything.
        main: Module to run.
        extra: Further environment.

    Returns:
        What :mod:`tests.support.engine_main` wrote, plus ``"log"``.
    """
    ranks = llm.get("pipeline_parallel_size", 1) * llm.get("tensor_parallel_size", 1)
    arguments = {
        "model": str(toy_model()),
        # vLLM's "auto" would run it in bf16, where compiled or TP kernels differ by 0.1 in logprobs.
        "dtype": "float32",
        "max_model_len": 2048,
        "disable_log_stats": True,
        **llm,
    }
    if plugin is not None:
        arguments["additional_config"] = {"pp_plugin": plugin}
    with tempfile.TemporaryDirectory(prefix="pp-engine-") as folder:
        order, result, log = (Path(folder) / name for name in ("order.json", "result.json", "log"))
        order.write_text(json.dumps({"llm": arguments, "requests": requests}))
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", main, str(order), str(result)],
                cwd=ROOT,
                env=environment(ranks, vllm, **extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                # The workers too, or they would slow every later test.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError(
                    f"no end within {timeout} s:\n{log.read_text(errors='replace')[-6000:]}"
                ) from None
        text = log.read_text(errors="replace")
        if not result.exists():
            raise AssertionError(f"the engine ended with {process.returncode}:\n{text[-6000:]}")
        return {**json.loads(result.read_text()), "log": text, "returncode": process.returncode}


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    """``count`` random prompts of ``low`` to ``high`` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randint(low, high))] for _ in range(count)]
