"""What is installed where: doors, settings, features. On made-up modules in the place of vLLM's."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import vllm_pp_plugin
from vllm_pp_plugin import config, plugin
from vllm_pp_plugin.errors import ConfigError, FeatureUnavailableError
from vllm_pp_plugin.plugin import Feature
from vllm_pp_plugin.seams.facts import Situation
from vllm_pp_plugin.seams.seam import Seam, SeamInfo

TWO_RANKS = Situation("cpu", 2, True)
MODULE = "made_up_engine"
REAL_FEATURES = plugin.FEATURES

Options = dict[str, Any]


class Parts:
    """The class whose methods the made-up features wrap."""

    def send(self, message: str) -> list[str]:
        return ["send"]

    def stop(self) -> list[str]:
        return ["stop"]

    def warm_up(self) -> list[str]:
        return ["warm_up"]


METHODS = ("send", "stop", "warm_up")


def made_up_seam(method: str, feature: str, **options: Any) -> Seam:
    """A seam whose wrapper puts "ours" in front of what the method returns."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return ["ours", *original(self, *args, **kwargs)]

        return wrapper

    info = SeamInfo(f"{MODULE}:Parts.{method}", feature, "why", "how", "1", "never")
    return Seam(info, options.pop("parameters", ("self",)), make, **options)


def set_features(monkeypatch: pytest.MonkeyPatch, first: Options | None = None, last: Options | None = None) -> None:
    """async_sends wraps ``send`` and ``stop``, cpu_eager_pp ``warm_up``; in a process that has seen no engine.

    Args:
        monkeypatch: Undoes it.
        first: What to make different of the seam of ``send``.
        last: What to make different of the seam of ``stop``.
    """
    features = (
        Feature(
            "async_sends",
            "sends that never block",
            lambda _: [
                made_up_seam("send", "async_sends", **(first or {})),
                made_up_seam("stop", "async_sends", **(last or {})),
            ],
            lambda situation: None if situation.pipeline_parallel_size > 1 else "one rank",
        ),
        Feature(
            "cpu_eager_pp",
            "a warm-up",
            lambda _: [made_up_seam("warm_up", "cpu_eager_pp")],
            lambda situation: None if situation.eager else "the model is compiled",
        ),
    )
    monkeypatch.setattr(plugin, "FEATURES", features)
    monkeypatch.setattr(plugin, "_state", plugin._State())


def wrapped() -> list[str]:
    """Methods of :class:`Parts` that go through a wrapper of ours; none may go through two."""
    parts = Parts()
    answers = {"send": parts.send("m"), "stop": parts.stop(), "warm_up": parts.warm_up()}
    assert all(answer.count("ours") <= 1 for answer in answers.values()), answers
    return [name for name in METHODS if answers[name][0] == "ours"]


def states(result: list[plugin.FeatureState]) -> dict[str, str]:
    return {state.name: state.state for state in result}


def seam_states() -> dict[str, str]:
    """Of the features' seams, by method, as the report tells."""
    return {
        seam["target"].split(".")[-1]: seam["state"]
        for seam in plugin.report()["seams"]
        if seam["feature"] != "settings"
    }


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without settings, with the made-up module; its class is as before at the end."""
    for name in (config.CONFIG_ENV, config.DISABLE_ENV):
        monkeypatch.delenv(name, raising=False)
    module = types.ModuleType(MODULE)
    module.Parts = Parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    before = {name: vars(Parts)[name] for name in METHODS}
    set_features(monkeypatch)
    yield
    for name, function in before.items():
        setattr(Parts, name, function)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.LogCaptureFixture]:
    """What the package logs, whether or not vLLM has set its loggers up in this process."""
    logger = logging.getLogger("vllm.pp_plugin")
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.DEBUG, logger=logger.name)
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def messages(log: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in log.records if record.levelno == level]


BROKEN = {"parameters": ("self", "another")}
BROKEN_REASON = f"{MODULE}:Parts.stop: its parameters are (self), expected (self, another)"


# --- settle and plan ------------------------------------------------------------------------------------------------


def test_auto_installs_all_that_can_be_had() -> None:
    result = plugin.settle(config.parse({}), TWO_RANKS)
    assert states(result) == {"async_sends": "on", "cpu_eager_pp": "on"}
    assert wrapped() == ["send", "stop", "warm_up"]
    assert seam_states() == dict.fromkeys(METHODS, "installed")
    assert plugin.report()["problems"] == []


def test_settling_again_wraps_nothing_twice() -> None:
    plugin.settle(config.parse({}), TWO_RANKS)
    functions = {name: vars(Parts)[name] for name in METHODS}
    plugin.settle(config.parse({"async_sends": True}), TWO_RANKS)
    assert wrapped() == ["send", "stop", "warm_up"]
    assert functions == {name: vars(Parts)[name] for name in METHODS}


def test_settling_with_other_settings_removes_what_is_off_now() -> None:
    before = {name: vars(Parts)[name] for name in METHODS}
    plugin.settle(config.parse({}), TWO_RANKS)
    plugin.settle(config.parse({"async_sends": False}), TWO_RANKS)
    assert wrapped() == ["warm_up"]
    assert seam_states() == {"send": "not installed", "stop": "not installed", "warm_up": "installed"}
    assert (vars(Parts)["send"], vars(Parts)["stop"]) == (before["send"], before["stop"])
    plugin.settle(config.parse({}), Situation("cpu", 1, False))
    assert {name: vars(Parts)[name] for name in METHODS} == before
    plugin.settle(config.parse({}), TWO_RANKS)
    assert wrapped() == ["send", "stop", "warm_up"]


@pytest.mark.parametrize(
    ("settings", "situation", "expected"),
    [
        ({"async_sends": False}, TWO_RANKS, ("off", "pp_plugin.async_sends is false")),
        ({}, Situation("cpu", 1, True), ("not needed", "one rank")),
        # Asked for, and nothing to do: that is no error.
        ({"async_sends": True}, Situation("cpu", 1, True), ("not needed", "one rank")),
        ({"async_sends": False}, Situation("cpu", 1, True), ("off", "pp_plugin.async_sends is false")),
        ({"async_sends": True}, TWO_RANKS, ("on", "sends that never block")),
    ],
)
@pytest.mark.parametrize("decide", [plugin.plan, plugin.settle])
def test_state_and_reason(
    decide: Callable[..., list[plugin.FeatureState]],
    settings: Options,
    situation: Situation,
    expected: tuple[str, str],
) -> None:
    (state,) = (state for state in decide(config.parse(settings), situation) if state.name == "async_sends")
    assert (state.state, state.reason) == expected


@pytest.mark.parametrize("which", ["first", "last"])
def test_auto_with_a_broken_seam_installs_nothing_of_the_feature(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, which: str
) -> None:
    set_features(monkeypatch, **{which: {"parameters": ("self", "another")}})
    for _ in range(2):
        result = plugin.settle(config.parse({}), TWO_RANKS)
        assert states(result) == {"async_sends": "unavailable", "cpu_eager_pp": "on"}
        assert wrapped() == ["warm_up"]
    assert "expected (self, another)" in result[0].reason
    assert seam_states() == {"send": "not installed", "stop": "not installed", "warm_up": "installed"}
    (problem,) = plugin.report()["problems"]
    assert problem == f"async_sends steps aside: {result[0].reason}"
    (warning,) = messages(log, logging.WARNING)
    assert problem in warning


def test_auto_with_another_copy_of_the_plugin_installs_nothing_of_the_feature() -> None:
    other = made_up_seam("stop", "async_sends")
    other.install()
    result = plugin.settle(config.parse({}), TWO_RANKS)
    assert states(result) == {"async_sends": "unavailable", "cpu_eager_pp": "on"}
    assert "already wrapped by another copy" in result[0].reason
    assert wrapped() == ["stop", "warm_up"]  # the other copy's, and the feature that can be had
    assert seam_states() == {"send": "not installed", "stop": "not installed", "warm_up": "installed"}


@pytest.mark.parametrize("decide", [plugin.plan, plugin.settle])
def test_a_feature_that_was_asked_for_and_cannot_be_had_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, decide: Callable[..., Any]
) -> None:
    set_features(monkeypatch, last=BROKEN)
    with pytest.raises(FeatureUnavailableError) as caught:
        decide(config.parse({"async_sends": True}), TWO_RANKS)
    message = str(caught.value)
    assert message.startswith("async_sends was asked for (pp_plugin.async_sends is true)")
    assert BROKEN_REASON in message
    assert 'Set it to "auto"' in message
    assert "vllm-pp doctor" in message
    assert wrapped() == []


def test_plan_touches_nothing() -> None:
    before = dict(vars(Parts))
    assert states(plugin.plan(config.parse({}), TWO_RANKS)) == {"async_sends": "on", "cpu_eager_pp": "on"}
    assert dict(vars(Parts)) == before
    assert seam_states() == dict.fromkeys(METHODS, "not installed")


def test_plan_leaves_modules_that_are_not_loaded_to_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The process that starts an engine need not pay for the workers' imports.
    monkeypatch.delitem(sys.modules, MODULE)
    asked = config.parse({"async_sends": True})
    assert states(plugin.plan(asked, TWO_RANKS))["async_sends"] == "on"
    with pytest.raises(FeatureUnavailableError, match=f"cannot import {MODULE}"):
        plugin.settle(asked, TWO_RANKS)
    assert states(plugin.settle(config.parse({}), TWO_RANKS))["async_sends"] == "unavailable"


def test_a_seam_of_the_last_engine_is_used_again() -> None:
    plugin.plan(config.parse({}), TWO_RANKS)
    plugin.settle(config.parse({}), TWO_RANKS)
    plugin.plan(config.parse({}), TWO_RANKS)
    assert seam_states() == dict.fromkeys(METHODS, "installed")
    plugin.disarm()
    assert wrapped() == []
    assert seam_states() == dict.fromkeys(METHODS, "not installed")


def test_the_real_features_are_the_switches() -> None:
    # Each feature is looked up in the settings by its name.
    switches = {f.name for f in dataclasses.fields(config.PluginConfig) if f.metadata["kind"] == "switch"}
    assert {feature.name for feature in REAL_FEATURES} == switches


# --- report ---------------------------------------------------------------------------------------------------------


def test_report_before_any_engine() -> None:
    report = plugin.report()
    assert report["plugin"] == vllm_pp_plugin.__version__
    assert report["config"] == dataclasses.asdict(config.PluginConfig())
    assert report["seams"] == report["problems"] == []
    assert {f["name"]: f["state"] for f in report["features"]} == {"async_sends": "off", "cpu_eager_pp": "off"}
    assert {f["reason"] for f in report["features"]} == {"no engine has started in this process"}


def test_report_is_json_and_tells_all_of_a_seam(vllm: FakeVllm) -> None:
    plugin.arm()
    plugin.settle(config.parse({"max_pending_sends": 7}), TWO_RANKS)
    report = json.loads(json.dumps(plugin.report()))
    assert report["config"]["max_pending_sends"] == 7
    keys = {f.name for f in dataclasses.fields(SeamInfo)} | {"state", "reason"}
    assert [set(seam) for seam in report["seams"]] == [keys] * 5  # three of the features and two doors
    assert [seam["state"] for seam in report["seams"]] == ["installed"] * 3 + ["watching"] * 2


# --- doors ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeConfig:
    """What the plugin reads of a ``VllmConfig``."""

    additional_config: Any = None
    ranks: int = 2
    mode: int = 0

    @property
    def parallel_config(self) -> Any:
        return types.SimpleNamespace(pipeline_parallel_size=self.ranks)

    @property
    def compilation_config(self) -> Any:
        return types.SimpleNamespace(mode=self.mode)


class FakeVllm:
    """Modules with vLLM's names, and no more in them than the doors look at.

    Attributes:
        arg_utils: Holds ``EngineArgs``.
        worker_base: Holds ``WorkerBase``; an instance remembers what was wrapped when its own ``__init__`` ran.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name in ("vllm", "vllm.engine", "vllm.v1", "vllm.v1.worker"):
            self.module(name)
        self.top = self.module("vllm", __version__="0.32.0")
        platform = types.SimpleNamespace(device_type="cpu")
        self.module("vllm.platforms", current_platform=platform)

        class EngineArgs:
            def __init__(self, made: FakeConfig) -> None:
                self.made = made

            def create_engine_config(self, usage_context: Any = None) -> FakeConfig:
                """Makes it."""
                return self.made

        class WorkerBase:
            def __init__(self, vllm_config: FakeConfig, rank: int = 0) -> None:
                self.seen = wrapped()

        class Worker(WorkerBase):
            pass

        self.EngineArgs, self.WorkerBase, self.Worker = EngineArgs, WorkerBase, Worker
        self.arg_utils = self.module("vllm.engine.arg_utils", EngineArgs=EngineArgs)
        self.worker_base = self.module("vllm.v1.worker.worker_base", WorkerBase=WorkerBase)

    def module(self, name: str, **names: Any) -> types.ModuleType:
        """Put a module in place of vLLM's."""
        made = types.ModuleType(name)
        vars(made).update(names)
        self._monkeypatch.setitem(sys.modules, name, made)
        return made

    def engine(self, settings: Options | None = None, **facts: Any) -> FakeConfig:
        """Make an engine's configuration as vLLM does."""
        additional = None if settings is None else {"pp_plugin": settings}
        made = FakeConfig(additional, **facts)
        assert self.EngineArgs(made).create_engine_config() is made
        return made

    def doors(self) -> dict[str, str]:
        """State of the doors, by class."""
        return {
            seam["target"].split(":")[1].split(".")[0]: seam["state"]
            for seam in plugin.report()["seams"]
            if seam["feature"] == "settings"
        }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


BOTH_OPEN = {"EngineArgs": "watching", "WorkerBase": "watching"}


def test_arm_opens_both_doors_and_touches_no_feature(vllm: FakeVllm, log: pytest.LogCaptureFixture) -> None:
    plugin.arm()
    assert vllm.doors() == BOTH_OPEN
    assert wrapped() == []
    assert not log.records


def test_loading_twice_wraps_once(vllm: FakeVllm) -> None:
    originals = [vars(vllm.EngineArgs)["create_engine_config"], vars(vllm.WorkerBase)["__init__"]]
    vllm_pp_plugin.register()
    once = [vars(vllm.EngineArgs)["create_engine_config"], vars(vllm.WorkerBase)["__init__"]]
    vllm_pp_plugin.register()
    plugin.arm()
    twice = [vars(vllm.EngineArgs)["create_engine_config"], vars(vllm.WorkerBase)["__init__"]]
    assert once == twice
    assert [function.__wrapped__ for function in twice] == originals
    plugin.disarm()
    assert [vars(vllm.EngineArgs)["create_engine_config"], vars(vllm.WorkerBase)["__init__"]] == originals


@pytest.mark.parametrize(
    ("value", "off"),
    [("1", True), ("true", True), ("yes", True), ("", False), ("0", False), (" No ", False), ("FALSE", False)],
)
def test_the_environment_can_turn_everything_off(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, value: str, off: bool
) -> None:
    monkeypatch.setenv(config.DISABLE_ENV, value)
    monkeypatch.setenv(config.CONFIG_ENV, "{")  # not even looked at when off
    vllm_pp_plugin.register()
    assert plugin.report()["disabled"] is off
    assert vllm.doors() == ({} if off else BOTH_OPEN)
    assert hasattr(vllm.EngineArgs.create_engine_config, "__wrapped__") is not off
    assert len(log.records) == (0 if off else 1)


def test_a_door_of_a_module_that_comes_later_is_opened_by_the_first_engine(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base")
    plugin.arm()
    assert vllm.doors() == {"EngineArgs": "watching", "WorkerBase": "not installed"}
    assert plugin.report()["problems"] == []  # it was not looked for: that would import half of vLLM
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", vllm.worker_base)
    vllm.engine()
    assert vllm.doors() == BOTH_OPEN


@pytest.mark.parametrize(
    ("module", "owner", "method"),
    [
        ("arg_utils", "EngineArgs", "create_engine_config"),
        ("worker_base", "WorkerBase", "__init__"),
        ("arg_utils", "EngineArgs", None),
        ("worker_base", "WorkerBase", None),
    ],
)
def test_a_door_that_cannot_be_opened_is_one_warning_and_one_problem(
    vllm: FakeVllm,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    module: str,
    owner: str,
    method: str | None,
) -> None:
    if method is None:
        monkeypatch.delattr(getattr(vllm, module), owner)
    else:
        # Not deleted: a class without __init__ of its own has object's.
        monkeypatch.setattr(getattr(vllm, owner), method, 3)
    for _ in range(3):
        vllm_pp_plugin.register()
    (problem,) = plugin.report()["problems"]
    assert problem.startswith("settings cannot be read: vllm.")
    assert owner in problem
    (warning,) = messages(log, logging.WARNING)
    assert problem in warning and vllm_pp_plugin.__version__ in warning
    other = {"EngineArgs": "WorkerBase", "WorkerBase": "EngineArgs"}[owner]
    assert vllm.doors() == {owner: "not installed", other: "watching"}


def test_wrong_settings_in_the_environment_are_told_when_armed_and_stop_an_engine(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(config.CONFIG_ENV, '{"nope": 1}')
    vllm_pp_plugin.register()
    vllm_pp_plugin.register()
    (problem,) = plugin.report()["problems"]
    assert problem.startswith("pp_plugin.nope is unknown")
    (warning,) = messages(log, logging.WARNING)
    assert problem in warning
    with pytest.raises(ConfigError, match=r"pp_plugin\.nope is unknown"):
        vllm.engine()
    with pytest.raises(ConfigError, match=r"pp_plugin\.nope is unknown"):
        vllm.Worker(FakeConfig())


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ZeroDivisionError("something that nobody has thought of")

    monkeypatch.setattr(plugin, "arm", broken)
    vllm_pp_plugin.register()
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert "ZeroDivisionError: something that nobody has thought of" in record.getMessage()
    assert "vllm-pp doctor" in record.getMessage()


def test_the_config_door_hands_the_settings_on_and_says_what_will_be_on(
    vllm: FakeVllm, log: pytest.LogCaptureFixture
) -> None:
    plugin.arm()
    vllm.engine({"cpu_eager_pp": False})
    vllm.engine({"cpu_eager_pp": False})
    assert messages(log, logging.INFO) == [
        f"vllm-pp-plugin {vllm_pp_plugin.__version__} on vLLM 0.32.0, cpu: async_sends on; "
        "cpu_eager_pp off: pp_plugin.cpu_eager_pp is false"
    ]
    # The process that starts the engine is no worker.
    assert wrapped() == []
    vllm.engine(ranks=1, mode=3)
    assert messages(log, logging.INFO)[1:] == [
        f"vllm-pp-plugin {vllm_pp_plugin.__version__} on vLLM 0.32.0, cpu: nothing on; "
        "async_sends not needed: one rank; cpu_eager_pp not needed: the model is compiled"
    ]
    assert messages(log, logging.WARNING) == []


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"nope": 1}, ConfigError, r"pp_plugin\.nope is unknown"),
        ({"max_pending_sends": 0}, ConfigError, r"pp_plugin\.max_pending_sends is 0"),
        ({"async_sends": True}, FeatureUnavailableError, "async_sends was asked for"),
    ],
)
def test_the_config_door_stops_an_engine_that_cannot_be(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, settings: Options, error: type[Exception], says: str
) -> None:
    set_features(monkeypatch, last=BROKEN)
    plugin.arm()
    with pytest.raises(error, match=says):
        vllm.engine(settings)
    # The next one is judged by its own settings.
    vllm.engine({"async_sends": False})


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.32.0", None),
        ("0.32.1+cpu", None),
        ("0.22.9", "is older than"),
        ("99.0", "is newer than"),
        ("nightly", "is no release"),
    ],
)
def test_a_vllm_version_that_nobody_has_looked_at_is_one_warning(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, version: str, says: str | None
) -> None:
    monkeypatch.setattr(vllm.top, "__version__", version)
    plugin.arm()
    assert not log.records  # `vllm --help` need not hear of it
    vllm.engine()
    vllm.engine({"async_sends": False})
    warnings = messages(log, logging.WARNING)
    if says is None:
        assert warnings == plugin.report()["problems"] == []
    else:
        assert len(warnings) == 1
        assert says in warnings[0] and version in warnings[0]
        assert len(plugin.report()["problems"]) == 1


def test_the_worker_door_installs_before_the_worker_is_initialised(vllm: FakeVllm) -> None:
    plugin.arm()
    worker = vllm.Worker(FakeConfig({"pp_plugin": {"max_pending_sends": 5}}), rank=1)
    assert worker.seen == ["send", "stop", "warm_up"]
    assert plugin.report()["config"]["max_pending_sends"] == 5
    assert vllm.Worker(vllm_config=FakeConfig({"pp_plugin": {"async_sends": False}})).seen == ["warm_up"]
    assert vllm.doors() == BOTH_OPEN


def test_the_worker_door_tells_the_worker_s_class(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    feature = dataclasses.replace(plugin.FEATURES[0], seams=lambda situation: told.append(situation) or [])
    monkeypatch.setattr(plugin, "FEATURES", (feature,))
    plugin.arm()
    vllm.engine(mode=3)
    vllm.Worker(FakeConfig(ranks=4, mode=3))
    assert told == [Situation("cpu", 2, False, None), Situation("cpu", 4, False, vllm.Worker)]


@pytest.mark.parametrize(
    ("in_child", "settings", "doors"),
    [
        (True, {"async_sends": False, "cpu_eager_pp": False}, "removed"),
        (True, {"async_sends": False}, "open"),  # something is on
        # Other engines may start in the main process, with other settings.
        (False, {"async_sends": False, "cpu_eager_pp": False}, "open"),
    ],
)
def test_a_worker_process_with_nothing_on_has_no_trace_of_the_plugin(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, in_child: bool, settings: Options, doors: str
) -> None:
    originals = [vars(vllm.EngineArgs)["create_engine_config"], vars(vllm.WorkerBase)["__init__"]]
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if in_child else None)
    plugin.arm()
    worker = vllm.Worker(FakeConfig({"pp_plugin": settings}))
    assert worker.seen == ([] if settings.get("cpu_eager_pp") is False else ["warm_up"])
    now = [vars(vllm.EngineArgs)["create_engine_config"], vars(vllm.WorkerBase)["__init__"]]
    if doors == "removed":
        assert now == originals
        assert vllm.doors() == dict.fromkeys(BOTH_OPEN, "not installed")
    else:
        assert [function.__wrapped__ for function in now] == originals
        assert vllm.doors() == BOTH_OPEN


def test_a_worker_that_cannot_have_what_was_asked_for_does_not_start(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_features(monkeypatch, first=BROKEN)
    plugin.arm()
    with pytest.raises(FeatureUnavailableError, match="async_sends was asked for"):
        vllm.Worker(FakeConfig({"pp_plugin": {"async_sends": True}}))
    assert vllm.Worker(FakeConfig()).seen == ["warm_up"]


def test_a_process_that_starts_engines_keeps_its_doors(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine inside a child process of the user's: the next one there may have other settings."""
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    off = {"async_sends": False, "cpu_eager_pp": False}
    plugin.arm()
    vllm.Worker(vllm.engine(off))
    assert vllm.doors() == BOTH_OPEN
    with pytest.raises(ConfigError, match="nope"):
        vllm.engine({"nope": 1})


def test_the_line_is_said_once_in_a_process_tree(vllm: FakeVllm, log: pytest.LogCaptureFixture) -> None:
    """With data parallelism every API server makes the same configuration again; other settings are another line."""
    plugin.arm()
    vllm.engine()
    vllm.engine()
    assert len(messages(log, logging.INFO)) == 1
    vllm.engine({"async_sends": False})
    assert len(messages(log, logging.INFO)) == 2


@pytest.mark.parametrize(("sleeps", "fences"), [(True, 1), (False, 0)])
def test_a_worker_that_cannot_sleep_needs_no_fence(sleeps: bool, fences: int) -> None:
    """A vendor's worker may derive from WorkerBase, which has no sleep: async sends are on all the same."""

    def sleep(self: Any, level: int = 1) -> None:
        """Give memory back."""

    worker = type("VendorWorker", (), {"sleep": sleep} if sleeps else {})
    seams = plugin._async_sends_seams(Situation("npu", 2, True, worker))
    assert len([seam for seam in seams if seam.info.target.endswith(".sleep")]) == fences


def test_what_is_off_is_reported_as_not_installed() -> None:
    """A report names every seam: absence is said, not left out."""
    plugin.settle(config.parse({"async_sends": False, "cpu_eager_pp": False}), TWO_RANKS)
    assert set(seam_states().values()) == {"not installed"}
    assert len(seam_states()) == sum(len(feature.seams(TWO_RANKS)) for feature in plugin.FEATURES)
