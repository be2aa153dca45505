"""Sends in flight when the group is destroyed or the worker goes to sleep."""

from __future__ import annotations

import pytest

from tests.support.world import World

HERE = "tests.comm.scenarios"


@pytest.mark.parametrize("via", ["destroy", "sleep"])
def test_drained_when_the_receiver_comes(pair: World, via: str) -> None:
    """Everything arrives, nothing is freed before, no thread is left."""
    sent, received = pair.run(f"{HERE}:teardown_with_sends_in_flight", receiver_comes=True, via=via)
    assert received["right"] is True
    assert sent["seconds"] > 0.3, "it did not wait for the receiver"
    assert not sent["freed_early"]
    assert sent["left"] == 0
    assert sent["error"] == ("" if via == "destroy" else "slept at level 2")
    assert "was destroyed" in sent["closed"]
    assert sent["threads"] == []


@pytest.mark.parametrize("vllm", ["main_pair", "old_pair"])
def test_destroy_is_ended_by_the_deadline(vllm: str, request: pytest.FixtureRequest) -> None:
    """The receiver never comes: destroy returns after drain_deadline_s, and nothing is freed before."""
    world: World = request.getfixturevalue(vllm)
    sent, _ = world.run(f"{HERE}:teardown_with_sends_in_flight", receiver_comes=False, via="destroy")
    assert 2.9 < sent["seconds"] < 8
    assert not sent["freed_early"]
    assert sent["left"] == 0
    assert sent["threads"] == []


def test_sleep_refuses_by_the_deadline(main_pair: World) -> None:
    """Sleeping would give memory back that the transport still reads: an error that names the peer instead."""
    sent, _ = main_pair.run(f"{HERE}:teardown_with_sends_in_flight", receiver_comes=False, via="sleep")
    assert "send to rank 1" in sent["error"]
    assert "drain_deadline_s" in sent["error"]
    assert sent["left"] == 8
    assert not sent["freed_early"]
