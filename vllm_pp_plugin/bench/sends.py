"""``vllm-pp bench sends``: how long a pipeline send blocks its caller, stock and plugin in one run.

Two processes on this machine, joined by gloo, send through real vLLM coordinators. Stock and plugin take turns
within each case, so that both see the same machine. The plugin's source is overwritten right after the call, as
a model does with its buffers; stock's only after its handles were waited for, which its contract asks.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any, TextIO

from vllm_pp_plugin import config, plugin
from vllm_pp_plugin.errors import PPPluginError

__all__ = ["render", "run"]

_KIB, _MIB = 1024, 1024 * 1024
_DELAYS_MS = (0, 1, 100)
_CASES = ((4 * _KIB, 1), (2 * _MIB, 2), (64 * _MIB, 1))  # bytes of a tensor, tensors in a message
_DEADLINE_S = 120.0
_WRONG = -1.0


def _percentile_99(values: list[float]) -> float:
    """With fewer than 100 values this is the largest."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def _ms(seconds: list[float]) -> list[float]:
    return [1000 * s for s in seconds]


class _Side:
    """One arm of a case in one process: a group, and what was measured on it."""

    def __init__(self, name: str, size: int, count: int) -> None:
        import torch

        from vllm_pp_plugin.seams.facts import Situation
        from vllm_pp_plugin.seams.standalone import make_coordinator

        self.is_plugin = name == "plugin"
        plugin.settle(config.parse({"async_sends": self.is_plugin, "cpu_eager_pp": False}), Situation("cpu", 2, True))
        self.group = make_coordinator()
        self.sources = [torch.empty(size // 4) for _ in range(count)]
        self.blocked: list[float] = []
        self.reuse: list[float] = []
        self.copies: list[float] = []
        self.corrupted = 0

    def send(self, turn: int) -> None:
        for source in self.sources:
            source.fill_(turn)
        message = {f"tensor{i}": source for i, source in enumerate(self.sources)}
        begun = time.perf_counter()
        handles = self.group.isend_tensor_dict(message)
        self.blocked.append(time.perf_counter() - begun)
        if self.is_plugin:
            for source in self.sources:
                source.fill_(_WRONG)
        waited = time.perf_counter()
        for handle in handles:
            handle.wait()
        self.reuse.append(self.blocked[-1] + time.perf_counter() - waited)

    def receive(self, turn: int, delay_s: float) -> None:
        time.sleep(delay_s)
        message = self.group.recv_tensor_dict()
        self.corrupted += not all(bool((tensor == turn).all()) for tensor in message.values())

    def copy(self, turn: int) -> None:
        """Time the private copies alone, of sources as freshly written as those of a send."""
        backend = self.group.device_communicator.pp_channel.backend
        for source in self.sources:
            source.fill_(turn)
        begun = time.perf_counter()
        copies = [backend.private_copy(source) for source in self.sources]
        self.copies.append(time.perf_counter() - begun)
        backend.recycle(copies)

    def peak_bytes(self) -> int:
        channel = getattr(self.group.device_communicator, "pp_channel", None)
        return channel.stats().peak_retained_bytes if channel is not None else 0


def _case(rank: int, delay_ms: int, size: int, count: int, repeats: int) -> dict[str, Any]:
    """Measure one case in this rank; the sender's record has the times, the receiver's the corruptions."""
    import torch.distributed as dist

    sides = [_Side(name, size, count) for name in ("stock", "plugin")]
    stock, ours = sides
    for turn in range(repeats + 1):
        # Swap who goes first, so that neither side always finds the caches warm.
        for side in sides if turn % 2 else sides[::-1]:
            dist.barrier()
            if rank == 0:
                side.send(turn)
            else:
                side.receive(turn, delay_ms / 1000)
        dist.barrier()
        if rank == 0:
            ours.copy(turn)
    record = {
        "corrupted": stock.corrupted + ours.corrupted,
        # The first turn opens connections and grows the allocator; it is not counted.
        "stock_blocked": _ms(stock.blocked[1:]),
        "stock_reuse": _ms(stock.reuse[1:]),
        "plugin_blocked": _ms(ours.blocked[1:]),
        "plugin_reuse": _ms(ours.reuse[1:]),
        "copy": _ms(ours.copies[1:]),
        "retained_bytes_peak": ours.peak_bytes(),
    }
    for side in sides:
        side.group.destroy()
    del sides, stock, ours, side
    gc.collect()  # the groups' memory goes here, not in the middle of the next case
    return record


def _rank(rank: int, folder: str, repeats: int, pipe: Connection) -> None:
    """What each of the two processes does; results and errors go through ``pipe``."""
    sys.stdout = sys.stderr  # vLLM logs to standard output, which belongs to the report
    import torch
    import torch.distributed as dist
    import vllm

    torch.set_num_threads(1)
    # As vLLM's engine does: a full collection over all that was imported takes 100 ms and would hit any case.
    gc.collect()
    gc.freeze()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for delay_ms, (size, count) in itertools.product(_DELAYS_MS, _CASES):
        turns = max(3, repeats // 3) if size > 8 * _MIB else repeats
        record = _case(rank, delay_ms, size, count, turns)
        pipe.send({"vllm": vllm.__version__, "delay_ms": delay_ms, "size": size, "count": count, **record})
    plugin.disarm()
    dist.destroy_process_group()


def _row(sent: dict[str, Any], received: dict[str, Any]) -> dict[str, Any]:
    median = statistics.median
    return {
        "vllm": sent["vllm"],
        "receiver_delay_ms": sent["delay_ms"],
        "bytes": sent["size"] * sent["count"],
        "tensors": sent["count"],
        "sends": len(sent["stock_blocked"]),
        "stock_blocked_ms_median": median(sent["stock_blocked"]),
        "stock_blocked_ms_p99": _percentile_99(sent["stock_blocked"]),
        "stock_reuse_ms_median": median(sent["stock_reuse"]),
        "plugin_blocked_ms_median": median(sent["plugin_blocked"]),
        "plugin_blocked_ms_p99": _percentile_99(sent["plugin_blocked"]),
        "plugin_reuse_ms_median": median(sent["plugin_reuse"]),
        "copy_ms_median": median(sent["copy"]),
        "retained_bytes_peak": sent["retained_bytes_peak"],
        "corrupted": received["corrupted"],
    }


def run(repeats: int = 12, progress: TextIO | None = None) -> dict[str, Any]:
    """Measure every case.

    Args:
        repeats: Sends a case and side (a third as many for messages over 8 MiB).
        progress: Where to print a line a case, or None.

    Returns:
        ``{"rows": [...], "seconds", "torch", "python"}``; in rows, times are in milliseconds and sizes in bytes.
        "blocked" is the time inside ``isend_tensor_dict``, "reuse" the time until every returned handle has been
        waited for.

    Raises:
        PPPluginError: If a process ended or did not answer.
    """
    import platform
    from importlib.metadata import version

    context = multiprocessing.get_context("spawn")
    rows: list[dict[str, Any]] = []
    begun = time.monotonic()
    total = len(_DELAYS_MS) * len(_CASES)
    with tempfile.TemporaryDirectory(prefix="pp-bench-") as folder:
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, folder, repeats, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        deadline = time.monotonic() + _DEADLINE_S
        try:
            while len(rows) < total:
                sent, received = (_receive(pipe, rank, deadline) for rank, pipe in enumerate(pipes))
                rows.append(_row(sent, received))
                if progress is not None:
                    print(f"[{len(rows)}/{total}] {_line(rows[-1])}", file=progress, flush=True)
        finally:
            for process in processes:
                process.join(10 if len(rows) == total else 0)
                if process.is_alive():
                    process.kill()
                    process.join()
    seconds = time.monotonic() - begun
    return {"rows": rows, "seconds": seconds, "torch": version("torch"), "python": platform.python_version()}


def _receive(pipe: Connection, rank: int, deadline: float) -> dict[str, Any]:
    try:
        if pipe.poll(max(0.0, deadline - time.monotonic())):
            record: dict[str, Any] = pipe.recv()
            return record
    except EOFError as exc:
        raise PPPluginError(f"bench sends: rank {rank} ended; its error stands above") from exc
    raise PPPluginError(f"bench sends: rank {rank} did not answer within {_DEADLINE_S:g} s")


def _line(row: dict[str, Any]) -> str:
    return (
        f"receiver {row['receiver_delay_ms']:>3} ms late, {row['bytes'] / _KIB:>8.0f} KiB: blocked "
        f"stock {row['stock_blocked_ms_median']:8.3f} ms, plugin {row['plugin_blocked_ms_median']:7.3f} ms "
        f"(p99 {row['plugin_blocked_ms_p99']:.3f}); reusable after stock {row['stock_reuse_ms_median']:8.3f} ms, "
        f"plugin {row['plugin_reuse_ms_median']:7.3f} ms; copy {row['copy_ms_median']:.3f} ms; "
        f"corrupted {row['corrupted']}"
    )


def render(result: dict[str, Any], file: TextIO | None = None) -> None:
    """Print the rows for people."""
    out = file or sys.stdout
    print(f"vLLM {result['rows'][0]['vllm']}, torch {result['torch']}, two processes on gloo; medians", file=out)
    for row in result["rows"]:
        print(_line(row), file=out)
