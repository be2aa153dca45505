"""`vllm-pp bench sends`: the shape of its answer, and that it checks what arrived."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import OLD, VERSIONS
from tests.support.world import ROOT

KEYS = {
    "vllm",
    "receiver_delay_ms",
    "bytes",
    "stock_blocked_ms_median",
    "plugin_blocked_ms_median",
    "plugin_blocked_ms_p99",
    "plugin_reuse_ms_median",
    "retained_bytes_peak",
    "corrupted",
}
COMMAND = str(Path(sys.executable).with_name("vllm-pp"))


@pytest.mark.slow
@pytest.mark.parametrize("vllm", [None, OLD], ids=[VERSIONS["main"], OLD])
def test_bench_sends(vllm: str | None) -> None:
    """All nine cases, nothing corrupted, pure JSON on standard output; a late receiver blocks stock."""
    path = str(ROOT / ".cache" / "vllm" / vllm) if vllm else ""
    done = subprocess.run(
        [COMMAND, "bench", "sends", "--json", "--repeats", "3"],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 9
    assert {(row["receiver_delay_ms"], row["bytes"]) for row in rows} == {
        (delay, size) for delay in (0, 1, 100) for size in (4 << 10, 4 << 20, 64 << 20)
    }
    for row in rows:
        assert row.keys() >= KEYS
        assert row["vllm"] == (vllm or VERSIONS["main"])
        assert row["corrupted"] == 0
        assert row["retained_bytes_peak"] >= row["bytes"]
    late = next(row for row in rows if row["receiver_delay_ms"] == 100 and row["bytes"] == 4 << 10)
    if vllm == OLD:
        assert late["stock_blocked_ms_median"] > 20 * late["plugin_blocked_ms_median"]
    else:
        assert late["stock_reuse_ms_median"] > 20 * late["plugin_reuse_ms_median"]


def test_wrong_usage() -> None:
    """Exit code 2 and a reason."""
    done = subprocess.run([COMMAND, "bench", "sends", "--repeats", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "at least 3" in done.stderr
