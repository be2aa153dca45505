"""What ``ci/demo`` runs in the virtual environment."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from tests.support.engine import prompts, run_engine, toy_model

CONSOLE = Console(width=110, highlight=False)
# Chunks of 128 tokens; several requests, some longer than a chunk; asked twice, so the prefix cache takes part.
ENGINE = {"max_num_batched_tokens": 128, "enforce_eager": True}
PROMPTS = prompts(6, 10, 500, seed=4)
REQUESTS = [{"prompts": PROMPTS, "max_tokens": 16}, {"prompts": PROMPTS, "max_tokens": 16}]


def step(text: str) -> None:
    """Say what is going on: an engine takes half a minute to start."""
    CONSOLE.print(f"[bold]{text}[/bold]")


def main() -> int:
    """Run both engines, compare, print the table; the exit code."""
    begun = time.monotonic()
    step("1/3 building the toy model (a Llama of 5 M parameters, seeded)")
    toy_model()
    step("2/3 vLLM on one rank: the oracle (half a minute)")
    one = run_engine(ENGINE, REQUESTS)
    step("3/3 vLLM on two pipeline ranks, plugin loaded by vLLM itself (half a minute)")
    two = run_engine({**ENGINE, "pipeline_parallel_size": 2}, REQUESTS)

    tokens = wrong = 0
    worst = 0.0
    for answers, wanted in zip(two["answers"], one["answers"], strict=True):
        for answer, want in zip(answers, wanted, strict=True):
            tokens += len(want["tokens"])
            wrong += sum(a != b for a, b in zip(answer["tokens"], want["tokens"], strict=True))
            worst = max(worst, *(abs(a - b) for a, b in zip(answer["logprobs"], want["logprobs"], strict=True)))
    line = next((text for text in two["log"].splitlines() if "vllm-pp-plugin 0" in text), "")
    CONSOLE.print(f"\nvLLM's log says: {line[line.find('vllm-pp-plugin') :]}\n")

    table = Table("rank", "feature", "state", "sends", "most in flight", "most bytes kept", "waits at the bound")
    for worker in two["workers"]:
        channel = worker["channels"][0] if worker["channels"] else {}
        for feature in worker["features"]:
            seen = channel if feature["name"] == "async_sends" else {}
            counters = ("sends", "peak_pending", "peak_retained_bytes", "back_pressure_waits")
            table.add_row(
                str(worker["rank"]), feature["name"], feature["state"], *(str(seen.get(c, "")) for c in counters)
            )
    CONSOLE.print(table)
    CONSOLE.print(
        f"vLLM {two['vllm']}: {tokens} greedy tokens compared with one rank, {wrong} differ; "
        f"largest difference of a logprob {worst:.1e}; {time.monotonic() - begun:.0f} s"
    )
    on = all(f["state"] == "on" for worker in two["workers"] for f in worker["features"])
    if wrong or not on or two["returncode"]:
        CONSOLE.print("[bold red]this is wrong; the engine's log ends:[/bold red]")
        CONSOLE.print(two["log"][-4000:], markup=False)
        return 1
    CONSOLE.print("[bold green]all well[/bold green]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
