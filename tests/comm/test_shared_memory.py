"""CPU hosts with AVX-512, where stock vLLM sends through shared memory: all ranks take one path, or none hangs.

The operators are a double (:mod:`tests.comm.shm_double`); no such host was at hand.
"""

from __future__ import annotations

import pytest

from tests.support.world import World

HERE = "tests.comm.scenarios"


def test_all_ranks_have_the_plugin(pair: World) -> None:
    """They agree on gloo, and the blocking path is not used."""
    for said in pair.run(f"{HERE}:shared_memory", plugin_ranks=[0, 1], shm_ranks=[0, 1]):
        assert said == {"async": True, "shm_sends": 0, "shm_receives": 0, "right": True}


@pytest.mark.parametrize("plugin_rank", [0, 1])
def test_one_rank_without_the_plugin(pair: World, plugin_rank: int) -> None:
    """The others step aside: everybody uses shared memory, in both directions of the lack."""
    sender, receiver = pair.run(f"{HERE}:shared_memory", plugin_ranks=[plugin_rank], shm_ranks=[0, 1])
    assert sender == {"async": False, "shm_sends": 1, "shm_receives": 0, "right": True}
    assert receiver == {"async": False, "shm_sends": 0, "shm_receives": 1, "right": True}


def test_no_plugin(pair: World) -> None:
    """The double is what stock vLLM would use: it takes the message."""
    sender, receiver = pair.run(f"{HERE}:shared_memory", plugin_ranks=[], shm_ranks=[0, 1])
    assert (sender["async"], sender["shm_sends"], receiver["right"]) == (False, 1, True)


def test_doctor_names_the_path(main_pair: World) -> None:
    """Stock's path on this host, and ours."""
    said = main_pair.run(f"{HERE}:doctor_on_shared_memory_host")[0]
    assert said["gloo"]["stock_path"] == "gloo"
    assert said["shm"]["stock_path"] == "shared memory"
    assert said["shm"]["path"] == "gloo, where every rank has async_sends on; else shared memory"
    assert said["off"]["path"] == "gloo"
