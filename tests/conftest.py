"""Worlds of ranks that many tests share, for vLLM in the environment and for the older one beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.support.world import ROOT, World

VERSIONS = json.loads((ROOT / "ci" / "vllm-versions.json").read_text())
OLD = VERSIONS["beside"][0]


@pytest.fixture(scope="session")
def worlds() -> Iterator[Callable[[int, str | None], World]]:
    """Gives a world by size and vLLM version; each is started once."""
    made: dict[tuple[int, str | None], World] = {}

    def get(size: int, vllm: str | None) -> World:
        if (size, vllm) in made and made[size, vllm].broken:
            made.pop((size, vllm)).close()
        if (size, vllm) not in made:
            made[size, vllm] = World(size, vllm)
        return made[size, vllm]

    yield get
    statuses = {key: world.close() for key, world in made.items() if not world.broken}
    assert all(status == [0] * len(status) for status in statuses.values()), f"ranks did not end well: {statuses}"


@pytest.fixture(params=[None, OLD], ids=[VERSIONS["main"], OLD])
def pair(request: pytest.FixtureRequest, worlds: Callable[[int, str | None], World]) -> World:
    """Two ranks, on each vLLM version."""
    return worlds(2, request.param)


@pytest.fixture
def main_pair(worlds: Callable[[int, str | None], World]) -> World:
    """Two ranks on the main vLLM version."""
    return worlds(2, None)


@pytest.fixture
def old_pair(worlds: Callable[[int, str | None], World]) -> World:
    """Two ranks on the oldest version that runs here beside the main one."""
    return worlds(2, OLD)


@pytest.fixture(params=[None, OLD], ids=[VERSIONS["main"], OLD])
def four(request: pytest.FixtureRequest, worlds: Callable[[int, str | None], World]) -> World:
    """Four ranks, on each vLLM version."""
    return worlds(4, request.param)
