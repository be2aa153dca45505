"""What was sent is what arrives, whatever happens to the source; and stock vLLM understands it."""

from __future__ import annotations

import statistics

import pytest

from tests.comm import messages
from tests.support.world import World

HERE = "tests.comm.scenarios"
SENDS = 1000


@pytest.mark.slow
@pytest.mark.parametrize("kind", messages.KINDS)
def test_random_messages(pair: World, kind: str) -> None:
    """1,000 sends of a kind, each source overwritten (or freed, and the allocator refilled) before it is taken."""
    assert pair.run(f"{HERE}:random_messages", timeout=200, kind=kind, count=SENDS) == [0, 0]


def test_handles_need_no_receiver(pair: World) -> None:
    """gloo's own wait() would block until the peer comes, and for ever the second time."""
    (longest, pending), _ = pair.run(f"{HERE}:handles_need_no_receiver")
    assert longest < 1.0, "a wait for the receiver would have ended the scenario, by its time-out"
    assert pending == 1, "the message must still have been in flight while its handles were waited for"


@pytest.mark.parametrize("plugin_rank", [0, 1])
def test_stock_on_the_other_side(pair: World, plugin_rank: int) -> None:
    """Each sends to the other; one side is stock vLLM."""
    assert pair.run(f"{HERE}:with_stock", plugin_rank=plugin_rank, count=15) == [0, 0]


def test_wire_format(pair: World) -> None:
    """Length, pickle, tensors: taken apart with plain receives."""
    assert pair.run(f"{HERE}:raw_wire") == [True, True]


def test_tensor_parallel_slices(four: World) -> None:
    """TP ranks send slices and the receivers gather them, with sizes that do and do not divide."""
    assert four.run(f"{HERE}:tensor_parallel_slices") == [0, 0, 0, 0]


def test_sync_send_leaves_nothing(pair: World) -> None:
    """send_tensor_dict waits for the late receiver; afterwards the ledger is empty."""
    (pending, retained, waited), _ = pair.run(f"{HERE}:sync_send")
    assert (pending, retained, waited) == (0, 0, True)


def test_other_groups_stay_stock(pair: World) -> None:
    """Stock's sync send drops its own pending entry by identity; a wrapper that copied the list would leak it."""
    assert pair.run(f"{HERE}:stock_sync_send_on_another_group") == [0, 0]


def test_both_send_before_they_receive(pair: World) -> None:
    """On vLLM 0.28 two such ranks wait for each other for ever; messages here exceed every buffer on the way."""
    seconds = pair.run(f"{HERE}:both_send_first", timeout=60, nbytes=16 << 20, rounds=4)
    assert max(seconds) < 10


def test_bounds(pair: World) -> None:
    """10,000 sends to a slower receiver stay under both limits, and waiting at the limit is counted."""
    sent, received = pair.run(f"{HERE}:bounds", timeout=200, sends=10_000, most_sends=16, most_bytes=40_000)
    assert received == {"wrong": 0}
    assert sent["peak_pending"] <= 16
    assert sent["peak_bytes"] <= 40_000
    assert sent["waits"] > 0
    assert sent["waited_s"] > 0
    assert sent["left"] == 0


def test_oversize_message_goes_alone(main_pair: World) -> None:
    """Larger than max_retained_bytes is possible, one at a time."""
    assert main_pair.run(f"{HERE}:oversize") == [True, True]


def test_coordinator_that_never_called_init(pair: World) -> None:
    """As vllm-ascend's: the seams reach it through the base classes."""
    assert pair.run(f"{HERE}:subclass_without_init") == [True, True]


def test_bad_destination(main_pair: World) -> None:
    """Negative ranks too: an index would silently mean the last rank."""
    texts = main_pair.run(f"{HERE}:bad_destination")[0]
    assert len(texts) == 3
    assert all("cannot send to rank" in text and "ranks 0 to 1" in text for text in texts)


def test_group_of_one(main_pair: World) -> None:
    """As upstream defines it."""
    assert main_pair.run(f"{HERE}:one_rank") == [([], True), ([], True)]


def test_donated_tensors_are_not_copied(main_pair: World) -> None:
    """Only the view is, since the transport wants contiguous memory."""
    sent, received = main_pair.run(f"{HERE}:donated")
    assert sent == {"copied": [(3, 3)]}
    assert received == {"right": True}


def test_composed_class_has_a_name(main_pair: World) -> None:
    """For platforms that name their communicator by a string."""
    assert main_pair.run(f"{HERE}:composed_by_name") == [True, True]


def test_failed_copy_sends_nothing(main_pair: World) -> None:
    """Out of memory in the second copy must not leave the peer with half a message."""
    assert main_pair.run(f"{HERE}:out_of_memory_leaves_no_half_message") == [True, True]


@pytest.mark.slow
def test_blocked_time_against_old_stock(old_pair: World) -> None:
    """vLLM 0.28 blocks its caller for as long as the receiver is late; the plugin at most a fiftieth of that.

    A ratio of medians from one run; the best of three rounds, since other work on the machine only adds.
    """
    ratios = []
    for _ in range(3):
        stock = old_pair.run(f"{HERE}:blocked", delay_s=0.1, rounds=11, use_plugin=False)[0]
        ours = old_pair.run(f"{HERE}:blocked", delay_s=0.1, rounds=21, use_plugin=True)[0]
        ratios.append(statistics.median(stock) / statistics.median(ours))
        if ratios[-1] >= 50:
            return
    pytest.fail(f"stock/plugin blocked time, three rounds: {ratios}")


@pytest.mark.slow
def test_blocked_time_against_new_stock(main_pair: World) -> None:
    """On 0.29 and later the plugin adds at most the copy, and takes an overwrite right after."""
    seen = []
    for _ in range(5):
        seen.append(main_pair.run(f"{HERE}:blocked_beside_stock", delay_s=0.1, rounds=31)[0])
        if seen[-1]["plugin"] <= seen[-1]["stock"] + seen[-1]["copy"]:
            return
    pytest.fail(f"median seconds, five rounds: {seen}")
