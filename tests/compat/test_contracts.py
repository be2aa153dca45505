"""The wrapped methods have the expected shape in every released vLLM that the README names."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ci import contracts

SEAMS = {seam.info.target.split(":")[1]: seam for seam in contracts.all_seams()}


@pytest.mark.parametrize("version", contracts.VERSIONS)
def test_all_seams_fit(version: str) -> None:
    """Read from the released sources, by syntax."""
    folder = contracts.sources(version)
    assert {name: contracts.check(seam, folder) for name, seam in SEAMS.items()} == dict.fromkeys(SEAMS)


@pytest.mark.parametrize("name", SEAMS)
def test_a_changed_shape_is_seen(name: str) -> None:
    """The check can fail: for another parameter, another name, a missing helper."""
    folder: Path = contracts.sources(contracts.VERSIONS[-1])
    seam = SEAMS[name]
    other = dataclasses.replace(seam, parameters=(*seam.parameters[:-1], "renamed"))
    assert "renamed" in str(contracts.check(other, folder))
    info = dataclasses.replace(seam.info, target=seam.info.target + "_gone")
    assert "is missing" in str(contracts.check(dataclasses.replace(seam, info=info), folder))
    needs = ("vllm.distributed.parallel_state:no_such_function",)
    assert "no_such_function is missing" in str(contracts.check(dataclasses.replace(seam, needs=needs), folder))
