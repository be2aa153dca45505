"""What can go wrong when vLLM loads the plugin: every ``vllm`` command goes on, and the reason is told.

Importing vLLM takes most of the time of a process. So the commands whose start matters are started for real,
with several faults at once, and the rest happens in forks of one process that has imported vLLM and loaded no
plugin yet (:class:`Stage`; this module is also that process's main module).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import environment, toy_model
from tests.support.world import ROOT
from tests.unit.test_hookspecs import RAISES_ON_IMPORT, write_vendor
from vllm_pp_plugin.config import CONFIG_ENV

pytestmark = pytest.mark.slow

CREATE = "vllm.engine.arg_utils:EngineArgs.create_engine_config"
WORKER = "vllm.v1.worker.worker_base:WorkerBase.__init__"
ISEND = "vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that is wrong in a process.

    Attributes:
        help_says: What ``vllm --help`` warns of, or None where that command does not look.
        doctor_says: What doctor names.
        environ: Environment.
        hide: A method of vLLM that is called something else.
        version: What vLLM calls its own version.
        vendor: Whether a vendor's plugin raises when it is imported.
    """

    help_says: str | None
    doctor_says: str
    environ: dict[str, str] = dataclasses.field(default_factory=dict)
    hide: str = ""
    version: str = ""
    vendor: bool = False


FAULTS = {
    "settings": Fault("pp_plugin.nope is unknown", "pp_plugin.nope is unknown", {CONFIG_ENV: '{"nope": 1}'}),
    "door": Fault(f"{CREATE}: EngineArgs has no method", f"{CREATE}: EngineArgs has no method", hide=CREATE),
    # These matter to an engine only; a command that starts none does not spend its time on them.
    "seam": Fault(None, f"{ISEND}: GroupCoordinator has no method isend_tensor_dict", hide=ISEND),
    "version": Fault(None, "vLLM 'nightly' is no release", version="nightly"),
    "vendor": Fault(None, "vendor plugin broken:chip is skipped: OSError: libchip.so.1", vendor=True),
}


def ours(text: str) -> list[str]:
    """Lines that the plugin has logged."""
    return [line for line in text.splitlines() if "vllm-pp-plugin" in line]


# --- real commands --------------------------------------------------------------------------------------------------

# Changes vLLM's modules as soon as they are imported, in a process that is started from outside.
SITECUSTOMIZE = """
import importlib.machinery, os, sys

def hide(module, path):
    owner, method = path.split(".")
    owner = getattr(module, owner)
    setattr(owner, method + "_v2", getattr(owner, method))
    delattr(owner, method)

CHANGES = {}
for target in os.environ["TEST_HIDE"].split():
    name, path = target.split(":")
    CHANGES[name] = lambda module, path=path: hide(module, path)
if os.environ.get("TEST_VERSION"):
    CHANGES["vllm.version"] = lambda module: setattr(module, "__version__", os.environ["TEST_VERSION"])

class AfterImport(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = super().find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, AfterImport)
"""


def command(folder: Path, faults: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment with faults; ``folder`` comes first on its path."""
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    chosen = [FAULTS[name] for name in faults]
    environ = {"TEST_HIDE": " ".join(f.hide for f in chosen), "TEST_VERSION": "".join(f.version for f in chosen)}
    for fault in chosen:
        environ.update(fault.environ)
        if fault.vendor:
            write_vendor(folder, "broken", RAISES_ON_IMPORT)
    return subprocess.run(
        [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]],
        cwd=folder,
        env=environment(1, PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]), **environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_vllm_help_goes_on_with_one_warning(tmp_path: Path) -> None:
    # Of these only the settings are looked at by a command that starts no engine.
    faults = ["settings", "seam", "version", "vendor"]
    done = command(tmp_path, faults, "vllm", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: vllm")
    assert "Traceback" not in done.stdout + done.stderr
    (warning,) = ours(done.stdout + done.stderr)
    assert "pp_plugin.nope is unknown" in warning


def test_vllm_pp_doctor_names_every_fault(tmp_path: Path) -> None:
    # All but wrong settings, with which no feature is looked at.
    faults = ["door", "seam", "version", "vendor"]
    done = command(tmp_path, faults, "vllm-pp", "doctor", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)  # nothing else on standard output, whatever vLLM prints
    assert not found["ok"]
    for name in faults:
        assert any(FAULTS[name].doctor_says in problem for problem in found["problems"]), name
    assert len(found["problems"]) == len(faults)
    assert {feature["name"]: feature["state"] for feature in found["features"]} == {
        "async_sends": "unavailable",
        "cpu_eager_pp": "on",
    }


# --- forks of one process -------------------------------------------------------------------------------------------


def method_of(target: str) -> Any:
    """A method of vLLM as it stands on its class, or None."""
    module, path = target.split(":")
    owner, method = path.split(".")
    return vars(getattr(sys.modules[module], owner)).get(method)


def wrappers(target: str) -> int:
    """How many wrappers of this package a call of the method goes through; none while its module is not loaded."""
    if target.split(":")[0] not in sys.modules:
        return 0
    count, function = 0, method_of(target)
    while function is not None:
        count += "vllm_pp_plugin" in Path(function.__code__.co_filename).parts
        function = getattr(function, "__wrapped__", None)
    return count


def doors() -> dict[str, int]:
    return {"config": wrappers(CREATE), "worker": wrappers(WORKER)}


def load(again: bool = False) -> dict[str, int]:
    """Let vLLM load its general plugins."""
    import vllm.plugins

    if again:
        vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    return doors()


def break_vllm(fault: str, folder: str) -> None:
    """Make a fault in this process, which has imported vLLM."""
    import vllm

    chosen = FAULTS[fault]
    os.environ.update(chosen.environ)
    if chosen.version:
        vllm.__version__ = chosen.version
    if chosen.vendor:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
    if chosen.hide:
        module, path = chosen.hide.split(":")
        owner, method = path.split(".")
        delattr(getattr(sys.modules[module], owner), method)


def check_help(fault: str, folder: str) -> int:
    """``vllm --help``; its exit status."""
    import vllm.entrypoints.cli.main

    break_vllm(fault, folder)
    sys.argv = ["vllm", "--help"]
    try:
        vllm.entrypoints.cli.main.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def check_doctor(fault: str | None = None, folder: str = "", listed: str | None = None) -> dict[str, Any]:
    from vllm_pp_plugin import doctor

    if listed is not None:
        os.environ["VLLM_PLUGINS"] = listed
    if fault is not None:
        break_vllm(fault, folder)
    return doctor.diagnose()


def check_loading(listed: str | None) -> dict[str, Any]:
    """With ``VLLM_PLUGINS``: the doors before and after, and whether our module was even imported."""
    if listed is not None:
        os.environ["VLLM_PLUGINS"] = listed
    before = doors()
    return {"before": before, "after": load(), "imported": "vllm_pp_plugin.plugin" in sys.modules}


def check_loading_twice() -> list[Any]:
    first = load()
    functions = [method_of(CREATE), method_of(WORKER)]
    second = load(again=True)
    third = load(again=True)
    return [first, second, third, functions == [method_of(CREATE), method_of(WORKER)]]


def child_doors(pipe: Connection) -> None:
    """In a child of an engine's process: the doors when it starts, and once it has loaded plugins as vLLM does."""
    importlib.import_module(WORKER.split(":")[0])  # the first that a worker's process imports
    pipe.send([wrappers(WORKER), load()["worker"], load(again=True)["worker"]])


def check_children(method: str) -> list[int]:
    """What a child of a process that has loaded its plugins sees."""
    assert load() == {"config": 1, "worker": 1}
    context = multiprocessing.get_context(method)
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=child_doors, args=(send,))
    child.start()
    send.close()  # so that a child that dies is the end of the pipe and not a wait for ever
    seen: list[int] = receive.recv()
    child.join()
    return seen


def check_engine(settings: dict[str, Any], model: str, fault: str | None = None, ranks: int = 2) -> str:
    """Make an engine's configuration; the error, or an empty string."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_pp_plugin.errors import PPPluginError

    if fault is not None:
        break_vllm(fault, "")
    arguments = EngineArgs(
        model=model,
        max_model_len=256,
        enforce_eager=True,
        pipeline_parallel_size=ranks,
        additional_config={"pp_plugin": settings},
    )
    try:
        arguments.create_engine_config()
    except PPPluginError as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def check_worker_without_features() -> dict[str, int]:
    """The doors of a worker's process after a worker with everything off; this process is a child already."""
    import types

    from vllm.v1.worker.worker_base import WorkerBase

    assert load() == {"config": 1, "worker": 1}
    config = types.SimpleNamespace(
        additional_config={"pp_plugin": {"async_sends": False, "cpu_eager_pp": False}},
        parallel_config=types.SimpleNamespace(pipeline_parallel_size=2),
        compilation_config=types.SimpleNamespace(mode=0),
    )

    class Worker(WorkerBase):
        """vLLM's own needs a device; this one ends where vLLM's code begins."""

    try:
        Worker(config, 0, 0, "")
    except AttributeError:
        pass  # the made-up configuration has not all that vLLM's own __init__ reads
    return doors()


def run_check(check: str, arguments: dict[str, Any], folder: str) -> None:
    """In a fork: what it prints goes to one file, what it returns to another."""
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    value = globals()[check](**arguments)
    Path(folder, "value").write_text(json.dumps(value))


def serve(address: str) -> None:
    """Import what vLLM's commands, engines and workers import, then run checks in forks until told to end."""
    pipe = Client(address, family="AF_UNIX")
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.v1.worker.cpu_model_runner
    import vllm.v1.worker.gpu_worker  # noqa: F401

    assert "vllm_pp_plugin.plugin" not in sys.modules
    context = multiprocessing.get_context("fork")
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        child = context.Process(target=run_check, args=order)
        child.start()
        child.join(90)
        if child.exitcode is None:
            child.kill()
            child.join()
        pipe.send(child.exitcode)
    os._exit(0)  # taking down this many modules in order takes seconds


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a check returned and what it printed."""

    value: Any
    log: str


class Stage:
    """A process that has imported vLLM and loaded no plugins; every check runs in a fork of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        address = str(folder / "control")
        with Listener(address, family="AF_UNIX") as listener, (folder / "stage.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.test_register", address],
                cwd=ROOT,
                env={k: v for k, v in environment(1).items() if k not in ("VLLM_PLUGINS", CONFIG_ENV)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._pipe = listener.accept()
        self._answer(120)

    def _answer(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise AssertionError(f"no answer in {timeout} s\n{(self._folder / 'stage.log').read_text()}")
        try:
            return self._pipe.recv()
        except EOFError:
            raise AssertionError((self._folder / "stage.log").read_text()) from None

    def run(self, check: str, **arguments: Any) -> Outcome:
        """Run ``check_...`` of this module in a fork."""
        value, log = self._folder / "value", self._folder / "log"
        value.unlink(missing_ok=True)
        log.unlink(missing_ok=True)
        self._pipe.send((check, arguments, str(self._folder)))
        status = self._answer(120)
        text = log.read_text(errors="replace")
        assert status == 0, f"{check} ended with {status}\n{text}"
        return Outcome(json.loads(value.read_text()), text)

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self.process.wait(30)
        self._pipe.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    # Not pytest's folder: the address of a socket may have only a hundred characters.
    with tempfile.TemporaryDirectory(prefix="pp-stage-") as folder:
        made = Stage(Path(folder))
        yield made
        made.close()


@pytest.fixture(scope="module")
def model() -> str:
    return str(toy_model())


@pytest.mark.parametrize("name", FAULTS)
def test_help_with_one_fault(stage: Stage, tmp_path: Path, name: str) -> None:
    write_vendor(tmp_path, "broken", RAISES_ON_IMPORT)
    outcome = stage.run("check_help", fault=name, folder=str(tmp_path))
    assert outcome.value == 0
    assert "usage: vllm" in outcome.log
    says = FAULTS[name].help_says
    warnings = ours(outcome.log)
    if says is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert says in warning


@pytest.mark.parametrize("name", FAULTS)
def test_doctor_with_one_fault(stage: Stage, tmp_path: Path, name: str) -> None:
    write_vendor(tmp_path, "broken", RAISES_ON_IMPORT)
    found = stage.run("check_doctor", fault=name, folder=str(tmp_path)).value
    (problem,) = found["problems"]
    assert FAULTS[name].doctor_says in problem
    assert found["ok"] is False


def test_doctor_without_a_fault_installs_every_seam_on_this_vllm(stage: Stage) -> None:
    found = stage.run("check_doctor").value
    assert found["problems"] == []
    assert {seam["state"] for seam in found["seams"]} == {"installed", "watching"}


@pytest.mark.parametrize(
    ("listed", "loaded"),
    [(None, True), ("pp_plugin", True), ("other,pp_plugin", True), ("", False), ("other", False)],
)
def test_vllm_plugins_decides_whether_it_is_loaded(stage: Stage, listed: str | None, loaded: bool) -> None:
    value = stage.run("check_loading", listed=listed).value
    closed, opened = {"config": 0, "worker": 0}, {"config": 1, "worker": 1}
    assert value == {"before": closed, "after": opened if loaded else closed, "imported": loaded}
    problems = stage.run("check_doctor", listed=listed).value["problems"]
    assert [problem.startswith(f"VLLM_PLUGINS is {listed!r}") for problem in problems] == [True] * (not loaded)


def test_loading_again_wraps_once(stage: Stage) -> None:
    once = {"config": 1, "worker": 1}
    assert stage.run("check_loading_twice").value == [once, once, once, True]


def test_a_forked_child_has_its_parent_s_doors_once(stage: Stage) -> None:
    assert stage.run("check_children", method="fork").value == [1, 1, 1]


def test_a_spawned_child_opens_its_own_door_once(stage: Stage) -> None:
    assert stage.run("check_children", method="spawn").value == [0, 1, 1]


def test_a_worker_process_with_nothing_on_has_no_door_left(stage: Stage) -> None:
    assert stage.run("check_worker_without_features").value == {"config": 0, "worker": 0}


@pytest.mark.parametrize(
    ("settings", "fault", "starts", "error"),
    [
        ({"nope": 1}, None, 2, "ConfigError: pp_plugin.nope is unknown"),
        ({"send_deadline_s": "soon"}, None, 2, "ConfigError: pp_plugin.send_deadline_s is 'soon'"),
        ({}, "settings", 2, "ConfigError: pp_plugin.nope is unknown"),
        ({"async_sends": True}, "seam", 2, "FeatureUnavailableError: async_sends was asked for"),
        ({"async_sends": True}, "seam", 1, ""),  # there is nothing to send
        ({"async_sends": False}, "seam", 2, ""),
        ({"async_sends": True, "cpu_eager_pp": True}, None, 2, ""),
        ({"async_sends": True}, "version", 2, ""),  # its parts fit, whatever it is called
    ],
)
def test_the_start_of_an_engine(
    stage: Stage, model: str, settings: dict[str, Any], fault: str | None, starts: int, error: str
) -> None:
    outcome = stage.run("check_engine", settings=settings, model=model, fault=fault, ranks=starts)
    if error:
        assert outcome.value.startswith(error)
    else:
        assert outcome.value == ""
    if error.startswith("FeatureUnavailableError"):
        assert f"{ISEND}: GroupCoordinator has no method isend_tensor_dict" in outcome.value


def test_an_engine_that_asks_for_nothing_starts_without_the_feature(stage: Stage, model: str) -> None:
    outcome = stage.run("check_engine", settings={}, model=model, fault="seam")
    assert outcome.value == ""
    (line,) = ours(outcome.log)
    assert "cpu_eager_pp on; async_sends unavailable:" in line
    assert "has no method isend_tensor_dict" in line


if __name__ == "__main__":
    serve(sys.argv[1])
