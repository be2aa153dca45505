"""Communicators: composed from any platform's class, drained before the fences, and agreed on between ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from vllm_pp_plugin.comm import agreement, communicator
from vllm_pp_plugin.comm.communicator import AsyncSendMixin, compose, open_channels, sends
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.devices.cpu import CpuBackend
from vllm_pp_plugin.errors import DrainTimeoutError

PATIENCE_S = 10.0

# -- platforms' classes, as they come ----------------------------------------------------------------------


class Base:
    """Facts that every communicator of vLLM has."""

    def __init__(self, cpu_group: Any = "cpu group", device_group: Any = "device group", world_size: int = 2) -> None:
        self.events: list[Any] = []
        self.device = "the device"
        self.cpu_group = cpu_group
        self.device_group = device_group
        self.ranks = list(range(10, 10 + world_size))
        self.rank_in_group = 0
        self.world_size = world_size
        self.unique_name = "pp:0"

    def all_reduce(self) -> str:
        return "the platform's own"


class Bare(Base):
    """An old platform: neither fences nor destroy."""


class Full(Base):
    """A platform with everything."""

    def suspend(self) -> None:
        self.events.append("suspend")

    def checkpoint_prepare(self) -> None:
        self.events.append("checkpoint_prepare")

    def destroy(self) -> None:
        self.events.append("destroy")


class WithDicts(Full):
    """vLLM's CPU communicator on a host with shared memory: says so at the end of its own initialisation."""

    value = True

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        become_ours(self)
        self.supports_tensor_dict = self.value


class WithoutDicts(WithDicts):
    value = False


class SaysFirst(Full):
    """A vendor's class that says so before its base is initialised."""

    def __init__(self, **facts: Any) -> None:
        self.supports_tensor_dict = True
        super().__init__(**facts)
        become_ours(self)


class SaysOnTheClass(Full):
    supports_tensor_dict = True

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        become_ours(self)


class SaysByProperty(Full):
    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        become_ours(self)

    @property
    def supports_tensor_dict(self) -> bool:
        return self.world_size > 1


class LooksTwice(WithoutDicts):
    """A vendor's class over one without shared memory: looks, and brings its own."""

    def __init__(self, **facts: Any) -> None:
        super().__init__(**facts)
        assert self.supports_tensor_dict is False
        self.supports_tensor_dict = True


def become_ours(self: Any) -> None:
    """What the seam does as soon as vLLM's base class is initialised."""
    self.__class__ = compose(self.__class__, "Test")
    self.open_pp_channel(CpuBackend(), PluginConfig())


class FakeChannel:
    """Stands for the channel; writes down in which order things happen.

    Attributes:
        late: What ``close()`` returns.
        refuse: What ``drain()`` raises.
        fail: What ``close()`` raises.
    """

    late: DrainTimeoutError | None = None
    refuse: Exception | None = None
    fail: Exception | None = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.events: list[Any] = []

    def drain(self, deadline_s: float | None = None) -> None:
        self.events.append("drain")
        if self.refuse is not None:
            raise self.refuse

    def close(self, deadline_s: float | None = None) -> DrainTimeoutError | None:
        self.events.append(("close", deadline_s))
        if self.fail is not None:
            raise self.fail
        return self.late

    def isend(self, header: Any, tensors: Any, dst: int, *, donate: bool = False) -> list[Any]:
        self.events.append(("isend", header, tensors, dst, donate))
        return ["handle"]

    def send(self, header: Any, tensors: Any, dst: int) -> None:
        self.events.append(("send", header, tensors, dst))


Open = Callable[..., Any]


@pytest.fixture(autouse=True)
def fake_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels are fakes, and none of another test is open."""
    monkeypatch.setattr(communicator, "SendChannel", FakeChannel)
    monkeypatch.setattr(communicator, "_open", [])


@pytest.fixture
def opened() -> Open:
    """``opened(Platform)``: a communicator of ours, whose channel and platform write into one list, ``events``."""

    def make(platform: type, **facts: Any) -> Any:
        comm = platform(**facts)
        if not isinstance(comm, AsyncSendMixin):
            become_ours(comm)
        comm.events = comm.pp_channel.events
        return comm

    return make


# -- composing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["Cpu", "Cuda", "Npu", "Xpu", "MyChip"])
@pytest.mark.parametrize("platform", [Bare, Full, WithDicts])
def test_the_composed_class_is_both(platform: type, prefix: str) -> None:
    composed = compose(platform, prefix)
    assert composed.__name__ == f"{prefix}PPCommunicator"
    assert issubclass(composed, platform)
    assert issubclass(composed, AsyncSendMixin)
    assert platform.__qualname__ in str(composed.__doc__)
    # Ours first: the platform's own fences and its destroy() must come after the draining.
    assert composed.__mro__.index(AsyncSendMixin) < composed.__mro__.index(platform)


def test_a_class_is_composed_once() -> None:
    assert compose(Full, "Npu") is compose(Full, "Npu")
    assert compose(Full, "Npu") is not compose(Full, "Cpu")
    assert compose(Full, "Npu") is not compose(Bare, "Npu")


def test_a_class_of_ours_is_not_composed_again() -> None:
    class Vendor(compose(Full, "Npu")):  # type: ignore[misc]
        """A vendor who derives from the composed class."""

    assert compose(Vendor, "Npu") is Vendor
    assert compose(compose(Full, "Npu"), "Cuda") is compose(Full, "Npu")


def test_an_object_that_changes_class_stays_what_it_was() -> None:
    comm = Full(world_size=4)
    comm.__class__ = compose(Full, "Npu")
    assert isinstance(comm, Full)
    assert isinstance(comm, AsyncSendMixin)
    assert (type(comm).__name__, comm.world_size, comm.all_reduce()) == ("NpuPPCommunicator", 4, "the platform's own")
    assert (comm.pp_channel, sends(comm)) == (None, False)


def test_other_objects_of_the_platform_are_left_alone(opened: Open) -> None:
    other = Full()
    opened(Full)
    assert type(other) is Full
    assert not sends(other)
    other.suspend()
    assert other.events == ["suspend"]


def test_a_metaclass_of_the_platform_is_kept() -> None:
    class Meta(type):
        pass

    class Platform(Base, metaclass=Meta):
        pass

    assert type(compose(Platform, "Cpu")) is Meta


# -- the channel -------------------------------------------------------------------------------------------


def test_the_channel_is_given_the_groups_facts() -> None:
    comm: Any = Full(world_size=3)
    comm.__class__ = compose(Full, "Cpu")
    backend, config = CpuBackend(), PluginConfig(max_pending_sends=3)
    comm.open_pp_channel(backend, config)
    assert comm.pp_channel.arguments == (
        "pp:0",
        "cpu group",
        "device group",
        [10, 11, 12],
        0,
        backend,
        config,
        "the device",
    )
    assert sends(comm)
    assert open_channels() == [comm.pp_channel]


def test_without_a_device_group_everything_travels_on_the_cpu_group(opened: Open) -> None:
    comm = opened(Full, device_group=None)
    assert comm.pp_channel.arguments[1:3] == ("cpu group", "cpu group")


def test_sends_are_handed_to_the_channel(opened: Open) -> None:
    comm = opened(Full)
    assert comm.pp_isend("header", ["tensors"], 1) == ["handle"]
    comm.pp_isend("header", [], 0, donate=True)
    comm.pp_send("header", ["more"], 1)
    assert comm.events == [
        ("isend", "header", ["tensors"], 1, False),
        ("isend", "header", [], 0, True),
        ("send", "header", ["more"], 1),
    ]


@pytest.mark.parametrize("other", [None, object(), Full])
def test_what_is_not_ours_does_not_send(other: Any) -> None:
    assert not sends(other)


# -- fences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", ["suspend", "checkpoint_prepare"])
def test_a_fence_drains_before_the_platforms_own(opened: Open, fence: str) -> None:
    comm = opened(Full)
    getattr(comm, fence)()
    assert comm.events == ["drain", fence]


@pytest.mark.parametrize("fence", ["suspend", "checkpoint_prepare"])
def test_a_fence_that_the_platform_lacks_drains_all_the_same(opened: Open, fence: str) -> None:
    comm = opened(Bare)
    getattr(comm, fence)()
    assert comm.events == ["drain"]


@pytest.mark.parametrize("fence", ["suspend", "checkpoint_prepare"])
def test_a_fence_is_not_passed_while_something_is_in_flight(opened: Open, fence: str) -> None:
    comm = opened(Full)
    comm.pp_channel.refuse = DrainTimeoutError("2 sends still in flight")
    with pytest.raises(DrainTimeoutError):
        getattr(comm, fence)()
    assert comm.events == ["drain"]


def test_fences_of_a_group_without_a_channel_are_the_platforms() -> None:
    comm: Any = Full()
    comm.__class__ = compose(Full, "Cpu")
    comm.suspend()
    comm.checkpoint_prepare()
    comm.destroy()
    assert comm.events == ["suspend", "checkpoint_prepare", "destroy"]


def test_destroy_closes_first(opened: Open) -> None:
    comm = opened(Full)
    channel = comm.pp_channel
    comm.destroy()
    assert comm.events == [("close", None), "destroy"]
    # The closed channel stays: a later send gets its error, not stock vLLM's path.
    assert comm.pp_channel is channel
    assert sends(comm)
    assert open_channels() == []


def test_destroy_of_a_platform_that_has_none(opened: Open) -> None:
    comm = opened(Bare)
    comm.destroy()
    assert comm.events == [("close", None)]


def test_closing_twice(opened: Open) -> None:
    comm = opened(Full)
    comm.close_pp_channel(0.5)
    comm.destroy()
    assert comm.events == [("close", 0.5), ("close", None), "destroy"]
    assert open_channels() == []


def test_late_sends_are_logged_and_do_not_stop_destroy(opened: Open, log: pytest.LogCaptureFixture) -> None:
    comm = opened(Full)
    comm.pp_channel.late = DrainTimeoutError("group pp:0: 2 sends still in flight")
    comm.destroy()
    assert comm.events == [("close", None), "destroy"]
    (record,) = log.records
    assert record.levelno == logging.ERROR
    assert "2 sends still in flight" in record.getMessage()


def test_at_exit_every_open_channel_is_closed(opened: Open) -> None:
    first, second, done = opened(Full), opened(Bare), opened(Full)
    done.destroy()
    communicator._close_all()
    assert first.events == second.events == [("close", None)]
    assert done.events == [("close", None), "destroy"]
    assert open_channels() == []


def test_at_exit_a_channel_that_cannot_be_closed_does_not_keep_the_others_open(opened: Open) -> None:
    first, second = opened(Full), opened(Full)
    first.pp_channel.fail = ValueError("Process group is not initialized")
    try:
        communicator._close_all()
    except ValueError:
        pass  # it may be told
    assert second.events == [("close", None)]


# -- which path --------------------------------------------------------------------------------------------


class CountingStore:
    """A store that remembers how often it was voted in and whether anybody waited."""

    def __init__(self, others: int) -> None:
        self._store = dist.HashStore()
        self.votes = 0
        self.waits = 0
        for _ in range(others):
            agreement.vote(self._store, "pp:0", 2)

    def add(self, key: str, amount: int) -> int:
        self.votes += 1
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def wait(self, keys: list[str], timeout: Any) -> None:
        self.waits += 1
        self._store.wait(keys, timeout)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], CountingStore]:
    """``store(n)``: the group's store, in which ``n`` other ranks have voted."""
    monkeypatch.setattr(communicator, "AGREEMENT_TIMEOUT_S", 0.02)

    def use(others: int) -> CountingStore:
        made = CountingStore(others)
        groups: list[Any] = []
        monkeypatch.setattr(communicator, "_group_store", lambda group: groups.append(group) or made)
        return made

    return use


SHARED_MEMORY = [WithDicts, SaysFirst, SaysOnTheClass, SaysByProperty]


@pytest.mark.parametrize("platform", SHARED_MEMORY)
def test_all_ranks_have_the_plugin_so_none_uses_shared_memory(
    platform: type, opened: Open, store: Callable[[int], CountingStore], log: pytest.LogCaptureFixture
) -> None:
    used = store(1)
    comm = opened(platform)
    assert comm.supports_tensor_dict is False
    assert sends(comm)
    assert (used.votes, comm.events, log.records) == (1, [], [])


@pytest.mark.parametrize("platform", SHARED_MEMORY)
def test_one_rank_lacks_the_plugin_so_all_use_shared_memory(
    platform: type, opened: Open, store: Callable[[int], CountingStore], log: pytest.LogCaptureFixture
) -> None:
    store(0)
    comm = opened(platform)
    assert comm.supports_tensor_dict is True
    assert comm.supports_tensor_dict is True
    assert not sends(comm)
    assert (comm.pp_channel, open_channels(), comm.events) == (None, [], [("close", 0.0)])
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert "steps aside on group pp:0" in record.getMessage()


def test_after_stepping_aside_the_communicator_is_the_platforms(
    opened: Open, store: Callable[[int], CountingStore]
) -> None:
    store(0)
    comm = opened(WithDicts)
    assert comm.supports_tensor_dict is True
    comm.events = []
    comm.suspend()
    comm.destroy()
    assert comm.events == ["suspend", "destroy"]


def test_a_rank_without_shared_memory_votes_and_waits_for_nobody(
    opened: Open, store: Callable[[int], CountingStore]
) -> None:
    used = store(0)
    comm = opened(WithoutDicts)
    assert comm.supports_tensor_dict is False
    assert sends(comm)
    assert (used.votes, used.waits) == (1, 0)


def test_a_platform_that_does_not_say_has_no_shared_memory(
    opened: Open, store: Callable[[int], CountingStore]
) -> None:
    used = store(0)
    comm = opened(Full)
    assert comm.supports_tensor_dict is False
    assert sends(comm)
    assert used.waits == 0


@pytest.mark.parametrize("value", [True, False])
def test_a_group_without_a_channel_takes_no_part(value: bool, store: Callable[[int], CountingStore]) -> None:
    used = store(1)
    comm: Any = Full()
    comm.__class__ = compose(Full, "Cpu")
    comm.supports_tensor_dict = value
    assert comm.supports_tensor_dict is value
    assert (used.votes, used.waits) == (0, 0)


def test_the_ranks_agree_once(opened: Open, store: Callable[[int], CountingStore]) -> None:
    used = store(1)
    comm = opened(WithDicts)
    assert [comm.supports_tensor_dict for _ in range(3)] == [False] * 3
    assert (used.votes, used.waits) == (1, 1)


def test_a_rank_has_one_vote_however_often_it_is_asked(opened: Open, store: Callable[[int], CountingStore]) -> None:
    """Two votes of one rank would look like both ranks', and the other one would use shared memory."""
    used = store(0)
    comm = opened(LooksTwice)
    assert comm.supports_tensor_dict is True
    assert used.votes == 1


def test_two_ranks_at_the_same_time(opened: Open, store: Callable[[int], CountingStore]) -> None:
    store(0)
    communicator.AGREEMENT_TIMEOUT_S = PATIENCE_S  # the fixture gives the former value back
    ranks = [opened(WithDicts), opened(WithDicts)]
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda rank=rank: answers.append(rank.supports_tensor_dict), daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert answers == [False, False]
    assert all(sends(rank) for rank in ranks)
