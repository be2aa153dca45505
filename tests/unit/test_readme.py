"""What the README says is what the package has."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.world import ROOT
from vllm_pp_plugin import __version__, errors, plugin
from vllm_pp_plugin.config import PluginConfig
from vllm_pp_plugin.seams import facts

README = (ROOT / "README.md").read_text()


def test_settings_table_is_the_configuration() -> None:
    """Names, defaults and meanings, in order."""
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \|$", README, flags=re.M)
    described = [(name, json.dumps(default), meaning) for name, default, meaning in PluginConfig.describe()]
    assert rows == described


def test_every_wrapped_method_is_listed() -> None:
    """And none that is not wrapped."""
    situation = facts.Situation("cpu", 2, True)
    targets = {seam.info.target.split(":")[1] for feature in plugin.FEATURES for seam in feature.seams(situation)}
    targets |= {"EngineArgs.create_engine_config", "WorkerBase.__init__"}
    section = README.split("## What is wrapped in vLLM")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = set()
    for cell in cells:
        owner = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            owner = name.rsplit(".", 1)[0] if "." in name else owner
            listed.add(name if "." in name else f"{owner}.{name}")
    assert listed == targets


@pytest.mark.parametrize("name", re.findall(r"`(\w+Error):", README))
def test_errors_exist(name: str) -> None:
    """The table of messages names real exceptions."""
    assert issubclass(getattr(errors, name), errors.PPPluginError)


def test_versions_agree() -> None:
    """README, CHANGELOG and ci/vllm-versions.json speak of the same versions as the package."""
    versions = json.loads((ROOT / "ci" / "vllm-versions.json").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}]" in changelog
    for version in (versions["main"], *versions["beside"], facts.TESTED[0]):
        assert version in README
        assert version in changelog
    assert versions["supported"] == f">={facts.TESTED[0]},<{facts.TESTED[1]}"


def test_nothing_is_left_to_fill_in() -> None:
    """The measured numbers are there."""
    assert not re.search(r"\bBENCH_[A-Z]+\b", README)


def test_commands_exist() -> None:
    """Every command of the README is one that the tests run (here: that it is there)."""
    for script in set(re.findall(r"^    (ci/\w+)", README, flags=re.M)):
        assert (ROOT / script).exists()
    assert set(re.findall(r"vllm-pp (\w+(?: sends)?)", README)) == {"doctor", "bench sends"}
