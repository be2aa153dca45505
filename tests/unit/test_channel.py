"""Which group a tensor travels on, and how its completion is learned; the transport is a recorder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from vllm_pp_plugin.comm import channel as channel_module
from vllm_pp_plugin.comm.channel import SendChannel
from vllm_pp_plugin.comm.header import Header
from vllm_pp_plugin.comm.ledger import PendingSend
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.devices.base import Completion, DeviceBackend
from vllm_pp_plugin.errors import SendFailedError

CPU_GROUP, DEVICE_GROUP = "cpu group", "device group"


class Done:
    """A work that is over."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class Chip(DeviceBackend):
    """A device whose tensors are torch's "meta" tensors: not on the CPU, and without memory."""

    name = "meta"
    communicator_name = "Chip"

    def __init__(self) -> None:
        self.adopted: list[torch.device] = []
        self.recycled: list[Sequence[torch.Tensor]] = []

    def adopt_thread(self, device: torch.device) -> None:
        self.adopted.append(device)

    def recycle(self, copies: Sequence[torch.Tensor]) -> None:
        self.recycled.append(list(copies))


class Transport:
    """Writes down every posted tensor, and fails at a chosen one."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, int, Any]] = []
        self.fail_at: int | None = None

    def isend(self, tensor: torch.Tensor, dst: int, group: Any) -> Done:
        if len(self.posted) == self.fail_at:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1")
        self.posted.append((tensor.device.type, dst, group))
        return Done()


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    recorder = Transport()
    monkeypatch.setattr(channel_module, "dist", recorder)
    return recorder


@pytest.fixture
def chip() -> Chip:
    return Chip()


@pytest.fixture
def channel(transport: Transport, chip: Chip) -> Iterator[SendChannel]:
    made = SendChannel("pp:0", CPU_GROUP, DEVICE_GROUP, [4, 7], 0, chip, PluginConfig(), torch.device("meta:3"))  # type: ignore[arg-type]
    yield made
    made.close()


MIXED = [("host", torch.ones(3)), ("chip", torch.empty(5, device="meta")), ("host2", torch.ones(1))]


def test_cpu_and_device_tensors_mixed(
    channel: SendChannel, transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header and host tensors on gloo, to be waited for; device tensors on the device's group, to be polled."""
    rules: list[Completion] = []
    put = SendChannel._put

    def recorded(self: SendChannel, send: PendingSend, tensor: torch.Tensor, peer: int, rule: Completion) -> None:
        rules.append(rule)
        put(self, send, tensor, peer, rule)

    monkeypatch.setattr(SendChannel, "_put", recorded)
    handles = channel.isend(Header.of("metadata"), MIXED, 1)
    channel.drain()
    assert [group for _, _, group in transport.posted] == [CPU_GROUP, CPU_GROUP, CPU_GROUP, DEVICE_GROUP, CPU_GROUP]
    assert [device for device, _, _ in transport.posted] == ["cpu", "cpu", "cpu", "meta", "cpu"]
    assert {dst for _, dst, _ in transport.posted} == {7}, "the global rank, not the place in the group"
    wait, poll = Completion.WAIT, Completion.POLL
    assert rules == [wait, wait, wait, poll, wait]
    assert len(handles) == 4


def test_copies_are_recycled_once_and_given_tensors_never(channel: SendChannel, chip: Chip) -> None:
    """Given tensors belong to nobody's pool."""
    channel.isend(Header.of(0), [("a", torch.ones(2)), ("b", torch.ones(3))], 1)
    channel.isend(Header.of(0), [("c", torch.ones(4))], 1, donate=True)
    channel.isend(Header.of(0), [("d", torch.ones(4)), ("e", torch.ones(2, 3).t())], 1, donate=True)
    channel.drain()
    assert [[tuple(copy.shape) for copy in copies] for copies in chip.recycled] == [[(2,), (3,)], [(3, 2)]]


def test_threads_adopt_the_device(channel: SendChannel, chip: Chip) -> None:
    """A new thread starts on device 0: both helper threads must make the rank's device current first."""
    channel.isend(Header.of(0), [], 1)
    channel.drain()
    channel.close()
    assert chip.adopted == [torch.device("meta:3")] * 2


def test_host_tensors_stay_on_the_host_under_another_default_device(transport: Transport) -> None:
    """A model runner may have made its device the default one; a length on the device group would hang the peer."""
    from vllm_pp_plugin.devices.cpu import CpuBackend

    backend = CpuBackend()
    with torch.device("meta"):
        header = Header.of([1, 2])
        copy = backend.private_copy(torch.ones(100_000, device="cpu"))
    assert header.length.is_cpu and header.pickled.is_cpu
    assert copy.is_cpu
    assert float(copy.sum()) == 100_000


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_posting_that_fails_names_the_rank_once(channel: SendChannel, transport: Transport, part: int) -> None:
    """At the first part nothing was sent and the group goes on; later it is out of step and stays refused."""
    transport.fail_at = part
    with pytest.raises(SendFailedError) as caught:
        channel.isend(Header.of(0), [("x", torch.ones(2))], 1)
    assert caught.value.peer == 7
    assert caught.value.keys == ("x",)
    assert str(caught.value).count("rank 7") == 1
    assert "float32" in str(caught.value) or part < 2
    transport.fail_at = None
    if part == 0:
        channel.isend(Header.of(0), [], 1)
    else:
        with pytest.raises(SendFailedError, match="cannot send to rank 7"):
            channel.isend(Header.of(0), [], 1)
    channel.drain()
    assert channel.stats().retained_bytes == 0
