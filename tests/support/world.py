"""A few real processes joined by gloo, kept alive over many scenarios (importing vLLM takes seconds)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class RankError(AssertionError):
    """A scenario raised in one of the ranks."""


class World:
    """Starts ``size`` processes; each runs scenarios (functions of a test module) by name.

    Args:
        size: Number of processes.
        vllm: Version that lies under ``.cache/vllm``, or None for the one in the environment.
        env: Further environment.
    """

    def __init__(self, size: int, vllm: str | None = None, env: dict[str, str] | None = None) -> None:
        self.size = size
        self.broken = False
        self._dir = tempfile.TemporaryDirectory(prefix="pp-world-")
        address = str(Path(self._dir.name) / "control")
        listener = Listener(address, family="AF_UNIX")
        path = [str(ROOT)]
        if vllm is not None:
            path.insert(0, str(ROOT / ".cache" / "vllm" / vllm))
        base = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **(env or {})}
        self.logs = [Path(self._dir.name) / f"rank{r}.log" for r in range(size)]
        self.processes = []
        for rank in range(size):
            with self.logs[rank].open("w") as log:
                command = [sys.executable, "-m", "tests.support.rank", address, str(rank), str(size), self._dir.name]
                self.processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=base, stdout=log, stderr=subprocess.STDOUT)
                )
        self._pipes: dict[int, Connection] = {}
        for _ in range(size):
            pipe = listener.accept()
            self._pipes[pipe.recv()] = pipe
        listener.close()

    def run(self, scenario: str, timeout: float = 120, ranks: list[int] | None = None, **kwargs: Any) -> list[Any]:
        """Run ``module:function(**kwargs)`` on every rank (or on ``ranks``); their results, by rank.

        Raises:
            RankError: With the traceback of every rank that failed, or the log of one that did not answer.
        """
        chosen = range(self.size) if ranks is None else ranks
        for rank in chosen:
            self._pipes[rank].send((scenario, kwargs))
        return self.collect(timeout, list(chosen))

    def start(self, scenario: str, ranks: list[int], **kwargs: Any) -> None:
        """Start a scenario and come back; :meth:`collect` fetches the results."""
        for rank in ranks:
            self._pipes[rank].send((scenario, kwargs))

    def collect(self, timeout: float, ranks: list[int]) -> list[Any]:
        """Results of the scenarios that run on ``ranks``."""
        deadline = time.monotonic() + timeout
        waiting = {self._pipes[rank]: rank for rank in ranks}
        results: dict[int, Any] = {}
        failures: list[str] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                failures += [f"rank {rank} did not answer\n{self.log(rank)}" for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                except EOFError:
                    ok, results[rank] = False, f"ended\n{self.log(rank)}"
                if not ok:
                    failures.append(f"rank {rank}: {results[rank]}")
                    # The others may wait for this one for ever.
                    deadline = min(deadline, time.monotonic() + 10)
        if failures:
            self.broken = True
            raise RankError("\n".join(failures))
        return [results[rank] for rank in ranks]

    def log(self, rank: int) -> str:
        """The last of what a rank printed."""
        return self.logs[rank].read_text(errors="replace")[-4000:]

    def close(self, timeout: float = 20) -> list[int]:
        """End all ranks in order; their exit statuses. A rank that hangs is killed and reported as -9."""
        timeout = 0 if self.broken else timeout
        for pipe in self._pipes.values():
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                pass  # that rank is gone already, as some scenarios want it
        statuses = []
        for process in self.processes:
            try:
                statuses.append(process.wait(timeout))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses.append(process.wait())
        for pipe in self._pipes.values():
            pipe.close()
        self._dir.cleanup()
        return statuses
