"""What importing costs: this package is loaded by every ``vllm`` command, also where nothing is asked of it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.world import ROOT

MOST_MS = 50.0
HEAVY = ("torch", "vllm", "pluggy", "packaging", "numpy")

# Any look at torch or vLLM ends the import, as on a machine that has neither.
BARE = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm"):
            raise ModuleNotFoundError(f"no {name} in this interpreter", name=name)
sys.meta_path.insert(0, Absent())
module = importlib.import_module(sys.argv[1])
assert not {"torch", "vllm"} & set(sys.modules)
print(module.__name__)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; a failure shows what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    return done


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import json, sys, vllm_pp_plugin; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert json.loads(python("-c", code).stdout) == []


def test_the_entry_point_is_found_by_its_name_without_loading_more() -> None:
    code = (
        "import importlib.metadata as m, json, sys\n"
        "(point,) = m.entry_points(group='vllm.general_plugins', name='pp_plugin')\n"
        "register = point.load()\n"
        f"loaded = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "print(json.dumps([point.value, register.__module__, register.__name__, loaded]))"
    )
    assert json.loads(python("-c", code).stdout) == ["vllm_pp_plugin:register", "vllm_pp_plugin", "register", []]


def import_ms() -> float:
    """Cumulative milliseconds of ``import vllm_pp_plugin``, as the interpreter counts them."""
    lines = python("-X", "importtime", "-c", "import vllm_pp_plugin").stderr.splitlines()
    (line,) = (line for line in lines if line.split("|")[-1].strip() == "vllm_pp_plugin")
    return int(line.split("|")[1]) / 1000


def test_importing_the_package_is_quick() -> None:
    # The best of a few: the others tell how busy this machine is.
    assert min(import_ms() for _ in range(5)) < MOST_MS


@pytest.mark.parametrize(
    "module",
    [
        "vllm_pp_plugin",
        "vllm_pp_plugin.config",
        "vllm_pp_plugin.errors",
        "vllm_pp_plugin.hookspecs",
        "vllm_pp_plugin.devices",
        "vllm_pp_plugin.comm.handles",
        "vllm_pp_plugin.comm.ledger",
        "vllm_pp_plugin.comm.watcher",
        "vllm_pp_plugin.comm.agreement",
        "vllm_pp_plugin.plugin",
        "vllm_pp_plugin.seams.seam",
        "vllm_pp_plugin.seams.doors",
        "vllm_pp_plugin.cli",
    ],
)
def test_the_pure_parts_need_neither_torch_nor_vllm(module: str) -> None:
    assert python("-c", BARE, module).stdout.split() == [module]


def test_register_works_where_vllm_is_not_there_and_loads_neither() -> None:
    code = BARE + "module.register()\nassert not {'torch', 'vllm', 'pluggy'} & set(sys.modules)\n"
    done = python("-c", code, "vllm_pp_plugin")
    assert done.stderr == ""
