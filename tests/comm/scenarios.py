"""What the ranks of the communication tests do. Each function runs in every rank of a world."""

from __future__ import annotations

import gc
import pickle
import random
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.comm import messages
from tests.support.groups import arm, barrier, equal, plugin_group, stock_group
from vllm_pp_plugin import plugin
from vllm_pp_plugin.seams.standalone import make_coordinator

BATCH = 25


def _stats(group: Any) -> Any:
    return group.device_communicator.pp_channel.stats()


def random_messages(kind: str, count: int) -> int:
    """Send ``count`` messages in batches; the receiver takes a batch only after all of it was overwritten.

    Returns:
        On the receiver the number of messages that differ, on the sender the number still in flight at the end.
    """
    wrong = 0
    gc.collect()
    gc.freeze()  # collections below look at this scenario's objects, not at all that vLLM imported
    with plugin_group() as group:
        for first in range(0, count, BATCH):
            if group.rank_in_group == 0:
                for seed in range(first, first + BATCH):
                    sent = messages.message(kind, seed)
                    handles = group.isend_tensor_dict(sent)
                    assert len(handles) == 1 + sum(
                        isinstance(value, torch.Tensor) and value.numel() > 0 for value in sent.values()
                    )
                    if kind == "drop and collect":
                        del sent, handles
                        gc.collect()
                        junk = [torch.full((size,), 0x5A, dtype=torch.uint8) for size in (64, 4096, 65536, 1 << 20)]
                        del junk
                    else:
                        messages.overwrite(sent)
                barrier()
            else:
                barrier()
                for seed in range(first, first + BATCH):
                    wrong += not equal(group.recv_tensor_dict(), messages.message(kind, seed))
        barrier()
        if group.rank_in_group == 0:
            channel = group.device_communicator.pp_channel
            channel.drain()
            stats = _stats(group)
            assert stats.sends == count
            assert not getattr(group, "_pending_isends", ())
            return stats.pending + stats.retained_bytes
        return wrong


def handles_need_no_receiver() -> tuple[float, float]:
    """wait() on every handle, twice in a row, while the receiver has not come; the longest wait in seconds."""
    longest = 0.0
    with plugin_group() as group:
        sent = {"hidden_states": torch.ones(1 << 19), "residual": torch.ones(1 << 19), "step": 3}
        if group.rank_in_group == 0:
            handles = group.isend_tensor_dict(sent)
            for handle in [*handles, *handles]:
                begun = time.perf_counter()
                handle.wait()
                longest = max(longest, time.perf_counter() - begun)
                assert handle.is_completed()
            pending = _stats(group).pending
            barrier()
            return longest, pending
        barrier()
        assert equal(group.recv_tensor_dict(), sent)
        return 0.0, 0


def blocked(delay_s: float, rounds: int, use_plugin: bool) -> list[float]:
    """Seconds inside isend_tensor_dict for 2 x 2 MiB, each source overwritten right after (plugin only)."""
    times = []
    with plugin_group() if use_plugin else stock_group() as group:
        sources = {"hidden_states": torch.empty(1 << 19), "residual": torch.empty(1 << 19)}
        for turn in range(rounds):
            barrier()
            if group.rank_in_group == 0:
                for source in sources.values():
                    source.fill_(turn)
                begun = time.perf_counter()
                handles = group.isend_tensor_dict(sources)
                times.append(time.perf_counter() - begun)
                if use_plugin:
                    messages.overwrite(sources)
                for handle in handles:
                    handle.wait()
            else:
                time.sleep(delay_s)  # the case itself: a receiver that is late
                received = group.recv_tensor_dict()
                assert all(bool((tensor == turn).all()) for tensor in received.values())
        barrier()
    return times[1:]


def blocked_beside_stock(delay_s: float, rounds: int) -> dict[str, float]:
    """Median seconds of a stock send, a plugin send and the private copies alone, in turn, for 2 x 2 MiB."""
    plugin.disarm()
    stock = make_coordinator()
    arm()
    ours = make_coordinator()
    backend = ours.device_communicator.pp_channel.backend
    sources = {"hidden_states": torch.empty(1 << 19), "residual": torch.empty(1 << 19)}
    times: dict[str, list[float]] = {"stock": [], "plugin": [], "copy": []}
    for turn in range(rounds):
        for side, group in (("stock", stock), ("plugin", ours), ("copy", None)):
            barrier()
            if dist.get_rank() == 1:
                time.sleep(delay_s)  # the case itself: a receiver that is late
                if group is not None:
                    received = group.recv_tensor_dict()
                    assert all(bool((tensor == turn).all()) for tensor in received.values())
                continue
            for source in sources.values():
                source.fill_(turn)
            begun = time.perf_counter()
            if group is None:
                copies = [backend.private_copy(source) for source in sources.values()]
                times[side].append(time.perf_counter() - begun)
                backend.recycle(copies)
                continue
            handles = group.isend_tensor_dict(sources)
            times[side].append(time.perf_counter() - begun)
            if side == "plugin":
                messages.overwrite(sources)
            for handle in handles:
                handle.wait()
    barrier()
    for group in (stock, ours):
        group.destroy()
    plugin.disarm()
    return {side: statistics.median(values[1:]) for side, values in times.items() if values}


def with_stock(plugin_rank: int, count: int) -> int:
    """One rank has the plugin, the other is stock; both send to each other. Number of wrong messages."""
    rank = dist.get_rank()
    if rank == plugin_rank:
        arm()
    else:
        plugin.disarm()
    group = make_coordinator()
    ours = getattr(group.device_communicator, "pp_channel", None)
    assert (ours is not None) == (rank == plugin_rank)
    wrong = 0
    kinds = [kind for kind in messages.KINDS if kind != "non-contiguous"]  # stock's gloo sends refuse those
    kinds.remove("mixed")
    for sender in (0, 1):
        for kind in kinds:
            for seed in range(count):
                expected = messages.message(kind, seed)
                if rank == sender:
                    for handle in group.isend_tensor_dict(expected):
                        handle.wait()
                else:
                    wrong += not equal(group.recv_tensor_dict(), expected)
                barrier()
    if ours is not None:
        ours.drain()
    group.destroy()
    plugin.disarm()
    return wrong


def raw_wire() -> bool:
    """Take a message with plain receives: length, pickle, tensors, in this order."""
    from vllm.distributed.parallel_state import TensorMetadata

    sent = {"a": torch.arange(10), "none": None, "empty": torch.empty(0, 3), "b": torch.tensor(2.5)}
    with plugin_group() as group:
        if group.rank_in_group == 0:
            group.isend_tensor_dict(sent)
            barrier()
            return True
        length = torch.empty(1, dtype=torch.long)
        dist.recv(length, src=0, group=group.cpu_group)
        pickled = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(pickled, src=0, group=group.cpu_group)
        metadata = pickle.loads(pickled.numpy().tobytes())
        assert [key for key, _ in metadata] == list(sent)
        assert metadata[0][1] == TensorMetadata("cpu", torch.int64, torch.Size([10]))
        assert metadata[1][1] is None
        a, b = torch.empty(10, dtype=torch.long), torch.empty(())
        dist.recv(a, src=0, group=group.cpu_group)
        dist.recv(b, src=0, group=group.cpu_group)
        barrier()
        return torch.equal(a, sent["a"]) and torch.equal(b, sent["b"])


def sync_send() -> tuple[int, int, bool]:
    """send_tensor_dict returns when the late receiver has taken it, and leaves nothing behind."""
    with plugin_group() as group:
        if group.rank_in_group == 0:
            begun = time.perf_counter()
            assert group.send_tensor_dict({"x": torch.ones(1000), "view": torch.ones(4, 4).t()}) is None
            waited = time.perf_counter() - begun
            stats = _stats(group)
            barrier()
            return stats.pending, stats.retained_bytes, waited > 0.15
        time.sleep(0.2)
        assert equal(group.recv_tensor_dict(), {"x": torch.ones(1000), "view": torch.ones(4, 4)})
        barrier()
        return 0, 0, True


def stock_sync_send_on_another_group() -> int:
    """With the plugin installed, a group that is not the pipeline's sends as stock; entries that stock keeps."""
    arm()
    group = make_coordinator("other")
    assert type(group.device_communicator).__name__ == "CpuCommunicator"
    if dist.get_rank() == 0:
        group.send_tensor_dict({"x": torch.ones(3)})
        kept = len(getattr(group, "_pending_isends", ()))
    else:
        assert equal(group.recv_tensor_dict(), {"x": torch.ones(3)})
        kept = 0
    barrier()
    group.destroy()
    plugin.disarm()
    return kept


def both_send_first(nbytes: int, rounds: int) -> float:
    """Each rank sends, then receives; seconds for all rounds."""
    with plugin_group({"max_retained_bytes": 1 << 30}) as group:
        barrier()
        begun = time.perf_counter()
        for turn in range(rounds):
            mine = torch.full((nbytes // 4,), float(group.rank_in_group + 10 * turn))
            group.isend_tensor_dict({"x": mine, "pad": "p" * 300_000})
            mine.fill_(-1)
            received = group.recv_tensor_dict()
            assert bool((received["x"] == 1 - group.rank_in_group + 10 * turn).all())
        return time.perf_counter() - begun


def bounds(sends: int, most_sends: int, most_bytes: int) -> dict[str, Any]:
    """Many sends to a receiver that is slower than the sender; what the ledger held at most."""
    with plugin_group({"max_pending_sends": most_sends, "max_retained_bytes": most_bytes}) as group:
        rng = random.Random(7)
        sizes = [rng.randrange(1, 4000) for _ in range(sends)]
        if group.rank_in_group == 0:
            for turn, size in enumerate(sizes):
                group.isend_tensor_dict({"x": torch.full((size,), turn % 251, dtype=torch.uint8)})
            group.device_communicator.pp_channel.drain(60)
            stats = _stats(group)
            barrier()
            return {
                "peak_pending": stats.peak_pending,
                "peak_bytes": stats.peak_retained_bytes,
                "waits": stats.back_pressure_waits,
                "waited_s": stats.back_pressure_s,
                "left": stats.pending + stats.retained_bytes,
            }
        wrong = 0
        for turn, size in enumerate(sizes):
            received = group.recv_tensor_dict()["x"]
            wrong += received.numel() != size or not bool((received == turn % 251).all())
        barrier()
        return {"wrong": wrong}


def oversize() -> bool:
    """A message larger than max_retained_bytes goes alone instead of never."""
    with plugin_group({"max_retained_bytes": 1000}) as group:
        if group.rank_in_group == 0:
            for turn in range(3):
                group.isend_tensor_dict({"x": torch.full((5000,), float(turn))})
            barrier()
            return _stats(group).peak_pending == 1
        ok = all(bool((group.recv_tensor_dict()["x"] == turn).all()) for turn in range(3))
        barrier()
        return ok


def tensor_parallel_slices() -> int:
    """PP=2 x TP=2: each TP rank sends its slice, the receivers gather. Number of wrong messages."""
    arm()
    pp = make_coordinator("pp", group_ranks=[[0, 2], [1, 3]])
    tp = make_coordinator("tp", group_ranks=[[0, 1], [2, 3]])
    assert type(tp.device_communicator).__name__ == "CpuCommunicator"  # only the pipeline group changes
    wrong = 0
    for turn in range(100):
        rng = random.Random(turn)
        expected = {
            "even": messages.tensor(rng, (rng.randint(1, 50) * 2, 6), torch.float32),
            "odd": messages.tensor(rng, (rng.randint(0, 20) * 2 + 1, 3), torch.bfloat16),
            "whole": messages.tensor(rng, (8, 8), torch.int32),
            "view": messages.tensor(rng, (6, 4), torch.float32).t(),
            "n": turn,
        }
        override = {"whole": False}
        if pp.is_first_rank:
            pp.isend_tensor_dict(expected, all_gather_group=tp, all_gather_tensors=override)
            messages.overwrite(expected)
        else:
            received = pp.recv_tensor_dict(all_gather_group=tp, all_gather_tensors=override)
            wrong += not equal(received, expected)
    barrier()
    for group in (pp, tp):
        group.destroy()
    plugin.disarm()
    return wrong


def subclass_without_init() -> bool:
    """A vendor's coordinator that repeats __init__ in its own words and builds the communicator itself."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.parallel_state import GroupCoordinator

    class VendorCommunicator(CpuCommunicator):
        pass

    class VendorCoordinator(GroupCoordinator):
        def __init__(self) -> None:
            self.rank = dist.get_rank()
            self.ranks = list(range(dist.get_world_size()))
            self.world_size = len(self.ranks)
            self.rank_in_group = self.rank
            self.unique_name = "pp:vendor"
            self.device_group = dist.new_group(self.ranks, backend="gloo")
            self.cpu_group = dist.new_group(self.ranks, backend="gloo")
            self.use_cpu_custom_send_recv = False
            self.mq_broadcaster = None
            self.device_communicator = VendorCommunicator(
                self.cpu_group, torch.device("cpu"), self.device_group, self.unique_name
            )

    arm()
    group = VendorCoordinator()
    communicator = group.device_communicator
    assert isinstance(communicator, VendorCommunicator)
    assert communicator.pp_channel is not None
    peer = 1 - group.rank
    mine = torch.full((100_000,), float(group.rank))
    group.isend_tensor_dict({"x": mine}, dst=peer)
    mine.fill_(-1)
    ok = bool((group.recv_tensor_dict(src=peer)["x"] == peer).all())
    barrier()
    group.destroy()
    plugin.disarm()
    return ok


def bad_destination() -> list[str]:
    """Destinations that do not exist are refused before anything is sent."""
    texts = []
    with plugin_group() as group:
        for dst in (2, -1, group.rank_in_group):
            try:
                group.isend_tensor_dict({"x": torch.ones(1)}, dst=dst)
            except ValueError as exc:
                texts.append(str(exc))
        assert _stats(group).sends == 0
        barrier()
    return texts


def one_rank() -> tuple[list[Any], Any]:
    """A group of one has nothing to send, with the plugin as without."""
    arm()
    group = make_coordinator("pp", group_ranks=[[0], [1]])
    tensors = {"x": torch.ones(2)}
    result = group.isend_tensor_dict(tensors), group.send_tensor_dict(tensors) is tensors
    barrier()
    group.destroy()
    plugin.disarm()
    return result


def donated() -> dict[str, Any]:
    """A caller that gives its tensors away saves the copies of those that are contiguous."""
    from vllm.distributed.parallel_state import _split_tensor_dict

    from vllm_pp_plugin.comm.header import Header

    sent = {"whole": torch.arange(40_000.0), "view": torch.arange(9.0).reshape(3, 3).t()}
    with plugin_group() as group:
        if group.rank_in_group == 0:
            channel = group.device_communicator.pp_channel
            make, copied = channel.backend.private_copy, []

            def counted(tensor: torch.Tensor) -> torch.Tensor:
                copied.append(tensor.shape)
                return make(tensor)

            channel.backend.private_copy = counted
            header = Header.of(_split_tensor_dict(sent)[0])
            group.device_communicator.pp_isend(header, list(sent.items()), 1, donate=True)
            barrier()
            return {"copied": [tuple(shape) for shape in copied]}
        barrier()
        return {"right": equal(group.recv_tensor_dict(), sent)}


def composed_by_name() -> bool:
    """The class that a platform may name is the one that the plugin composes."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    named = resolve_obj_by_qualname("vllm_pp_plugin.seams.communicator_classes.CpuPPCommunicator")
    with plugin_group() as group:
        same = type(group.device_communicator) is named
        barrier()
    return same


def out_of_memory_leaves_no_half_message() -> bool:
    """A copy that fails is raised before the first byte leaves; the next message arrives."""
    with plugin_group() as group:
        if group.rank_in_group == 0:
            channel = group.device_communicator.pp_channel
            make = channel.backend.private_copy
            calls = []

            def fails_second(tensor: torch.Tensor) -> torch.Tensor:
                calls.append(tensor)
                if len(calls) == 2:
                    raise MemoryError("made up")
                return make(tensor)

            channel.backend.private_copy = fails_second
            try:
                group.isend_tensor_dict({"a": torch.ones(9), "b": torch.ones(9)})
                raise AssertionError("the error was swallowed")
            except MemoryError:
                pass
            assert _stats(group).pending == 0 and _stats(group).retained_bytes == 0
            group.isend_tensor_dict({"c": torch.ones(5)})
            barrier()
            return True
        ok = equal(group.recv_tensor_dict(), {"c": torch.ones(5)})
        barrier()
        return ok


def shared_memory(plugin_ranks: list[int], shm_ranks: list[int]) -> dict[str, Any]:
    """A host whose stock path is shared memory, with the plugin on some ranks only.

    Returns:
        Whether this rank sends through the channel, what the shared-memory double was asked, and the message.
    """
    from tests.comm import shm_double
    from vllm_pp_plugin.comm import communicator

    rank = dist.get_rank()
    communicator.AGREEMENT_TIMEOUT_S = 3.0  # seconds; how long the missing vote is waited for
    plugin.disarm()
    if rank in plugin_ranks:
        arm()
    if rank in shm_ranks:
        shm_double.install()
    try:
        group = make_coordinator()
        barrier()
        sent = {"hidden_states": torch.arange(12.0).reshape(3, 4), "residual": torch.ones(2)}
        if rank == 0:
            group.isend_tensor_dict(sent)
            received = sent
        else:
            received = group.recv_tensor_dict()
        barrier()
        result = {
            "async": getattr(group.device_communicator, "pp_channel", None) is not None,
            "shm_sends": shm_double.CALLS["send"],
            "shm_receives": shm_double.CALLS["receive"],
            "right": equal(received, sent),
        }
        group.destroy()
        return result
    finally:
        shm_double.remove()
        plugin.disarm()


def doctor_on_shared_memory_host() -> dict[str, Any]:
    """What doctor says of the path, with and without the operators."""
    from tests.comm import shm_double
    from vllm_pp_plugin import doctor

    said = {"gloo": doctor.diagnose()["device"], "off": doctor.diagnose('{"async_sends": false}')["device"]}
    shm_double.install()
    try:
        said["shm"] = doctor.diagnose()["device"]
    finally:
        shm_double.remove()
        plugin.disarm()
    return said


class VendorWorker:
    """A worker with a sleep of its own, as vllm-ascend's."""

    def sleep(self, level: int = 1) -> str:
        return f"slept at level {level}"


def teardown_with_sends_in_flight(receiver_comes: bool, via: str) -> dict[str, Any]:
    """Destroy the group (or put the worker to sleep) while messages are in flight.

    Returns:
        On the sender: seconds, whether the buffers were still held while it waited, what is left, and the error.
    """
    import threading
    import weakref

    from vllm_pp_plugin.errors import ChannelClosedError, DrainTimeoutError

    arm(VendorWorker, drain_deadline_s=3.0)
    group = make_coordinator()
    rank = dist.get_rank()
    if rank == 1:
        barrier()
        right = None
        if receiver_comes:
            time.sleep(0.5)  # the case itself: the sender is destroying its group by now
            right = all(bool((group.recv_tensor_dict()["x"] == turn).all()) for turn in range(8))
        barrier()
        group.destroy()
        plugin.disarm()
        return {"right": right}

    channel = group.device_communicator.pp_channel
    copies: list[Any] = []
    make = channel.backend.private_copy

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        copy = make(tensor)
        copies.append(weakref.ref(copy))
        return copy

    channel.backend.private_copy = watched
    for turn in range(8):
        group.isend_tensor_dict({"x": torch.full((300_000,), float(turn))})
    barrier()
    freed_early: list[bool] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            # The copies first: the drain may finish a send between the two looks.
            alive = sum(ref() is not None for ref in copies)
            freed_early.append(alive < channel.stats().pending)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun, error = time.perf_counter(), ""
    try:
        if via == "destroy":
            group.destroy()
        else:
            error = VendorWorker().sleep(level=2)
    except DrainTimeoutError as exc:
        error = str(exc)
    seconds = time.perf_counter() - begun
    over.set()
    watcher.join()
    left = channel.stats().pending
    barrier()
    if via != "destroy":
        group.destroy()
    closed = ""
    try:
        group.isend_tensor_dict({"x": torch.ones(1)})
    except ChannelClosedError as exc:
        closed = str(exc)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pp-send")]
    plugin.disarm()
    return {
        "seconds": seconds,
        "freed_early": any(freed_early),
        "left": left,
        "error": error,
        "closed": closed,
        "threads": names,
    }
