"""`vllm serve` as a user runs it: flags on the command line, HTTP, and a stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import environment, prompts, run_engine, toy_model
from tests.support.world import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

VLLM = str(Path(sys.executable).with_name("vllm"))
PROMPTS = prompts(3, 20, 200, seed=5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(port: int, settings: dict[str, Any]) -> list[str]:
    return [
        *(VLLM, "serve", str(toy_model()), "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"),
        *(
            "--pipeline-parallel-size",
            "2",
            "--enforce-eager",
            "--max-num-batched-tokens",
            "128",
            "--dtype",
            "float32",
        ),
        *("--additional-config", json.dumps({"pp_plugin": settings})),
    ]


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-6000:]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)  # the pace of asking
    raise AssertionError(f"not healthy in time:\n{log.read_text(errors='replace')[-6000:]}")


def _workers(group: int) -> list[int]:
    """Processes of a process group that are still there, zombies not counted (Linux's /proc)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgid, *_ = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        if int(pgid) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_serve(tmp_path: Path) -> None:
    """Tokens over HTTP are those of one rank, one line says what is on, and SIGTERM leaves no process."""
    expected = run_engine(
        {"max_num_batched_tokens": 128, "enforce_eager": True}, [{"prompts": PROMPTS, "max_tokens": 8}]
    )
    port, log = _free_port(), tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            _command(port, {"async_sends": True}),
            cwd=ROOT,
            env=environment(2),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(port, process, log)
        body = {
            "model": str(toy_model()),
            "prompt": PROMPTS,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            choices = json.load(response)["choices"]
        got = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
        assert got == [answer["tokens"] for answer in expected["answers"][0]]
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        text = log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if "vllm-pp-plugin 0" in line]
        assert len(lines) == 1
        assert "async_sends, cpu_eager_pp on" in lines[0]
        assert "terminate called" not in text
        end = time.monotonic() + 15
        while _workers(process.pid) and time.monotonic() < end:
            time.sleep(0.2)  # multiprocessing's resource tracker ends a little after its parent
        assert _workers(process.pid) == []
    finally:
        for pid in _workers(process.pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"asynk_sends": True}, "pp_plugin.asynk_sends is unknown. Did you mean 'async_sends'?"),
        ({"max_pending_sends": 0}, "pp_plugin.max_pending_sends is 0: it must be at least 1"),
    ],
)
def test_wrong_setting_stops_the_start(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    """Before any worker is started, with the reason as the last word."""
    done = subprocess.run(
        _command(_free_port(), settings),
        cwd=ROOT,
        env=environment(2),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode != 0
    assert said in done.stderr + done.stdout
    assert "Worker" not in done.stdout
