"""A receiver that dies or hangs: an error that names it, within the deadline, and no hang at exit."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.conftest import OLD
from tests.support.world import World

HERE = "tests.faults.scenarios"


@pytest.fixture(params=[None, OLD], ids=["main", OLD])
def own_pair(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks that no other test uses, since one of them will not survive."""
    world = World(2, request.param)
    yield world
    world.broken = True
    world.close()


@pytest.mark.slow
def test_receiver_is_killed(own_pair: World) -> None:
    """SIGKILL while messages are in flight: the sender's next call says which rank, and it exits by itself."""
    own_pair.run(f"{HERE}:build_group", send_deadline_s=20.0)
    own_pair.run(f"{HERE}:send_some", ranks=[0])
    own_pair.processes[1].send_signal(signal.SIGKILL)
    said = own_pair.run(f"{HERE}:send_until_error", ranks=[0], timeout=60)[0]
    assert said["error"] == "SendFailedError"
    assert said["peer"] == 1
    assert said["keys"] == ("hidden_states", "residual")
    assert "rank 1" in said["text"] and "hidden_states" in said["text"]
    assert said["again"] == said["error"], "the error must stay, not surface once"
    assert said["seconds"] < 20
    _exits(own_pair)


@pytest.mark.slow
def test_receiver_hangs(own_pair: World) -> None:
    """SIGSTOP: the connection stays open, so only the deadline can tell."""
    own_pair.run(f"{HERE}:build_group", send_deadline_s=4.0, send_warn_s=1.0)
    own_pair.processes[1].send_signal(signal.SIGSTOP)
    try:
        said = own_pair.run(f"{HERE}:send_until_error", ranks=[0], timeout=60)[0]
        assert said["error"] == "SendDeadlineError"
        assert said["peer"] == 1
        assert "rank 1" in said["text"] and "send_deadline_s" in said["text"]
        assert 3.5 < said["seconds"] < 15
        assert "is not taken yet" in own_pair.log(0), "the warning comes before the deadline"
        assert said["pending"] == 0, "the aborted sends must let go of their buffers"
        _exits(own_pair)
    finally:
        own_pair.processes[1].send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_exit_with_sends_in_flight(own_pair: World) -> None:
    """A process that just ends, with no destroy and a receiver that never comes, ends within drain_deadline_s."""
    own_pair.run(f"{HERE}:build_group", drain_deadline_s=2.0)
    own_pair.run(f"{HERE}:send_some", ranks=[0])
    own_pair.start(f"{HERE}:exit_now", ranks=[0])
    begun = time.monotonic()
    assert own_pair.processes[0].wait(30) == 0, own_pair.log(0)
    assert time.monotonic() - begun < 15
    assert "terminate called" not in own_pair.log(0)
    assert "The group was aborted" in own_pair.log(0)


def _exits(world: World) -> None:
    """Rank 0 ends by itself, with status 0 and no abort in native code."""
    world.start(f"{HERE}:exit_now", ranks=[0])
    assert world.processes[0].wait(30) == 0, world.log(0)
    assert "terminate called" not in world.log(0)


@pytest.mark.slow
def test_connection_that_is_broken_already(own_pair: World) -> None:
    """The error comes from the posting, before any thread could notice; it names the rank all the same."""
    own_pair.run(f"{HERE}:build_group")
    said = own_pair.run(f"{HERE}:send_on_a_broken_connection", ranks=[0])[0]
    assert said["error"] == "SendFailedError"
    assert said["peer"] == 1
    assert said["keys"] == ("hidden_states", "residual")
    assert "cannot send to rank 1" in said["text"]
    _exits(own_pair)
