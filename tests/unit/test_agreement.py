"""The ranks' agreement on a transport: the same answer everywhere, in every order of events."""

from __future__ import annotations

import datetime
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from vllm_pp_plugin.comm.agreement import ASIDE, ON, decide, vote

PATIENCE_S = 10.0
SOON_S = 0.002

_rounds = itertools.count()


def new_group() -> str:
    return f"pp:{next(_rounds)}"


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results of calls that run at the same time."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as exc:  # noqa: BLE001 - compared with what was expected
            results[number] = exc

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture(scope="module")
def tcp() -> Iterator[list[dist.Store]]:
    """A server and the clients of three ranks, as vLLM's process groups have them."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield [dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False) for _ in range(3)]
    del server


@pytest.fixture(params=["hash", "tcp"])
def stores(request: pytest.FixtureRequest, tcp: list[dist.Store]) -> list[dist.Store]:
    """A store, seen by three ranks and under a group's prefix."""
    if request.param == "tcp":
        return [dist.PrefixStore("group", store) for store in tcp]
    store = dist.HashStore()
    return [dist.PrefixStore("group", store) for _ in range(3)]


# -- torch's stores ----------------------------------------------------------------------------------------


def test_all_votes_turn_it_on(stores: list[dist.Store]) -> None:
    group = new_group()

    def rank(store: dist.Store) -> str:
        vote(store, group, 3)
        return decide(store, group, PATIENCE_S)

    assert in_threads([lambda store=store: rank(store) for store in stores]) == [ON] * 3


def test_a_store_in_a_file(tmp_path: Path) -> None:
    stores = [dist.FileStore(str(tmp_path / "store"), 2) for _ in range(2)]
    vote(stores[0], "pp:0", 2)
    vote(stores[1], "pp:0", 2)
    vote(stores[1], "pp:1", 2)
    assert [decide(store, "pp:0", PATIENCE_S) for store in stores] == [ON] * 2
    assert [decide(store, "pp:1", SOON_S) for store in stores] == [ASIDE] * 2


def test_nobody_waits_for_the_time_limit_when_all_have_voted(stores: list[dist.Store]) -> None:
    group = new_group()
    for store in stores:
        vote(store, group, 3)
    begun = time.monotonic()
    assert [decide(store, group, 600.0) for store in stores] == [ON] * 3
    assert time.monotonic() - begun < PATIENCE_S


def test_without_one_vote_all_who_ask_step_aside(stores: list[dist.Store]) -> None:
    group = new_group()

    def rank(store: dist.Store) -> str:
        vote(store, group, 3)
        return decide(store, group, 0.05 + 0.02 * stores.index(store))

    begun = time.monotonic()
    assert in_threads([lambda store=store: rank(store) for store in stores[:2]]) == [ASIDE] * 2
    assert 0.05 <= time.monotonic() - begun < PATIENCE_S
    # The vote that comes at last changes nothing.
    assert rank(stores[2]) == ASIDE
    assert [decide(store, group, 0.05) for store in stores] == [ASIDE] * 3


def test_the_answer_stays(stores: list[dist.Store]) -> None:
    group = new_group()
    for store in stores:
        vote(store, group, 3)
    answers = [decide(store, group, 0.05) for store in stores]
    vote(stores[0], group, 3)
    assert answers + [decide(store, group, 0.05) for store in stores] == [ON] * 6


def test_groups_do_not_mix(stores: list[dist.Store]) -> None:
    first, second = new_group(), new_group()
    vote(stores[0], first, 2)
    vote(stores[1], second, 2)
    assert decide(stores[0], first, SOON_S) == ASIDE
    vote(stores[0], second, 2)
    assert decide(stores[1], second, PATIENCE_S) == ON


def test_a_group_of_one(stores: list[dist.Store]) -> None:
    group = new_group()
    vote(stores[0], group, 1)
    assert decide(stores[0], group, PATIENCE_S) == ON


def test_late_voters_and_early_deciders_agree_on_every_store(stores: list[dist.Store]) -> None:
    """Votes arrive about when the others lose patience; some ranks never vote."""
    chance = random.Random(7)
    seen = set()
    for _ in range(20):
        group = new_group()
        silent = chance.choice([None, None, 0, 1, 2])
        late = [chance.choice([0.0, 0.0, 0.005, 0.01, 0.015]) for _ in stores]

        def rank(number: int, group: str = group, silent: int | None = silent, late: list[float] = late) -> str:
            if number != silent:
                time.sleep(late[number])  # not to wait for anything: it is the lateness itself
                vote(stores[number], group, 3)
            # Clients whose waits end in the same moment cost five seconds each in torch's TCPStore (2.13).
            return decide(stores[number], group, (0.008, 0.012, 0.016)[number])

        answers = set(in_threads([lambda number=number: rank(number) for number in range(3)]))
        assert answers in ({ON}, {ASIDE}), answers
        assert silent is None or answers == {ASIDE}
        assert {decide(store, group, SOON_S) for store in stores} == answers
        seen |= answers
    assert ASIDE in seen


# -- every order of events ---------------------------------------------------------------------------------


def orders(ranks: int) -> Iterator[list[tuple[str, int]]]:
    """Every order of votes and questions in which a rank asks after its own vote."""
    for order in set(itertools.permutations([rank for rank in range(ranks) for _ in range(2)])):
        voted: set[int] = set()
        events = []
        for rank in order:
            events.append(("decide" if rank in voted else "vote", rank))
            voted.add(rank)
        yield events


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_order_of_votes_and_questions(ranks: int) -> None:
    store = dist.HashStore()
    count = 0
    for events in orders(ranks):
        group, answers = new_group(), []
        for event, _ in events:
            if event == "vote":
                vote(store, group, ranks)
            else:
                answers.append(decide(store, group, SOON_S))
        first_question = next(index for index, (event, _) in enumerate(events) if event == "decide")
        all_voted_before = sum(event == "vote" for event, _ in events[:first_question]) == ranks
        assert answers == [ON if all_voted_before else ASIDE] * ranks, events
        count += 1
    assert count == {1: 1, 2: 6, 3: 90}[ranks]


class SteppedStore:
    """A store whose operations happen one at a time, in an order that the test chooses.

    A wait for a key that is not there ends at once, by a time-out: a rank may lose patience at any moment.
    """

    def __init__(self) -> None:
        self._data: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self.turn: Callable[[], None] = lambda: None

    def add(self, key: str, amount: int) -> int:
        self.turn()
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.turn()
        if self._data.get(key, "") == expected:
            self._data[key] = desired
        return self._data.get(key, expected).encode()

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self.turn()
        if not all(key in self._data for key in keys):
            raise dist.DistStoreError("wait timeout")


class Steps:
    """Ranks in threads of their own, of which one at a time does one operation of the store.

    Args:
        store: The store.
        ranks: What each rank does.
    """

    def __init__(self, store: SteppedStore, ranks: Sequence[Callable[[], str]]) -> None:
        self.answers: dict[int, str] = {}
        self._go = [threading.Semaphore(0) for _ in ranks]
        self._stopped = threading.Semaphore(0)
        self._waiting: set[int] = set()
        self._numbers: dict[int, int] = {}
        store.turn = self._turn
        for number, rank in enumerate(ranks):
            threading.Thread(target=self._run, args=(number, rank), daemon=True).start()
            assert self._stopped.acquire(timeout=PATIENCE_S)

    def _run(self, number: int, rank: Callable[[], str]) -> None:
        self._numbers[threading.get_ident()] = number
        self.answers[number] = rank()
        self._stopped.release()

    def _turn(self) -> None:
        number = self._numbers[threading.get_ident()]
        self._waiting.add(number)
        self._stopped.release()
        self._go[number].acquire()

    @property
    def able(self) -> list[int]:
        """Ranks that want to do something."""
        return sorted(self._waiting)

    def step(self, number: int) -> None:
        """Let one rank do one operation."""
        self._waiting.discard(number)
        self._go[number].release()
        assert self._stopped.acquire(timeout=PATIENCE_S)


def check_schedule(silent: int | None, ranks: int, choose: Callable[[list[int]], int]) -> str:
    """Run one schedule; the answer that all ranks gave."""
    store = SteppedStore()

    def rank(number: int) -> str:
        if number != silent:
            vote(store, "pp:0", ranks)
        return decide(store, "pp:0", 1.0)

    steps = Steps(store, [lambda number=number: rank(number) for number in range(ranks)])
    while able := steps.able:
        steps.step(choose(able))
    answers = set(steps.answers.values())
    assert len(steps.answers) == ranks
    assert len(answers) == 1, steps.answers
    (answer,) = answers
    assert answer in (ON, ASIDE)
    assert silent is None or answer == ASIDE
    store.turn = lambda: None
    assert decide(store, "pp:0", 1.0) == answer
    return answer


@pytest.mark.parametrize("silent", [None, 0, 1])
def test_every_interleaving_of_two_ranks(silent: int | None) -> None:
    seen: set[str] = set()
    path: list[tuple[int, int]] = []  # at each step: which of the able ranks, of how many
    count = 0
    while True:
        depth = 0

        def choose(able: list[int]) -> int:
            nonlocal depth
            if depth == len(path):
                path.append((0, len(able)))
            chosen = able[path[depth][0]]
            depth += 1
            return chosen

        seen.add(check_schedule(silent, 2, choose))
        count += 1
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            break
        path[-1] = (path[-1][0] + 1, path[-1][1])
    assert seen == ({ON, ASIDE} if silent is None else {ASIDE})
    assert count >= 10


def test_random_interleavings_of_four_ranks() -> None:
    seen = set()
    for seed in range(120):
        chance = random.Random(seed)
        # Some schedules favour the voters, or nearly all would end aside.
        silent = chance.choice([None, None, None, 3])
        hold = chance.random() < 0.5
        asked: dict[int, int] = {}

        def choose(
            able: list[int], chance: random.Random = chance, hold: bool = hold, asked: dict[int, int] = asked
        ) -> int:
            fresh = [rank for rank in able if asked.get(rank, 0) == 0]
            rank = chance.choice(fresh if hold and fresh else able)
            asked[rank] = asked.get(rank, 0) + 1
            return rank

        seen.add(check_schedule(silent, 4, choose))
    assert seen == {ON, ASIDE}
