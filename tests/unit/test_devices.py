"""The built-in devices: how they copy, how a send completes on them, and how a stuck group is ended."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_pp_plugin.devices import Completion, DeviceBackend, abort_gloo_group, base
from vllm_pp_plugin.devices.cpu import CpuBackend
from vllm_pp_plugin.devices.cuda import CudaBackend
from vllm_pp_plugin.devices.npu import NpuBackend
from vllm_pp_plugin.devices.xpu import XpuBackend

PATIENCE_S = 10.0

BACKENDS = [(CpuBackend, "cpu", "Cpu"), (CudaBackend, "cuda", "Cuda"), (NpuBackend, "npu", "Npu")]
BACKENDS += [(XpuBackend, "xpu", "Xpu")]
HARDWARE = [CudaBackend, NpuBackend, XpuBackend]


# -- names and rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "name", "prefix"), BACKENDS)
def test_names(cls: type[DeviceBackend], name: str, prefix: str) -> None:
    backend = cls()
    assert (backend.name, backend.communicator_name) == (name, prefix)


@pytest.mark.parametrize("cls", HARDWARE)
def test_a_device_tensor_is_polled_and_a_host_tensor_waited_for(cls: type[DeviceBackend]) -> None:
    backend = cls()
    # A tensor of no device at all: like one of an accelerator it is not on the CPU.
    assert backend.completion(torch.empty(4, device="meta")) is Completion.POLL
    assert backend.completion(torch.empty(4)) is Completion.WAIT


def test_on_the_cpu_everything_is_waited_for() -> None:
    assert CpuBackend().completion(torch.empty(4)) is Completion.WAIT
    assert CpuBackend().completion(torch.empty(4, device="meta")) is Completion.WAIT


# -- private copies ----------------------------------------------------------------------------------------


def large(*shape: int) -> torch.Tensor:
    """Large enough that a backend may have a way of its own for its memory."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.arange(12.0).reshape(3, 4),
    "contiguous, large": lambda: large(300, 200),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "transposed, large": lambda: large(300, 200).t(),
    "every second column": lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
    "every second column, large": lambda: large(300, 200)[:, ::2],
    "slice of a buffer, large": lambda: large(600, 200)[100:400],
    "channels last, large": lambda: large(2, 8, 64, 64).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.arange(4.0).expand(3, 4),
    "expanded, large": lambda: torch.arange(200.0).expand(300, 200),
    "expanded scalar": lambda: torch.tensor(2.5).expand(1000),
    "0-dim": lambda: torch.tensor(7),
    "requires grad": lambda: torch.ones(3, 4, requires_grad=True),
    "requires grad, large": lambda: large(300, 200).requires_grad_(),
    "result of a computation": lambda: torch.ones(300, 200, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.ones(5)),
    "empty": lambda: torch.empty(0),
    "empty of a shape": lambda: torch.empty(0, 16),
    "bfloat16, large": lambda: large(300, 200).bfloat16(),
    "bool": lambda: torch.tensor([True, False, True]),
    "bool, large": lambda: large(400, 400) % 3 == 0,
    "int64, large": lambda: torch.arange(20_000),
    "uint8 of odd length, large": lambda: torch.arange(100_003).to(torch.uint8),
    "conjugate": lambda: (torch.ones(3, dtype=torch.complex64) * 1j).conj(),
    "conjugate, large": lambda: (torch.ones(20_000, dtype=torch.complex64) * 1j).conj(),
    "negative view": lambda: (torch.ones(3, dtype=torch.complex64) * 1j).conj().imag,
}


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("cls", [CpuBackend, CudaBackend])
def test_a_private_copy_is_contiguous_equal_and_of_its_own(cls: type[DeviceBackend], tensor: str) -> None:
    source = TENSORS[tensor]()
    expected = source.detach().resolve_conj().resolve_neg().tolist()
    copy = cls().private_copy(source)
    assert copy.is_contiguous()
    assert (copy.shape, copy.dtype, copy.device) == (source.shape, source.dtype, source.device)
    assert (copy.requires_grad, copy.grad_fn) == (False, None)
    # What the transport reads is the memory itself.
    assert (copy.is_conj(), copy.is_neg()) == (False, False)
    assert copy.tolist() == expected
    if source.numel():
        # Overwritten on the whole, wherever its elements lie.
        memory = source.detach().untyped_storage()
        memory.fill_(0x55)
        assert copy.tolist() == expected
        assert copy.untyped_storage().data_ptr() != memory.data_ptr()


@pytest.mark.parametrize("cls", [CpuBackend, CudaBackend])
def test_a_private_copy_of_an_inference_tensor(cls: type[DeviceBackend]) -> None:
    """vLLM's workers run in inference mode, the threads of this package do not."""
    backend = cls()
    with torch.inference_mode():
        source = large(300, 200)
        copies = [backend.private_copy(source) for _ in range(2)]
        source.zero_()
    assert all(torch.equal(copy, large(300, 200)) for copy in copies)
    backend.recycle(copies)
    again = backend.private_copy(large(300, 200) + 1)
    assert torch.equal(again, large(300, 200) + 1)


def test_memory_that_is_used_again_belongs_to_one_copy_only() -> None:
    backend = CpuBackend()
    first, second = backend.private_copy(large(300, 200)), backend.private_copy(large(300, 200) + 1)
    memory = first.data_ptr()
    backend.recycle([first])
    third = backend.private_copy(large(300, 200) + 2)
    fourth = backend.private_copy(large(300, 200) + 3)
    assert third.data_ptr() == memory
    assert len({second.data_ptr(), third.data_ptr(), fourth.data_ptr()}) == 3
    for number, copy in enumerate([second, third, fourth], start=1):
        assert torch.equal(copy, large(300, 200) + number)


def test_recycled_memory_serves_another_type_and_shape() -> None:
    backend = CpuBackend()
    floats = backend.private_copy(large(300, 200))
    memory = floats.data_ptr()
    backend.recycle([floats])
    integers = torch.arange(120_000, dtype=torch.int16).reshape(3, 40_000)
    copy = backend.private_copy(integers)
    assert copy.data_ptr() == memory
    assert (copy.dtype, copy.shape) == (torch.int16, (3, 40_000))
    assert torch.equal(copy, integers)


def test_copies_by_several_threads_do_not_share_memory() -> None:
    backend = CpuBackend()
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(40):
            value = float(100 * number + turn)
            copies = [backend.private_copy(torch.full((150, 120), value + i)) for i in range(3)]
            if any(not bool((copy == value + i).all()) for i, copy in enumerate(copies)):
                wrong.append(f"thread {number}, turn {turn}")
            backend.recycle(copies)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert wrong == []


# -- facts for people --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "name", "prefix"), BACKENDS)
def test_describe_holds_plain_values(cls: type[DeviceBackend], name: str, prefix: str) -> None:
    facts = cls().describe()
    assert facts["name"] == name
    assert all(isinstance(value, (str, int, float)) for value in facts.values())


@pytest.mark.parametrize("cls", HARDWARE)
def test_describe_says_what_was_never_run(cls: type[DeviceBackend]) -> None:
    assert "never run" in cls().describe()["evidence"]


def test_describe_says_what_was_run() -> None:
    facts = CpuBackend().describe()
    assert facts["available"] is True
    assert "tested" in facts["evidence"]
    assert "never" not in facts["evidence"]


def test_a_device_that_this_torch_does_not_know_is_not_available() -> None:
    class Chip(DeviceBackend):
        name = "mychip"

    assert Chip().available() is False


@pytest.mark.parametrize("present", [True, False])
def test_a_device_is_available_when_its_module_says_so(present: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def is_available() -> bool:
            return present

    class Chip(DeviceBackend):
        name = "mychip"

    monkeypatch.setattr(torch, "mychip", Module, raising=False)
    assert Chip().available() is present


# -- ending a group ----------------------------------------------------------------------------------------


class StubBackend:
    """A device's transport."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self._name = name
        self._error = error
        self.aborts = 0

    def name(self) -> str:
        return self._name

    def abort(self) -> None:
        self.aborts += 1
        if self._error is not None:
            raise self._error


class StubGroup:
    """A process group that has a transport for some devices."""

    def __init__(self, **backends: Any) -> None:
        self._backends = backends

    def name(self) -> str:
        return "/".join(backend.name() for backend in self._backends.values())

    def _get_backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._backends[device.type]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[Any, str]:
    """What ``torch.distributed`` says of stub groups."""
    known: dict[Any, str] = {}
    monkeypatch.setattr(dist, "get_backend", lambda group: known[group])
    return known


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that knows the device "npu", as it does where torch_npu is loaded."""
    monkeypatch.setattr(torch, "device", lambda name: types.SimpleNamespace(type=name))


@pytest.fixture
def gloo_aborts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The calls of :func:`abort_gloo_group`, which is not run."""
    calls: list[tuple[Any, int]] = []
    monkeypatch.setattr(base, "abort_gloo_group", lambda group, rank: calls.append((group, rank)))
    return calls


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize("cls", HARDWARE)
def test_a_device_group_is_aborted_by_its_transport(
    cls: type[DeviceBackend], names: dict[Any, str], gloo_aborts: list[Any]
) -> None:
    backend, transport = cls(), StubBackend("nccl")
    group = StubGroup(**{backend.name: transport})
    names[group] = "nccl"
    backend.abort([group], 1)
    assert (transport.aborts, gloo_aborts) == (1, [])


def test_both_groups_are_ended(names: dict[Any, str], gloo_aborts: list[Any]) -> None:
    transport = StubBackend("nccl")
    host, device = StubGroup(cpu=StubBackend("gloo")), StubGroup(cuda=transport)
    names.update({host: "gloo", device: "nccl"})
    CudaBackend().abort([host, device], 3)
    assert (transport.aborts, gloo_aborts) == (1, [(host, 3)])


@pytest.mark.usefixtures("npu")
def test_a_transport_without_abort_is_left_alone() -> None:
    class Old:
        def name(self) -> str:
            return "hccl"

    NpuBackend().abort_device_group(StubGroup(npu=Old()))


def test_a_group_that_cannot_be_aborted_does_not_save_the_others(
    names: dict[Any, str], gloo_aborts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(group: Any, rank: int) -> None:
        raise ValueError("Process group is not initialized in the world group map")

    monkeypatch.setattr(base, "abort_gloo_group", fail)
    transport = StubBackend("nccl")
    host, device = StubGroup(cpu=StubBackend("gloo")), StubGroup(cuda=transport)
    names.update({host: "gloo", device: "nccl"})
    try:
        CudaBackend().abort([host, device], 0)
    except ValueError:
        pass  # it may be told
    assert transport.aborts == 1


def test_gloo_beside_another_transport_is_ended_too(names: dict[Any, str], gloo_aborts: list[Any]) -> None:
    """vLLM's split groups: the group for the host has both transports, "cpu:gloo,cuda:nccl"."""
    group = StubGroup(cpu=StubBackend("gloo"), cuda=StubBackend("nccl"))
    names[group] = "cpu:gloo,cuda:nccl"
    CudaBackend().abort([group], 2)
    assert gloo_aborts == [(group, 2)]


@pytest.fixture
def lone_world() -> Iterator[None]:
    """torch.distributed with this process alone."""
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("lone_world")
@pytest.mark.parametrize("name", ["gloo", "cpu:gloo"])
def test_gloo_is_known_by_whatever_name_the_group_was_made(name: str, gloo_aborts: list[Any]) -> None:
    group = dist.new_group([0], backend=name)
    CpuBackend().abort([group], 0)
    assert gloo_aborts == [(group, 0)]


@pytest.mark.usefixtures("lone_world")
def test_a_group_that_torch_has_forgotten_is_ended_nevertheless(gloo_aborts: list[Any]) -> None:
    """At exit, somebody may have called destroy_process_group() before us."""
    group = dist.new_group([0])
    dist.destroy_process_group()
    CpuBackend().abort([group], 0)
    assert gloo_aborts == [(group, 0)]


# -- gloo itself -------------------------------------------------------------------------------------------


class GlooRanks:
    """A gloo group whose ranks all live in this process."""

    def __init__(self, size: int) -> None:
        store = dist.HashStore()
        self.groups: list[Any] = [None] * size

        def connect(rank: int) -> None:
            prefix = dist.PrefixStore("ranks", store)
            self.groups[rank] = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=60))

        threads = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert all(group is not None for group in self.groups)
        self._waiters: list[threading.Thread] = []
        self.errors: list[str] = []

    def isend(self, source: int, target: int, elements: int = 1 << 16) -> threading.Thread:
        """Send, and wait for it in a thread, as the ledger does."""
        work = self.groups[source].send([torch.zeros(elements)], target, 0)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as exc:
                self.errors.append(str(exc))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        self._waiters.append(thread)
        return thread

    def close(self) -> None:
        """End whatever is left, connection by connection: a thread that stays in gloo ends the process."""
        for rank, group in enumerate(self.groups):
            for other in range(len(self.groups)):
                if other != rank:
                    try:
                        group.recv([torch.empty(1)], other, 1).wait(timedelta(milliseconds=10))
                    except RuntimeError:
                        pass
        for thread in self._waiters:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.fixture
def three_ranks() -> Iterator[GlooRanks]:
    ranks = GlooRanks(3)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("target", [1, 2])
def test_abort_ends_a_blocked_wait_whoever_is_the_receiver(three_ranks: GlooRanks, target: int) -> None:
    waiters = [three_ranks.isend(0, target), three_ranks.isend(0, target, 1)]
    begun = time.monotonic()
    abort_gloo_group(three_ranks.groups[0], 0)
    for waiter in waiters:
        waiter.join(PATIENCE_S)
    assert [waiter.is_alive() for waiter in waiters] == [False, False]
    assert len(three_ranks.errors) == 2
    assert time.monotonic() - begun < PATIENCE_S / 2


def test_abort_ends_a_blocked_wait_when_another_rank_has_gone_already(three_ranks: GlooRanks) -> None:
    """The rank that the abort would turn to first closes its connections: no time-out can be had from it."""
    waiter = three_ranks.isend(1, 2)
    abort_gloo_group(three_ranks.groups[0], 0)
    abort_gloo_group(three_ranks.groups[1], 1)
    waiter.join(2.0)
    assert not waiter.is_alive()


def test_abort_twice(three_ranks: GlooRanks) -> None:
    waiter = three_ranks.isend(0, 2)
    abort_gloo_group(three_ranks.groups[0], 0)
    abort_gloo_group(three_ranks.groups[0], 0)
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_abort_takes_no_message_from_the_peer(three_ranks: GlooRanks) -> None:
    """What the peers have sent before stays unread; it is not mistaken for an answer to the abort."""
    three_ranks.isend(1, 0, 1)
    three_ranks.isend(2, 0, 1)
    waiter = three_ranks.isend(0, 2)
    abort_gloo_group(three_ranks.groups[0], 0)
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive()


def test_a_group_of_one_has_nothing_to_end() -> None:
    ranks = GlooRanks(1)
    abort_gloo_group(ranks.groups[0], 0)


def test_abort_reaches_every_network_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several interfaces gloo has a context for each and chooses by tag; messages have tag 0."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo,lo")
    ranks = GlooRanks(2)
    try:
        waiter = ranks.isend(0, 1)
        abort_gloo_group(ranks.groups[0], 0)
        waiter.join(2.0)
        assert not waiter.is_alive()
    finally:
        for rank in (0, 1):
            try:
                ranks.groups[rank].recv([torch.empty(1)], 1 - rank, 3).wait(timedelta(milliseconds=10))
            except RuntimeError:
                pass
        ranks.close()
