"""``vllm-pp doctor`` on a made-up vLLM: the command starts in a process of its own in a fraction of a second."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import packaging
import pluggy
import pytest

import vllm_pp_plugin
from tests.support.world import ROOT
from tests.unit.test_hookspecs import RAISES_IN_HOOK, RAISES_ON_IMPORT, UNKNOWN_HOOK, write_vendor
from vllm_pp_plugin.config import CONFIG_ENV, DISABLE_ENV, PluginConfig
from vllm_pp_plugin.seams.seam import SeamInfo

ANYTHING = """
class _Anything:
    pass

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything
"""

# The names and parameters that the plugin looks at. The real ones are looked at by the tests that start vLLM.
FILES = {
    # vLLM logs to standard output while it is imported; the report must stay alone there.
    "vllm/__init__.py": """
import os
__version__ = os.environ.get("FAKE_VERSION", "0.32.0")
print("INFO: vLLM is here")
""",
    "vllm/platforms.py": """
class _Platform:
    device_type = "cpu"

    def is_cpu(self):
        return True

    def import_kernels(self):
        print("INFO: kernels")

current_platform = _Platform()
""",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": """
class EngineArgs:
    def create_engine_config(self, usage_context=None):
        raise AssertionError("doctor starts no engine")
""",
    "vllm/v1/__init__.py": "",
    "vllm/v1/worker/__init__.py": "",
    "vllm/v1/worker/worker_base.py": """
class WorkerBase:
    def __init__(self, vllm_config, rank=0):
        raise AssertionError("doctor starts no worker")
""",
    "vllm/v1/worker/gpu_worker.py": """
class Worker:
    def sleep(self, level=1): ...
""",
    "vllm/v1/worker/cpu_model_runner.py": """
class CPUModelRunner:
    def sync_and_gather_intermediate_tensors(self, num_tokens, intermediate_tensors, sync_self): ...
""",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/parallel_state.py": """
def _split_tensor_dict(tensor_dict): ...

class GroupCoordinator:
    def _should_use_all_gather(self, key, numel, all_gather_group, all_gather_tensors): ...
    def isend_tensor_dict(self, tensor_dict, dst=None, all_gather_group=None, all_gather_tensors=None): ...
    def send_tensor_dict(self, tensor_dict, dst=None, all_gather_group=None, all_gather_tensors=None): ...
    def destroy(self): ...
""",
    "vllm/distributed/device_communicators/__init__.py": "",
    "vllm/distributed/device_communicators/base_device_communicator.py": """
class DeviceCommunicatorBase:
    def __init__(self, cpu_group, device=None, device_group=None, unique_name=""): ...
""",
    "vllm-0.32.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n",
    # torch takes seconds to import and doctor only asks it which operators there are.
    "torch/__init__.py": ANYTHING + "import types\nops = types.SimpleNamespace(_C=types.SimpleNamespace())\n",
    "torch/distributed.py": ANYTHING,
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Standard output, which must be one JSON object and nothing else."""
        result: dict[str, Any] = json.loads(self.out)
        return result

    def features(self) -> dict[str, str]:
        return {feature["name"]: feature["state"] for feature in self.json["features"]}

    def seams(self, state: str) -> set[str]:
        """Methods of the seams in a state."""
        return {seam["target"].split(":")[1] for seam in self.json["seams"] if seam["state"] == state}


class Machine:
    """A machine with a vLLM of :data:`FILES`.

    Args:
        folder: Where its packages lie.
    """

    def __init__(self, folder: Path) -> None:
        self.packages = folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("PP_PLUGIN_", "VLLM_"))}
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def change(self, name: str, old: str, new: str) -> None:
        """Put ``new`` in the place of ``old`` in a file."""
        path = self.packages / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def pp(self, *arguments: str, interpreter: tuple[str, ...] = (), **environ: str) -> Run:
        """Run ``vllm-pp``."""
        done = subprocess.run(
            [sys.executable, *interpreter, "-m", "vllm_pp_plugin.cli", *arguments],
            cwd=self.packages,
            env={**self.environ, "PYTHONPATH": os.pathsep.join([str(self.packages), str(ROOT)]), **environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def doctor(self, config: Any = None, *arguments: str, **environ: str) -> Run:
        """Run ``vllm-pp doctor --json``."""
        options = () if config is None else ("--config", json.dumps(config))
        return self.pp("doctor", "--json", *options, *arguments, **environ)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


DOORS = {"EngineArgs.create_engine_config", "WorkerBase.__init__"}
SEAMS = {
    "async_sends": {
        "DeviceCommunicatorBase.__init__",
        "GroupCoordinator.isend_tensor_dict",
        "GroupCoordinator.send_tensor_dict",
        "GroupCoordinator.destroy",
        "Worker.sleep",
    },
    "cpu_eager_pp": {"CPUModelRunner.sync_and_gather_intermediate_tensors"},
}


def test_all_well(machine: Machine) -> None:
    run = machine.doctor()
    found = run.json
    assert (run.code, found["ok"], found["problems"]) == (0, True, [])
    assert set(found) == {
        *("plugin", "vllm", "device", "vllm_plugins_env", "disabled", "features", "seams", "config"),
        *("vendor_plugins", "problems", "ok"),
    }
    assert (found["plugin"], found["vllm"]) == (vllm_pp_plugin.__version__, "0.32.0")
    assert (found["vllm_plugins_env"], found["disabled"]) == (None, False)
    assert found["device"]["name"] == "cpu"
    assert found["device"]["available"] is True
    assert found["device"]["stock_path"] == "gloo"
    assert found["config"] == dataclasses.asdict(PluginConfig())
    assert sorted(found["vendor_plugins"]) == ["cpu", "cuda", "npu", "xpu"]
    assert run.features() == {"async_sends": "on", "cpu_eager_pp": "on"}
    assert all(set(feature) == {"name", "state", "reason"} for feature in found["features"])
    keys = {field.name for field in dataclasses.fields(SeamInfo)} | {"state", "reason"}
    assert all(set(seam) == keys for seam in found["seams"])
    assert all(value.strip() for seam in found["seams"] for value in seam.values())
    assert run.seams("installed") >= SEAMS["async_sends"] | SEAMS["cpu_eager_pp"]
    assert run.seams("watching") == DOORS
    assert run.seams("not installed") == set()


def test_standard_output_is_the_report_alone(machine: Machine) -> None:
    run = machine.doctor()
    assert run.out.startswith("{") and run.out.endswith("}\n")
    assert "INFO: vLLM is here" in run.err
    assert "INFO: kernels" in run.err


def test_everything_off_installs_nothing(machine: Machine) -> None:
    run = machine.doctor({"async_sends": False, "cpu_eager_pp": False})
    assert (run.code, run.json["problems"]) == (0, [])
    assert run.features() == {"async_sends": "off", "cpu_eager_pp": "off"}
    assert run.seams("installed") == set()


@pytest.mark.parametrize(
    ("config", "arguments", "features"),
    [
        ({"async_sends": False}, (), {"async_sends": "off", "cpu_eager_pp": "on"}),
        ({"cpu_eager_pp": False}, (), {"async_sends": "on", "cpu_eager_pp": "off"}),
        ({"async_sends": True, "cpu_eager_pp": True}, (), {"async_sends": "on", "cpu_eager_pp": "on"}),
        (None, ("-pp", "1"), {"async_sends": "not needed", "cpu_eager_pp": "not needed"}),
        (None, ("--pipeline-parallel-size", "4", "--compiled"), {"async_sends": "on", "cpu_eager_pp": "not needed"}),
    ],
)
def test_features_of_the_engine_that_is_asked_about(
    machine: Machine, config: Any, arguments: tuple[str, ...], features: dict[str, str]
) -> None:
    run = machine.doctor(config, *arguments)
    assert run.code == 0
    assert run.features() == features
    on = {seam for name, state in features.items() if state == "on" for seam in SEAMS[name]}
    off = {seam for name, state in features.items() if state != "on" for seam in SEAMS[name]}
    assert on <= run.seams("installed")
    assert not off & run.seams("installed")


def test_settings_are_shown_as_they_are_taken(machine: Machine) -> None:
    run = machine.doctor({"max_pending_sends": 9.0}, **{CONFIG_ENV: '{"send_warn_s": 1, "max_pending_sends": 3}'})
    assert run.code == 0
    expected = dataclasses.replace(PluginConfig(), max_pending_sends=9, send_warn_s=1.0)
    assert run.json["config"] == dataclasses.asdict(expected)


@pytest.mark.parametrize(
    ("text", "environment", "says"),
    [
        ("{", None, "--config is not JSON"),
        ("async_sends=false", None, "--config is not JSON"),
        ('{"nope": 1}', None, "pp_plugin.nope is unknown"),
        ('{"async_send": false}', None, "Did you mean 'async_sends'?"),
        ('{"send_warn_s": 0}', None, "pp_plugin.send_warn_s is 0"),
        ("[]", None, "an object with settings is needed"),
        ("7", None, "an object with settings is needed"),
        ("{}", "{", f"{CONFIG_ENV} is not JSON"),
        ("{}", '{"nope": 1}', "pp_plugin.nope is unknown"),
    ],
)
def test_wrong_settings_are_a_problem_and_the_rest_is_reported(
    machine: Machine, text: str, environment: str | None, says: str
) -> None:
    environ = {} if environment is None else {CONFIG_ENV: environment}
    run = machine.pp("doctor", "--json", "--config", text, **environ)
    assert run.code == 1
    found = run.json
    assert found["ok"] is False
    (problem,) = found["problems"]
    assert says in problem
    assert found["config"] is None
    assert (found["vllm"], found["device"]["name"]) == ("0.32.0", "cpu")
    # Nothing is installed by settings that cannot be read.
    assert run.seams("installed") == set()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("doctor",), 0),
        (("doctor", "--json"), 0),
        (("doctor", "--config", "{"), 1),
        (("doctor", "-pp", "0"), 2),
        (("doctor", "-pp", "two"), 2),
        (("doctor", "--nope"), 2),
        (("doctr",), 2),
        ((), 2),
        (("--version",), 0),
        (("--help",), 0),
        (("doctor", "--help"), 0),
    ],
)
def test_exit_codes(machine: Machine, arguments: tuple[str, ...], code: int) -> None:
    run = machine.pp(*arguments)
    assert run.code == code
    assert "Traceback" not in run.err
    if code == 2:
        assert run.out == ""
        assert run.err.strip()


def test_the_version_is_told_without_vllm(machine: Machine) -> None:
    run = machine.pp("--version")
    assert run.out == f"vllm-pp-plugin {vllm_pp_plugin.__version__}\n"
    assert run.err == ""


def test_for_people(machine: Machine) -> None:
    machine.change("vllm/v1/worker/gpu_worker.py", "level", "depth")
    run = machine.pp("doctor", "--config", '{"cpu_eager_pp": false}')
    assert run.code == 1
    lines = run.out.splitlines()
    assert lines[0] == f"vllm-pp-plugin {vllm_pp_plugin.__version__}, vLLM 0.32.0"
    assert lines[1].startswith("device cpu (")
    for words in (["unavailable", "async_sends"], ["off", "cpu_eager_pp"]):
        assert words in [line.split() for line in lines]
    (problem,) = lines[lines.index("problems") + 1 :]
    assert problem.startswith("  - async_sends steps aside: vllm.v1.worker.gpu_worker:Worker.sleep: its parameters")
    assert machine.pp("doctor", "--config", '{"async_sends": false}').out.splitlines()[-1] == "no problems"


BROKEN_PARTS = [
    ("vllm/distributed/parallel_state.py", "isend_tensor_dict", "isend", "has no method isend_tensor_dict"),
    ("vllm/distributed/parallel_state.py", "def _split_tensor_dict", "def _split", "_split_tensor_dict is missing"),
    ("vllm/distributed/parallel_state.py", "class GroupCoordinator", "class Group", "no class GroupCoordinator"),
    ("vllm/v1/worker/gpu_worker.py", "level", "depth", "its parameters are (self, depth)"),
    ("vllm/v1/worker/gpu_worker.py", "class", "import not_installed\nclass", "No module named 'not_installed'"),
]


@pytest.mark.parametrize(("file", "old", "new", "reason"), BROKEN_PARTS, ids=lambda part: str(part)[:30])
def test_a_part_that_is_missing_is_named(machine: Machine, file: str, old: str, new: str, reason: str) -> None:
    machine.change(file, old, new)
    run = machine.doctor()
    assert run.code == 1
    assert run.features() == {"async_sends": "unavailable", "cpu_eager_pp": "on"}
    assert not SEAMS["async_sends"] & run.seams("installed")
    (problem,) = (text for text in run.json["problems"] if "pip install it" not in text)
    assert problem.startswith("async_sends steps aside: ")
    assert reason in problem
    # Where nobody asks for it, nothing is wrong.
    assert machine.doctor({"async_sends": False}).code == 0


def test_a_feature_that_is_asked_for_and_cannot_be_had_is_a_problem(machine: Machine) -> None:
    machine.change("vllm/distributed/parallel_state.py", "isend_tensor_dict", "isend")
    run = machine.doctor({"async_sends": True})
    assert run.code == 1
    (problem,) = (text for text in run.json["problems"] if "pip install it" not in text)
    assert problem.startswith("async_sends was asked for")
    assert "has no method isend_tensor_dict" in problem


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("vllm/engine/arg_utils.py", "create_engine_config", "make_config", "has no method create_engine_config"),
        ("vllm/v1/worker/worker_base.py", "class WorkerBase", "class Base", "has no class WorkerBase"),
    ],
)
def test_a_door_that_cannot_be_opened_is_a_problem(
    machine: Machine, file: str, old: str, new: str, reason: str
) -> None:
    machine.change(file, old, new)
    run = machine.doctor()
    assert run.code == 1
    (problem,) = (text for text in run.json["problems"] if "pip install it" not in text)
    assert problem.startswith("settings cannot be read: ")
    assert reason in problem
    assert len(run.seams("watching")) == 1


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.32.1+cpu", None), ("0.22.0", "is older than"), ("99.1", "is newer than"), ("main", "is no release")],
)
def test_versions(machine: Machine, version: str, says: str | None) -> None:
    run = machine.doctor(FAKE_VERSION=version)
    assert run.json["vllm"] == version
    if says is None:
        assert (run.code, run.json["problems"]) == (0, [])
    else:
        assert run.code == 1
        (problem,) = (text for text in run.json["problems"] if "pip install it" not in text)
        assert says in problem and version in problem
    # What decides is how vLLM's parts look, not what it is called.
    assert run.features()["async_sends"] == "on"


@pytest.mark.parametrize(
    ("listed", "loads"),
    [("pp_plugin", True), ("other,pp_plugin", True), ("", False), ("other", False), ("other, pp_plugin", False)],
)
def test_vllm_plugins_that_leaves_the_plugin_out_is_a_problem(machine: Machine, listed: str, loads: bool) -> None:
    run = machine.doctor(VLLM_PLUGINS=listed)
    assert run.json["vllm_plugins_env"] == listed
    assert run.code == (0 if loads else 1)
    assert [text.startswith(f"VLLM_PLUGINS is {listed!r}") for text in run.json["problems"]] == [True] * (not loads)


@pytest.mark.parametrize(("value", "off"), [("1", True), ("0", False)])
def test_the_plugin_turned_off_by_the_environment(machine: Machine, value: str, off: bool) -> None:
    run = machine.doctor(**{DISABLE_ENV: value})
    assert run.json["disabled"] is off
    assert run.code == (1 if off else 0)
    assert [DISABLE_ENV in text for text in run.json["problems"]] == [True] * off
    assert (run.json["seams"] == []) is off


def test_vendor_plugins_are_listed_and_the_broken_ones_named(machine: Machine) -> None:
    write_vendor(machine.packages, "acme", RAISES_IN_HOOK.replace('"no driver"', '"no driver for " + device_type'))
    write_vendor(machine.packages, "broken", RAISES_ON_IMPORT)
    write_vendor(machine.packages, "typo", UNKNOWN_HOOK)
    write_vendor(machine.packages, "fine", "\n@hookimpl\ndef vllm_pp_device_backend(device_type): ...\n")
    run = machine.doctor()
    assert run.code == 1
    problems = {text.split()[2]: text for text in run.json["problems"]}
    assert set(problems) == {"acme:chip", "broken:chip", "typo:chip"}
    assert problems["acme:chip"].endswith("is skipped: RuntimeError: no driver for cpu")
    assert "OSError: libchip.so.1" in problems["broken:chip"]
    assert "vllm_pp_device_backendd" in problems["typo:chip"]
    assert sorted(run.json["vendor_plugins"]) == ["cpu", "cuda", "fine:chip", "npu", "xpu"]
    # They are skipped, and the rest goes on.
    assert run.json["device"]["name"] == "cpu"
    assert run.features() == {"async_sends": "on", "cpu_eager_pp": "on"}


def test_a_device_that_nobody_knows(machine: Machine) -> None:
    machine.change("vllm/platforms.py", '"cpu"', '"tpu"')
    run = machine.doctor()
    assert run.code == 1
    assert run.json["device"] == {"name": "tpu", "available": False}
    (problem,) = (text for text in run.json["problems"] if "pip install it" not in text)
    assert "no plugin knows the device 'tpu'" in problem
    assert run.features()["cpu_eager_pp"] == "not needed"


# An interpreter that does not look into the environment's own packages, where vLLM lies.
BARE = ("-S",)


def give(machine: Machine) -> None:
    """Give a bare interpreter what this package needs itself."""
    for package in (pluggy, packaging):
        (machine.packages / package.__name__).symlink_to(Path(str(package.__file__)).parent)


def test_without_vllm(machine: Machine) -> None:
    give(machine)
    (machine.packages / "vllm").rename(machine.packages / "not_vllm")
    run = machine.pp("doctor", "--json", interpreter=BARE)
    assert run.code == 1
    # This interpreter sees the source tree only, so the plugin itself is not installed either.
    assert run.json["problems"][0] == "vLLM is not installed"
    assert len(run.json["problems"]) == 2
    assert "pip install it" in run.json["problems"][1]
    assert (run.json["vllm"], run.json["device"]) == (None, None)
    assert run.features() == {"async_sends": "off", "cpu_eager_pp": "off"}
    people = machine.pp("doctor", interpreter=BARE)
    assert people.code == 1
    assert "vLLM not installed" in people.out
    assert "  - vLLM is not installed" in people.out.splitlines()


def test_without_a_distribution_called_vllm_the_repair_is_told(machine: Machine) -> None:
    give(machine)
    (machine.packages / "vllm-0.32.0.dist-info").rename(machine.packages / "not_vllm")
    run = machine.pp("doctor", "--json", interpreter=BARE)
    assert run.code == 1
    (problem,) = (text for text in run.json["problems"] if "pip install it" not in text)
    assert 'no distribution is called "vllm"' in problem
    assert "vllm-0.32.0+cpu.dist-info" in problem
    assert run.features() == {"async_sends": "on", "cpu_eager_pp": "on"}
