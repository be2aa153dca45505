"""The ledger of sends in flight, with works that the test itself completes and a clock that the test moves."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_pp_plugin.comm import ledger as ledger_module
from vllm_pp_plugin.comm import watcher as watcher_module
from vllm_pp_plugin.comm.ledger import PendingSend, SendLedger
from vllm_pp_plugin.comm.watcher import Watcher
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.devices.base import Completion
from vllm_pp_plugin.errors import (
    ChannelClosedError,
    DrainTimeoutError,
    SendDeadlineError,
    SendError,
    SendFailedError,
)

PATIENCE_S = 10.0
"""Longest that a test waits for something that must happen; only a test that fails takes so long."""

TICK_S = 0.04
"""A ``send_warn_s`` that makes the watcher look every 10 ms of real time; what it sees is the test's clock."""

_numbers = itertools.count()


class Buffer:
    """Stands for a tensor: something whose end can be seen by a weak reference."""


class FakeWork:
    """A send of the transport; over when the test says so.

    Args:
        rule: How the ledger may learn that it is over.
        error: What ``wait()`` raises then.
        log: Gets this work when ``wait()`` is called.
    """

    made: list[FakeWork] = []
    misuse: list[str] = []

    def __init__(
        self, rule: Completion = Completion.WAIT, error: Exception | None = None, log: list[FakeWork] | None = None
    ) -> None:
        self.rule = rule
        self.error = error
        self.log = log
        self.waits = 0
        self.asked = 0
        self.waiting = threading.Event()
        self.was_asked = threading.Event()
        self._over = threading.Event()
        FakeWork.made.append(self)

    def finish(self, error: Exception | None = None) -> None:
        """The peer has taken it, or it fails with ``error``."""
        self.error = error or self.error
        self._over.set()

    def is_completed(self) -> bool:
        if self.rule is Completion.WAIT:
            FakeWork.misuse.append("is_completed() of a work that can only be waited for")
        self.asked += 1
        self.was_asked.set()
        return self._over.is_set()

    def wait(self) -> bool:
        self.waits += 1
        if self.waits > 1:
            FakeWork.misuse.append("a second wait()")
            return True  # a real one would never return
        if self.rule is Completion.POLL and not self._over.is_set():
            FakeWork.misuse.append("wait() of a polled work that is not over")
        if self.log is not None:
            self.log.append(self)
        self.waiting.set()
        self._over.wait()
        if self.error is not None:
            raise self.error
        return True


class FakeClock:
    """Stands for the ``time`` module in the ledger and its watcher; moves only by :meth:`advance`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._looks = 0
        self._changed = threading.Condition()

    def monotonic(self) -> float:
        with self._changed:
            if "watch" in threading.current_thread().name:
                self._looks += 1
                self._changed.notify_all()
            return self._now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def advance(self, seconds: float) -> None:
        with self._changed:
            self._now += seconds

    def let_watcher_look(self) -> None:
        """Return when the watcher has seen the time as it is now, and has acted on it."""
        with self._changed:
            # It may ask twice a turn; four times means that a whole turn lies between. One that has found the
            # deadline passed looks no more.
            enough = self._looks + 4
            self._changed.wait_for(lambda: self._looks >= enough, 1.0)


class Caller(threading.Thread):
    """Runs a call that may block."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="test-caller", daemon=True)
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as exc:  # noqa: BLE001 - handed to the test
            self._error = exc

    def outcome(self) -> Any:
        """What the call returned or raised; fails where it does not return."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the call is still blocked"
        if self._error is not None:
            raise self._error
        return self._result


def until(true: Callable[[], bool], what: str) -> None:
    """Return as soon as something that has no event of its own has become true."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.001)


def threads_of(ledger: SendLedger) -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.endswith(f"[{ledger.name}]")]


def post(
    ledger: SendLedger,
    *works: FakeWork,
    peer: int = 1,
    keys: tuple[str, ...] = ("h",),
    nbytes: int = 10,
    retain: Buffer | None = None,
    recycle: Callable[[], None] | None = None,
) -> PendingSend:
    """Send a message that consists of ``works``."""
    with ledger.admit(peer, keys, nbytes) as send:
        send.recycle = recycle
        if retain is not None:
            send.retained.append(retain)
        send.works.extend((work.rule, work) for work in works)
    return send


Make = Callable[..., SendLedger]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """``make(abort, **settings)``: a ledger. At the end nothing may be left of it, nor a work misused."""
    # An abort of ours lets go at once or never.
    monkeypatch.setattr(ledger_module, "_ABORT_GRACE_S", 0.1, raising=False)
    FakeWork.made, FakeWork.misuse = [], []
    ledgers: list[SendLedger] = []

    def one(abort: Callable[[], None] = lambda: None, **settings: Any) -> SendLedger:
        config = PluginConfig(**{"send_warn_s": 600.0, "drain_deadline_s": PATIENCE_S, **settings})
        ledgers.append(SendLedger(f"pp:{next(_numbers)}", config, abort))
        return ledgers[-1]

    yield one
    for work in FakeWork.made:
        work.finish()
    for ledger in ledgers:
        ledger.close(1.0)
        until(lambda led=ledger: threads_of(led) == [], "the ledger's threads end")
        assert (ledger.stats().pending, ledger.stats().retained_bytes) == (0, 0)
    assert FakeWork.misuse == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(ledger_module, "time", clock)
    monkeypatch.setattr(watcher_module, "time", clock)
    return clock


# -- order and completion ----------------------------------------------------------------------------------


def test_works_are_waited_for_in_the_order_of_posting(make: Make) -> None:
    ledger, order = make(), []
    works = [[FakeWork(log=order), FakeWork(log=order)] for _ in range(5)]
    for pair in works:
        post(ledger, *pair)
    for work in reversed(FakeWork.made):
        work.finish()
    ledger.drain()
    assert order == [work for pair in works for work in pair]
    assert [work.waits for work in order] == [1] * 10


def test_a_message_is_done_with_its_last_work(make: Make) -> None:
    ledger, first, last = make(), FakeWork(), FakeWork()
    send = post(ledger, first, last)
    first.finish()
    assert last.waiting.wait(PATIENCE_S)
    assert (send.done, ledger.stats().pending) == (False, 1)
    last.finish()
    ledger.drain()
    assert (send.done, ledger.stats().pending) == (True, 0)


def test_a_device_work_is_waited_for_only_when_it_is_over(make: Make) -> None:
    ledger, work = make(), FakeWork(Completion.POLL)
    post(ledger, work)
    until(lambda: work.asked >= 3, "the work is polled")
    assert work.waits == 0
    work.finish()
    ledger.drain()
    assert work.waits == 1


def test_a_device_work_that_cannot_be_asked_is_waited_for_nevertheless(make: Make) -> None:
    class Broken(FakeWork):
        def is_completed(self) -> bool:
            raise RuntimeError("unspecified launch failure")

    ledger, broken = make(), Broken(Completion.POLL)
    broken.finish()
    post(ledger, broken)
    ledger.drain()
    with pytest.raises(SendFailedError, match="unspecified launch failure"):
        post(ledger, FakeWork())
    assert broken.waits == 1


def test_both_rules_in_one_message(make: Make) -> None:
    ledger, order = make(), []
    works = [FakeWork(rule, log=order) for rule in (Completion.WAIT, Completion.POLL, Completion.WAIT)]
    post(ledger, *works)
    for work in works:
        work.finish()
    ledger.drain()
    assert order == works


# -- who keeps the buffers ---------------------------------------------------------------------------------


def test_buffers_live_until_the_last_work_of_their_message_and_no_longer(make: Make) -> None:
    ledger, first, last, buffer = make(), FakeWork(), FakeWork(), Buffer()
    alive = weakref.ref(buffer)
    post(ledger, first, last, retain=buffer)
    del buffer
    first.finish()
    assert last.waiting.wait(PATIENCE_S)
    gc.collect()
    assert alive() is not None
    last.finish()
    ledger.drain()
    assert alive() is None


def test_buffers_of_a_finished_message_go_while_the_next_is_in_flight(make: Make) -> None:
    ledger, first, second = make(), FakeWork(), FakeWork()
    gone, kept = Buffer(), Buffer()
    refs = weakref.ref(gone), weakref.ref(kept)
    post(ledger, first, retain=gone)
    post(ledger, second, retain=kept)
    del gone, kept
    first.finish()
    assert second.waiting.wait(PATIENCE_S)
    assert (refs[0]() is None, refs[1]() is None) == (True, False)


def test_nothing_of_a_failed_message_is_kept(make: Make) -> None:
    """Not the buffers and not the works either: torch's works hold the tensors they send."""
    ledger, work, buffer = make(), FakeWork(error=RuntimeError("reset by peer")), Buffer()
    refs = weakref.ref(work), weakref.ref(buffer)
    post(ledger, work, retain=buffer)
    del buffer
    work.finish()
    ledger.drain()
    assert ledger.failure is not None
    del work
    FakeWork.made.clear()
    gc.collect()
    assert [ref() is None for ref in refs] == [True, True]


def test_nothing_of_a_message_sent_in_part_is_kept(make: Make) -> None:
    """Neither what its sender holds, down to the caller: a model runner holds the model's outputs."""
    ledger, work, refs = make(), FakeWork(), []

    def runner() -> None:
        source = Buffer()
        refs.append(weakref.ref(source))
        send_it()
        del source

    def send_it() -> None:
        copy = Buffer()
        refs.append(weakref.ref(copy))
        with ledger.admit(1, ("h",), 10) as send:
            send.works.append((Completion.WAIT, work))
            raise OSError("no route")
        del copy

    with pytest.raises(OSError, match="no route") as info:
        runner()
    del info
    work.finish()
    ledger.drain()
    assert ledger.failure is not None
    gc.collect()
    assert [ref() is None for ref in refs] == [True, True]


def test_an_error_before_anything_was_posted_keeps_nothing(make: Make) -> None:
    ledger, buffer = make(max_pending_sends=1), Buffer()
    alive = weakref.ref(buffer)
    with pytest.raises(MemoryError), ledger.admit(1, ("h",), 10) as send:
        send.retained.append(buffer)
        raise MemoryError
    del buffer, send
    assert alive() is None
    assert (ledger.stats().pending, ledger.stats().retained_bytes, ledger.failure) == (0, 0, None)
    # The reservation is given back: with a bound of one the next message could not go otherwise.
    work = FakeWork()
    post(ledger, work)
    assert ledger.stats().sends == 1


def test_buffers_are_recycled_once_and_only_when_all_works_are_over(make: Make) -> None:
    ledger, first, last, recycled = make(), FakeWork(), FakeWork(), []
    post(ledger, first, last, recycle=lambda: recycled.append(1))
    first.finish()
    assert last.waiting.wait(PATIENCE_S)
    assert recycled == []
    last.finish()
    ledger.drain()
    assert recycled == [1]


def test_buffers_of_a_failed_message_are_not_recycled(make: Make) -> None:
    ledger, bad, good, recycled = make(), FakeWork(error=RuntimeError("reset")), FakeWork(), []
    post(ledger, bad, good, recycle=lambda: recycled.append(1))
    bad.finish()
    good.finish()
    ledger.drain()
    assert recycled == []


def test_an_error_while_recycling_does_not_end_the_draining(make: Make) -> None:
    def fail() -> None:
        raise ValueError("a vendor's pool")

    ledger, first, second = make(), FakeWork(), FakeWork()
    post(ledger, first, recycle=fail)
    post(ledger, second)
    first.finish()
    second.finish()
    ledger.drain(2.0)
    assert second.waits == 1


# -- bounds ------------------------------------------------------------------------------------------------


def test_the_caller_waits_at_the_bound_of_messages(make: Make, clock: FakeClock) -> None:
    ledger = make(max_pending_sends=2)
    works = [FakeWork() for _ in range(3)]
    post(ledger, works[0])
    post(ledger, works[1])
    assert ledger.stats().back_pressure_waits == 0
    caller = Caller(lambda: post(ledger, works[2]))
    until(lambda: ledger.stats().back_pressure_waits == 1, "the caller waits")
    assert (caller.is_alive(), ledger.stats().pending, ledger.stats().sends) == (True, 2, 2)
    clock.advance(3.0)
    works[0].finish()
    caller.outcome()
    stats = ledger.stats()
    assert (stats.pending, stats.sends, stats.peak_pending) == (2, 3, 2)
    assert (stats.back_pressure_waits, stats.back_pressure_s) == (1, 3.0)


def test_the_caller_waits_at_the_bound_of_bytes(make: Make) -> None:
    ledger = make(max_retained_bytes=100)
    works = [FakeWork() for _ in range(3)]
    post(ledger, works[0], nbytes=60)
    post(ledger, works[1], nbytes=40)  # the bound itself is allowed
    assert (ledger.stats().back_pressure_waits, ledger.stats().retained_bytes) == (0, 100)
    caller = Caller(lambda: post(ledger, works[2], nbytes=60))
    until(lambda: ledger.stats().back_pressure_waits == 1, "the caller waits")
    assert caller.is_alive()
    works[0].finish()
    caller.outcome()
    assert (ledger.stats().retained_bytes, ledger.stats().peak_retained_bytes) == (100, 100)


def test_the_highest_mark_stays(make: Make) -> None:
    ledger, works = make(), [FakeWork() for _ in range(3)]
    post(ledger, works[0], nbytes=60)
    post(ledger, works[1], nbytes=40)
    works[0].finish()
    works[1].finish()
    ledger.drain()
    post(ledger, works[2], nbytes=5)
    stats = ledger.stats()
    assert (stats.pending, stats.retained_bytes) == (1, 5)
    assert (stats.peak_pending, stats.peak_retained_bytes) == (2, 100)


def test_the_age_of_the_oldest_is_told(make: Make, clock: FakeClock) -> None:
    ledger, first, second = make(), FakeWork(), FakeWork()
    post(ledger, first)
    clock.advance(5.0)
    post(ledger, second)
    clock.advance(2.0)
    assert ledger.stats().oldest_s == 7.0
    first.finish()
    until(lambda: ledger.stats().pending == 1, "the first is over")
    assert ledger.stats().oldest_s == 2.0


def test_a_message_above_the_bound_goes_alone(make: Make) -> None:
    ledger = make(max_retained_bytes=100)
    small, large, after = FakeWork(), FakeWork(), FakeWork()
    post(ledger, small, nbytes=1)
    caller = Caller(lambda: post(ledger, large, nbytes=1000))
    until(lambda: ledger.stats().back_pressure_waits == 1, "the large one waits")
    small.finish()
    caller.outcome()
    assert (ledger.stats().pending, ledger.stats().retained_bytes) == (1, 1000)
    caller = Caller(lambda: post(ledger, after, nbytes=1))
    until(lambda: ledger.stats().back_pressure_waits == 2, "the one after it waits")
    assert ledger.stats().pending == 1
    large.finish()
    caller.outcome()
    assert ledger.stats().retained_bytes == 1


def test_a_message_that_is_being_posted_counts(make: Make) -> None:
    ledger, inside, go = make(max_pending_sends=1), threading.Event(), threading.Event()
    works = FakeWork(), FakeWork()

    def slowly() -> None:
        with ledger.admit(1, ("h",), 10) as send:
            inside.set()
            go.wait()
            send.works.append((Completion.WAIT, works[0]))

    first = Caller(slowly)
    assert inside.wait(PATIENCE_S)
    second = Caller(lambda: post(ledger, works[1]))
    until(lambda: ledger.stats().back_pressure_waits == 1, "the second waits")
    assert ledger.stats().pending == 1
    go.set()
    first.outcome()
    assert works[0].waiting.wait(PATIENCE_S)
    assert second.is_alive()
    works[0].finish()
    second.outcome()


def test_many_callers_at_the_bound_all_get_their_turn(make: Make) -> None:
    ledger = make(max_pending_sends=1)
    works = [FakeWork() for _ in range(6)]
    post(ledger, works[0])
    callers = [Caller(lambda work=work: post(ledger, work)) for work in works[1:]]
    until(lambda: ledger.stats().back_pressure_waits == 5, "all wait")
    for work in works:
        work.finish()
    for caller in callers:
        caller.outcome()
    ledger.drain()
    assert (ledger.stats().sends, ledger.stats().peak_pending) == (6, 1)


# -- errors ------------------------------------------------------------------------------------------------


def test_a_failed_send_is_an_error_of_every_later_call(make: Make, clock: FakeClock) -> None:
    ledger, cause, work = make(), RuntimeError("Connection reset by peer"), FakeWork()
    post(ledger, work, peer=3, keys=("hidden_states", "residual"), nbytes=4096)
    clock.advance(12.0)
    work.finish(cause)
    ledger.drain()
    raised = []
    for _ in range(2):
        with pytest.raises(
            SendFailedError, match="rank 3.*hidden_states, residual.*4096 bytes.*12.0 s.*reset"
        ) as info:
            post(ledger, FakeWork())
        raised.append(info.value)
    for error in raised:
        assert (error.peer, error.keys, error.age_s) == (3, ("hidden_states", "residual"), 12.0)
        assert isinstance(error.__cause__, SendFailedError)
        assert str(error.__cause__.__cause__) == str(cause)
    # A new object each time: one that is raised twice grows a traceback of both.
    assert raised[0] is not raised[1]
    assert (ledger.stats().pending, ledger.stats().sends) == (0, 1)


def test_the_first_error_is_kept(make: Make) -> None:
    ledger = make()
    first, second = FakeWork(error=RuntimeError("first")), FakeWork(error=RuntimeError("second"))
    post(ledger, first, peer=1)
    post(ledger, second, peer=2)
    first.finish()
    second.finish()
    ledger.drain()
    assert ledger.failure is not None
    assert ledger.failure.peer == 1
    assert "first" in str(ledger.failure)


def test_the_other_works_of_a_failed_message_are_waited_for_too(make: Make) -> None:
    ledger, order = make(), []
    works = [FakeWork(log=order), FakeWork(log=order, error=RuntimeError("reset")), FakeWork(log=order)]
    buffer = Buffer()
    alive = weakref.ref(buffer)
    post(ledger, *works, retain=buffer)
    behind = FakeWork(log=order)
    post(ledger, behind)
    del buffer
    works[0].finish()
    works[1].finish()
    assert works[2].waiting.wait(PATIENCE_S)
    assert alive() is not None
    works[2].finish()
    behind.finish()
    ledger.drain()
    assert order == [*works, behind]


def test_a_message_sent_in_part_makes_the_group_unusable(make: Make) -> None:
    ledger, work, buffer = make(), FakeWork(), Buffer()
    alive = weakref.ref(buffer)
    with pytest.raises(OSError, match="no route"), ledger.admit(2, ("h", "r"), 10) as send:
        send.retained.append(buffer)
        send.works.append((Completion.WAIT, work))
        raise OSError("no route")
    del buffer
    with pytest.raises(SendFailedError, match="in part.*no route") as info:
        post(ledger, FakeWork())
    assert (info.value.peer, info.value.keys) == (2, ("h", "r"))
    # What was posted is in flight like any other send.
    assert (alive() is not None, ledger.stats().pending) == (True, 1)
    work.finish()
    ledger.drain()
    assert (alive(), work.waits, ledger.stats().retained_bytes) == (None, 1, 0)


def test_a_failure_wakes_a_caller_at_the_bound(make: Make) -> None:
    ledger, work = make(max_pending_sends=1), FakeWork()
    post(ledger, work, peer=4)
    caller = Caller(lambda: post(ledger, FakeWork()))
    until(lambda: ledger.stats().back_pressure_waits == 1, "the caller waits")
    work.finish(RuntimeError("reset"))
    with pytest.raises(SendFailedError) as info:
        caller.outcome()
    assert info.value.peer == 4
    ledger.drain()
    assert ledger.stats().pending == 0


def test_wait_returns_when_the_message_is_taken(make: Make) -> None:
    ledger, first, second = make(), FakeWork(), FakeWork()
    post(ledger, first)
    send = post(ledger, second)
    caller = Caller(lambda: ledger.wait(send))
    first.finish()
    assert second.waiting.wait(PATIENCE_S)
    assert caller.is_alive()
    second.finish()
    caller.outcome()
    ledger.wait(send)  # and at once, the second time


def test_wait_raises_when_the_message_fails(make: Make) -> None:
    ledger, work = make(), FakeWork()
    send = post(ledger, work, peer=5)
    caller = Caller(lambda: ledger.wait(send))
    work.finish(RuntimeError("reset"))
    with pytest.raises(SendFailedError) as info:
        caller.outcome()
    assert info.value.peer == 5


def test_wait_for_a_message_that_posted_nothing_returns(make: Make) -> None:
    ledger = make()
    with ledger.admit(1, (), 8) as send:
        pass
    caller = Caller(lambda: ledger.wait(send))
    caller.join(1.0)
    assert not caller.is_alive()


# -- drain -------------------------------------------------------------------------------------------------


def test_drain_of_an_idle_ledger_returns_at_once(make: Make) -> None:
    ledger = make()
    ledger.drain(0.0)
    assert threads_of(ledger) == []  # and starts nothing


def test_drain_returns_when_the_last_message_is_taken(make: Make) -> None:
    ledger, first, last = make(), FakeWork(), FakeWork()
    post(ledger, first)
    post(ledger, last)
    caller = Caller(ledger.drain)
    first.finish()
    assert last.waiting.wait(PATIENCE_S)
    assert caller.is_alive()
    last.finish()
    caller.outcome()
    assert (ledger.stats().pending, ledger.stats().retained_bytes) == (0, 0)


def test_a_drain_that_times_out_leaves_everything_in_place(make: Make, clock: FakeClock) -> None:
    aborted: list[int] = []
    ledger, work, buffer = make(lambda: aborted.append(1)), FakeWork(), Buffer()
    alive = weakref.ref(buffer)
    post(ledger, work, peer=7, keys=("hidden_states",), nbytes=64, retain=buffer)
    del buffer
    clock.advance(4.0)
    with pytest.raises(DrainTimeoutError, match="rank 7.*hidden_states.*64 bytes.*4.0 s.*drain_deadline_s") as info:
        ledger.drain(0.02)
    assert (info.value.peer, info.value.keys, info.value.age_s) == (7, ("hidden_states",), 4.0)
    assert (alive() is not None, ledger.stats().pending, ledger.stats().retained_bytes) == (True, 1, 64)
    assert (aborted, ledger.failure) == ([], None)
    second = FakeWork()
    post(ledger, second)  # the group is still good
    work.finish()
    second.finish()
    ledger.drain()
    assert alive() is None


def test_the_default_deadline_of_a_drain_is_the_setting(make: Make) -> None:
    ledger = make(drain_deadline_s=0.02)
    post(ledger, work := FakeWork())
    with pytest.raises(DrainTimeoutError, match=r"after 0\.02 s"):
        ledger.drain()
    work.finish()


def slow_sender(ledger: SendLedger, work: FakeWork, go: threading.Event) -> Caller:
    """A caller that stands in the middle of its posting until ``go`` is set."""
    inside = threading.Event()

    def slowly() -> None:
        with ledger.admit(1, ("h",), 10) as send:
            inside.set()
            go.wait()
            send.works.append((Completion.WAIT, work))

    sender = Caller(slowly)
    assert inside.wait(PATIENCE_S)
    return sender


def test_drain_waits_for_a_message_that_is_being_posted(make: Make) -> None:
    ledger, work, go = make(), FakeWork(), threading.Event()
    sender = slow_sender(ledger, work, go)
    with pytest.raises(DrainTimeoutError, match="being posted"):
        ledger.drain(0.02)
    drainer = Caller(ledger.drain)
    go.set()
    sender.outcome()
    assert work.waiting.wait(PATIENCE_S)
    assert drainer.is_alive()
    work.finish()
    drainer.outcome()


# -- close -------------------------------------------------------------------------------------------------


def test_threads_start_with_the_first_message_and_end_with_close(make: Make) -> None:
    ledger, work = make(), FakeWork()
    assert threads_of(ledger) == []
    post(ledger, work)
    assert len(threads_of(ledger)) == 2
    work.finish()
    ledger.drain()
    assert len(threads_of(ledger)) == 2
    assert ledger.close() is None
    assert threads_of(ledger) == []


def test_close_drains(make: Make) -> None:
    aborted: list[int] = []
    ledger, work = make(lambda: aborted.append(1)), FakeWork()
    post(ledger, work)
    caller = Caller(ledger.close)
    assert work.waiting.wait(PATIENCE_S)
    assert caller.is_alive()
    work.finish()
    assert caller.outcome() is None
    assert (aborted, threads_of(ledger), work.waits) == ([], [], 1)


def test_close_past_its_deadline_aborts_and_frees_when_the_transport_lets_go(make: Make) -> None:
    buffer, work, seen = Buffer(), FakeWork(), []
    alive = weakref.ref(buffer)

    def abort() -> None:
        seen.append(alive() is not None)
        work.finish(RuntimeError("connection closed"))

    ledger = make(abort)
    post(ledger, work, peer=6, retain=buffer)
    del buffer
    late = ledger.close(0.02)
    assert isinstance(late, DrainTimeoutError)
    assert late.peer == 6
    assert (seen, alive(), threads_of(ledger)) == ([True], None, [])


def test_close_keeps_the_buffers_of_a_transport_that_never_lets_go(make: Make) -> None:
    aborted: list[int] = []
    ledger, work, buffer = make(lambda: aborted.append(1)), FakeWork(), Buffer()
    alive = weakref.ref(buffer)
    post(ledger, work, retain=buffer)
    del buffer
    assert ledger.close(0.02) is not None
    gc.collect()
    assert (aborted, alive() is not None, ledger.stats().pending) == ([1], True, 1)
    work.finish()
    until(lambda: threads_of(ledger) == [], "the thread ends when the transport lets go")
    assert alive() is None


def test_close_twice_and_close_of_an_unused_ledger(make: Make) -> None:
    ledger, work = make(), FakeWork()
    work.finish()
    post(ledger, work)
    assert (ledger.close(), ledger.close(), make().close()) == (None, None, None)


def test_close_by_several_threads_aborts_once(make: Make) -> None:
    aborted: list[int] = []
    work = FakeWork()

    def abort() -> None:
        aborted.append(1)
        work.finish()

    ledger = make(abort)
    post(ledger, work)
    callers = [Caller(lambda: ledger.close(0.02)) for _ in range(4)]
    for caller in callers:
        caller.outcome()
    assert (aborted, threads_of(ledger)) == ([1], [])


def test_nothing_can_be_sent_after_close(make: Make) -> None:
    ledger = make()
    ledger.close()
    with pytest.raises(ChannelClosedError, match=ledger.name):
        post(ledger, FakeWork())
    assert threads_of(ledger) == []


def test_a_send_after_a_late_close_does_not_blame_the_peer(make: Make) -> None:
    """The sends that close() ended have failed by our own hand."""
    work = FakeWork()
    ledger = make(lambda: work.finish(RuntimeError("closed")))
    post(ledger, work)
    assert ledger.close(0.02) is not None
    with pytest.raises(ChannelClosedError):
        post(ledger, FakeWork())


def test_close_wakes_a_caller_at_the_bound(make: Make) -> None:
    ledger, work = make(max_pending_sends=1), FakeWork()
    post(ledger, work)
    caller = Caller(lambda: post(ledger, FakeWork()))
    until(lambda: ledger.stats().back_pressure_waits == 1, "the caller waits")
    closer = Caller(ledger.close)
    with pytest.raises(ChannelClosedError):
        caller.outcome()
    work.finish()
    assert closer.outcome() is None


def test_a_late_close_wakes_a_caller_in_wait(make: Make) -> None:
    ledger, work = make(), FakeWork()  # an abort that achieves nothing
    send = post(ledger, work)
    caller = Caller(lambda: ledger.wait(send))
    assert work.waiting.wait(PATIENCE_S)
    assert ledger.close(0.02) is not None
    caller.join(1.0)
    assert not caller.is_alive()
    with pytest.raises(SendError):
        caller.outcome()


def test_close_waits_for_a_message_that_is_being_posted(make: Make) -> None:
    ledger, work, go = make(), FakeWork(), threading.Event()
    sender = slow_sender(ledger, work, go)
    closer = Caller(ledger.close)
    go.set()
    sender.outcome()
    assert work.waiting.wait(PATIENCE_S)
    work.finish()
    assert closer.outcome() is None
    assert threads_of(ledger) == []


def test_a_message_whose_posting_ends_after_close_is_drained_too(make: Make) -> None:
    ledger, inside, go, work, buffer = make(), threading.Event(), threading.Event(), FakeWork(), Buffer()
    alive = weakref.ref(buffer)
    held = [buffer]

    def slowly() -> None:
        with ledger.admit(1, ("h",), 10) as send:
            inside.set()
            go.wait()
            send.retained.append(held.pop())
            send.works.append((Completion.WAIT, work))

    del buffer
    sender = Caller(slowly)
    assert inside.wait(PATIENCE_S)
    assert ledger.close(0.02) is not None
    go.set()
    sender.outcome()
    assert work.waiting.wait(PATIENCE_S)
    assert alive() is not None
    work.finish()
    until(lambda: threads_of(ledger) == [], "the threads end")
    assert (alive(), work.waits, ledger.stats().pending) == (None, 1, 0)


def test_an_abort_that_hangs_does_not_hang_close(make: Make, clock: FakeClock) -> None:
    called, let_go = threading.Event(), threading.Event()

    def abort() -> None:
        called.set()
        let_go.wait()

    ledger, work = make(abort, send_warn_s=TICK_S, send_deadline_s=30.0), FakeWork()
    post(ledger, work)
    clock.advance(31.0)
    assert called.wait(PATIENCE_S)
    closer = Caller(lambda: ledger.close(0.02))
    closer.join(PATIENCE_S)
    hangs = closer.is_alive()
    let_go.set()
    closer.outcome()
    assert not hangs


def test_a_thread_that_cannot_be_started_loses_no_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ledger = SendLedger(f"pp:{next(_numbers)}", PluginConfig(), lambda: None)
    first, second = FakeWork(), FakeWork()
    first.finish()
    second.finish()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            post(ledger, first)
    try:
        post(ledger, second)
    except SendError:
        pass  # it may refuse, but not swallow
    ledger.drain(2.0)
    assert ledger.close() is None


# -- deadline ----------------------------------------------------------------------------------------------


def test_a_stuck_send_ends_the_group_within_the_deadline(make: Make, clock: FakeClock) -> None:
    aborted, work, buffer = threading.Semaphore(0), FakeWork(), Buffer()
    alive = weakref.ref(buffer)
    ledger = make(aborted.release, send_warn_s=TICK_S, send_deadline_s=30.0)
    post(ledger, work, peer=9, keys=("hidden_states",), nbytes=128, retain=buffer)
    del buffer
    clock.advance(29.0)
    clock.let_watcher_look()
    assert (aborted.acquire(blocking=False), ledger.failure) == (False, None)
    clock.advance(2.0)
    assert aborted.acquire(timeout=PATIENCE_S)
    with pytest.raises(
        SendDeadlineError, match="rank 9.*hidden_states.*128 bytes.*31.0 s.*send_deadline_s is 30.*Rank 9"
    ) as info:
        post(ledger, FakeWork())
    assert (info.value.peer, info.value.keys, info.value.age_s) == (9, ("hidden_states",), 31.0)
    assert alive() is not None  # the transport has not let go
    # The error that the abort provokes does not replace the reason, nor is anything aborted twice.
    work.finish(RuntimeError("Application timeout caused pair closure"))
    ledger.drain()
    assert isinstance(ledger.failure, SendDeadlineError)
    assert ledger.close() is None
    assert (aborted.acquire(blocking=False), alive()) == (False, None)


def test_the_deadline_wakes_callers_at_the_bound_and_in_wait(make: Make, clock: FakeClock) -> None:
    ledger, work = make(send_warn_s=TICK_S, send_deadline_s=30.0, max_pending_sends=1), FakeWork()
    send = post(ledger, work, peer=2)
    callers = [Caller(lambda: post(ledger, FakeWork())), Caller(lambda: ledger.wait(send))]
    until(lambda: ledger.stats().back_pressure_waits == 1, "the caller waits")
    clock.advance(31.0)
    for caller in callers:
        with pytest.raises(SendDeadlineError) as info:
            caller.outcome()
        assert info.value.peer == 2
    assert ledger.stats().pending == 1


def test_the_age_in_the_error_counts_from_the_posting(make: Make, clock: FakeClock) -> None:
    aborted, first, stuck = threading.Event(), FakeWork(), FakeWork()
    ledger = make(aborted.set, send_warn_s=TICK_S, send_deadline_s=30.0)
    post(ledger, first, peer=1)
    post(ledger, stuck, peer=2)
    clock.advance(20.0)
    first.finish()
    assert stuck.waiting.wait(PATIENCE_S)
    clock.let_watcher_look()
    clock.advance(31.0)
    assert aborted.wait(PATIENCE_S)
    assert isinstance(ledger.failure, SendDeadlineError)
    assert (ledger.failure.peer, ledger.failure.age_s) == (2, 51.0)


def test_slow_sends_that_move_never_reach_the_deadline(make: Make, clock: FakeClock) -> None:
    aborted: list[int] = []
    ledger = make(lambda: aborted.append(1), send_warn_s=TICK_S, send_deadline_s=30.0)
    works = [FakeWork() for _ in range(8)]
    for work in works:
        post(ledger, work)
    for left, work in zip(reversed(range(8)), works, strict=True):
        clock.advance(29.0)
        clock.let_watcher_look()
        work.finish()
        until(lambda left=left: ledger.stats().pending == left, "the send is over")
    assert (aborted, ledger.failure) == ([], None)


def test_the_parts_of_one_slow_message_are_progress_too(make: Make, clock: FakeClock) -> None:
    aborted: list[int] = []
    ledger = make(lambda: aborted.append(1), send_warn_s=TICK_S, send_deadline_s=30.0)
    works = [FakeWork() for _ in range(4)]
    post(ledger, *works)
    for work, following in itertools.pairwise(works):
        clock.advance(20.0)
        clock.let_watcher_look()
        work.finish()
        assert following.waiting.wait(PATIENCE_S)
    works[-1].finish()
    ledger.drain()
    assert (aborted, ledger.failure) == ([], None)


def test_time_without_sends_does_not_count(make: Make, clock: FakeClock) -> None:
    aborted: list[int] = []
    ledger = make(lambda: aborted.append(1), send_warn_s=TICK_S, send_deadline_s=30.0)
    first, second = FakeWork(), FakeWork()
    post(ledger, first)
    first.finish()
    ledger.drain()
    clock.advance(1000.0)
    post(ledger, second)
    clock.let_watcher_look()
    clock.advance(29.0)
    clock.let_watcher_look()
    assert (aborted, ledger.failure) == ([], None)


def test_an_abort_that_raises_does_not_hide_the_error(make: Make, clock: FakeClock) -> None:
    called, work = threading.Event(), FakeWork()

    def abort() -> None:
        called.set()
        raise ValueError("Process group is not initialized")

    ledger = make(abort, send_warn_s=TICK_S, send_deadline_s=30.0)
    post(ledger, work)
    clock.advance(31.0)
    assert called.wait(PATIENCE_S)
    with pytest.raises(SendDeadlineError):
        post(ledger, FakeWork())
    work.finish()
    assert ledger.close() is None


def test_an_abort_that_raises_does_not_stop_close(make: Make) -> None:
    def abort() -> None:
        raise ValueError("Process group is not initialized")

    ledger, work = make(abort), FakeWork()
    post(ledger, work)
    try:
        assert isinstance(ledger.close(0.02), DrainTimeoutError)
        assert not any("watch" in name for name in threads_of(ledger))
    finally:
        work.finish()


def test_stop_is_seen_by_a_watcher_that_is_just_going_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """stop() comes while the watcher forgets that there was something to do: it must not forget stop() too."""
    forgetting, sets = threading.Event(), threading.Semaphore(0)

    class SlowToForget(threading.Event):
        def set(self) -> None:
            super().set()
            sets.release()

        def clear(self) -> None:
            forgetting.set()
            for _ in range(2):  # what stop() sets
                sets.acquire(timeout=1.0)
            super().clear()

    monkeypatch.setattr(
        watcher_module, "threading", types.SimpleNamespace(**{**vars(threading), "Event": SlowToForget})
    )
    watcher = Watcher("pp:stop", 600.0, 600.0, lambda: None, lambda stuck: None)
    watcher.start()
    watcher.wake()
    sets.acquire(timeout=1.0)
    assert forgetting.wait(PATIENCE_S)
    caller = Caller(watcher.stop)
    caller.join(3.0)
    hangs = caller.is_alive()
    watcher.wake()  # a thread that hangs must not outlive the test
    caller.outcome()
    assert not hangs


# -- warning -----------------------------------------------------------------------------------------------


def test_a_stuck_send_is_logged_once(make: Make, clock: FakeClock, log: pytest.LogCaptureFixture) -> None:
    ledger = make(send_warn_s=TICK_S, send_deadline_s=1000.0)
    first, second = FakeWork(), FakeWork()
    post(ledger, first, peer=3, keys=("hidden_states", "residual"), nbytes=4096)
    post(ledger, second, peer=4, keys=(), nbytes=77)
    clock.let_watcher_look()
    assert log.records == []
    clock.advance(12.0)
    clock.let_watcher_look()
    clock.advance(12.0)
    clock.let_watcher_look()
    (record,) = log.records
    assert record.levelno == logging.WARNING
    for part in (ledger.name, "rank 3", "hidden_states, residual", "4096 bytes", "12.0 s", "2 sends in flight"):
        assert part in record.getMessage()
    first.finish()
    assert second.waiting.wait(PATIENCE_S)
    until(lambda: ledger.stats().pending == 1, "the first is over")
    clock.advance(5.0)
    clock.let_watcher_look()
    assert len(log.records) == 2
    assert "rank 4 (metadata only; 77 bytes)" in log.records[1].getMessage()


def test_an_old_send_in_a_queue_that_moves_is_logged(
    make: Make, clock: FakeClock, log: pytest.LogCaptureFixture
) -> None:
    """What is logged is a send's age; the time without progress is the deadline's business."""
    ledger = make(send_warn_s=TICK_S, send_deadline_s=1000.0)
    works = [FakeWork() for _ in range(4)]
    for peer, work in enumerate(works):
        post(ledger, work, peer=peer)
    for work, following in itertools.pairwise(works):
        clock.advance(0.75 * TICK_S)
        work.finish()
        assert following.waiting.wait(PATIENCE_S)
        clock.let_watcher_look()
    assert log.records, "three times 0.75 send_warn_s old, and not a word"


def test_a_send_that_is_taken_in_time_is_not_logged(
    make: Make, clock: FakeClock, log: pytest.LogCaptureFixture
) -> None:
    ledger, work = make(send_warn_s=TICK_S, send_deadline_s=1000.0), FakeWork()
    post(ledger, work)
    clock.advance(0.9 * TICK_S)
    clock.let_watcher_look()
    work.finish()
    ledger.drain()
    assert (log.records, ledger.close()) == ([], None)


# -- everything at once ------------------------------------------------------------------------------------


class Inventory:
    """The test's own count of what is in flight, which must never exceed what was allowed."""

    def __init__(self, max_pending: int, max_bytes: int) -> None:
        self._bounds = max_pending, max_bytes
        self._lock = threading.Lock()
        self._sizes: list[int] = []
        self.broken: list[str] = []

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._sizes.append(nbytes)
            too_many = len(self._sizes) > self._bounds[0]
            too_large = sum(self._sizes) > self._bounds[1] and len(self._sizes) > 1
            if too_many or too_large:
                self.broken.append(f"{self._sizes} with bounds {self._bounds}")

    def remove(self, nbytes: int) -> None:
        with self._lock:
            self._sizes.remove(nbytes)


class CountedWork(FakeWork):
    """A work that leaves the inventory when it is over, before the ledger can know."""

    def __init__(self, rule: Completion, error: Exception | None, log: list[FakeWork], left: Callable[[], None]):
        super().__init__(rule, error, log)
        self._left = left

    def wait(self) -> bool:
        try:
            return super().wait()
        finally:
            self._left()


messages = st.fixed_dictionaries(
    {
        "nbytes": st.integers(1, 120),
        "rules": st.lists(st.sampled_from(Completion), min_size=1, max_size=3),
        "fate": st.sampled_from(["taken"] * 12 + ["fails", "raises before", "raises after"]),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(st.lists(messages, min_size=1, max_size=6), min_size=1, max_size=4),
    max_pending=st.integers(1, 5),
    max_bytes=st.integers(1, 200),
    seed=st.integers(0, 2**16),
)
def test_whatever_happens_bounds_hold_order_holds_and_nothing_is_left(
    plan: list[list[dict[str, Any]]], max_pending: int, max_bytes: int, seed: int
) -> None:
    """Several threads send; a transport takes messages in any order, and some of them fail."""
    FakeWork.misuse = []
    FakeWork.made = []
    ledger = SendLedger(
        f"pp:{next(_numbers)}",
        PluginConfig(max_pending_sends=max_pending, max_retained_bytes=max_bytes),
        lambda: None,
    )
    inventory, order, stop = Inventory(max_pending, max_bytes), [], threading.Event()
    posted: list[list[CountedWork]] = [[] for _ in plan]
    buffers: list[weakref.ref[Buffer]] = []
    ready: list[FakeWork] = []
    some_ready = threading.Condition()

    def send(sender: int, message: dict[str, Any]) -> None:
        nbytes, fate, rules = message["nbytes"], message["fate"], message["rules"]
        with ledger.admit(sender, ("h",), nbytes) as record:
            inventory.add(nbytes)
            if fate == "raises before":
                inventory.remove(nbytes)
                raise MemoryError
            buffer = Buffer()
            buffers.append(weakref.ref(buffer))
            record.retained.append(buffer)
            works = []
            for number, rule in enumerate(rules):
                is_last = number == len(rules) - 1
                left = (lambda: inventory.remove(nbytes)) if is_last else (lambda: None)
                error = RuntimeError("reset") if fate == "fails" else None
                works.append(CountedWork(rule, error, order, left))
            record.works.extend((work.rule, work) for work in works)
            posted[sender].extend(works)
            with some_ready:
                ready.extend(works)
                some_ready.notify()
            if fate == "raises after":
                del buffer  # the traceback would keep it
                raise OSError("no route")

    def sender(number: int) -> None:
        for message in plan[number]:
            try:
                send(number, message)
            except (MemoryError, OSError, SendError):
                pass  # the ledger's own state is what is looked at

    def transport() -> None:
        chance = random.Random(seed)
        while True:
            with some_ready:
                some_ready.wait_for(lambda: bool(ready) or stop.is_set())
                if not ready:
                    return
                work = ready.pop(chance.randrange(len(ready)))
            work.finish()

    taking = Caller(transport)
    senders = [Caller(lambda number=number: sender(number)) for number in range(len(plan))]
    for thread in senders:
        thread.outcome()
    ledger.drain(PATIENCE_S)
    stop.set()
    with some_ready:
        some_ready.notify()
    taking.outcome()

    stats = ledger.stats()
    assert (stats.pending, stats.retained_bytes, stats.oldest_s) == (0, 0, 0.0)
    assert stats.peak_pending <= max_pending
    largest = max(message["nbytes"] for messages_ in plan for message in messages_)
    assert stats.peak_retained_bytes <= max(max_bytes, largest)
    assert inventory.broken == []
    for works in posted:
        mine = set(works)
        assert [work for work in order if work in mine] == works
    assert all(work.waits == 1 for work in order)
    assert len(order) == sum(len(works) for works in posted)
    failures = [m for messages_ in plan for m in messages_ if m["fate"] in ("fails", "raises after")]
    if not failures:
        assert ledger.failure is None
        assert stats.sends == sum(m["fate"] == "taken" for messages_ in plan for m in messages_)
    assert ledger.close() is None
    assert threads_of(ledger) == []
    assert FakeWork.misuse == []
    assert all(ref() is None for ref in buffers)
