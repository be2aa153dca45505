"""The wheel that users install: what is in it, and what it asks for."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.world import ROOT
from vllm_pp_plugin import __version__


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from the source tree as pip does it."""
    folder: Path = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*pip, str(ROOT)], check=True, capture_output=True, timeout=200)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    """vLLM finds the plugin, and a shell the command."""
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(name).decode().split("\n")
    assert "pp_plugin = vllm_pp_plugin:register" in lines
    assert "vllm-pp = vllm_pp_plugin.cli:main" in lines
    assert "[vllm.general_plugins]" in lines


def test_content(wheel: zipfile.ZipFile) -> None:
    """The package with every module and its types; no tests."""
    names = set(wheel.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_pp_plugin").rglob("*.py")}
    assert modules <= names
    assert "vllm_pp_plugin/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"vllm_pp_plugin", f"vllm_pp_plugin-{__version__}.dist-info"}


def test_requirements(wheel: zipfile.ZipFile) -> None:
    """Neither vLLM nor torch: each platform has its own."""
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    hard = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0] for line in hard) == ["packaging", "pluggy"]
    assert metadata["Version"] == __version__
    assert {"cpu", "cuda", "npu", "dev"} <= set(metadata.get_all("Provides-Extra", []))
