"""A real vLLM engine in a process of its own: ``python -m tests.support.engine_main ORDER.json RESULT.json``.

The order names the engine's arguments and what to ask of it; the result holds tokens and logprobs, and what
every worker says of the plugin.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def worker_report(worker: Any) -> dict[str, Any]:
    """Run in each worker: the plugin's state there, and the counters of its channels."""
    import dataclasses

    from vllm_pp_plugin import plugin
    from vllm_pp_plugin.comm.communicator import open_channels

    report = plugin.report()
    from vllm.distributed.parallel_state import GroupCoordinator

    own = type(worker.worker)  # vLLM hands its wrapper over
    methods = (
        GroupCoordinator.isend_tensor_dict,
        GroupCoordinator.destroy,
        own.__mro__[-2].__init__,
        own.sleep,
    )
    report["files"] = [method.__code__.co_filename for method in methods]
    report["rank"] = worker.rank
    report["record"] = getattr(worker, "pp_test_record", None)
    report["channels"] = [{"name": c.name, **dataclasses.asdict(c.stats())} for c in open_channels()]
    return report


def ask(llm: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy answers with logprobs: one record a prompt."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (sample,) = output.outputs
        tokens = list(sample.token_ids)
        logprobs = [step[token].logprob for step, token in zip(sample.logprobs, tokens, strict=True)]
        answers.append({"tokens": tokens, "logprobs": logprobs, "cached": output.num_cached_tokens or 0})
    return answers


def main(order_path: str, result_path: str) -> None:
    import vllm
    from vllm import LLM

    order = json.loads(Path(order_path).read_text())
    started = time.monotonic()
    llm = LLM(**order["llm"])
    result: dict[str, Any] = {"vllm": vllm.__version__, "start_s": time.monotonic() - started, "answers": []}
    for request in order["requests"]:
        begun = time.monotonic()
        result["answers"].append(ask(llm, request))
        result.setdefault("seconds", []).append(time.monotonic() - begun)
        print(f"asked {len(request['prompts'])} prompts", flush=True)
    result["workers"] = llm.collective_rpc(worker_report)
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
