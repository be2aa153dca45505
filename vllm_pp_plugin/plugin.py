"""What is installed where: the one list of features, and their state in this process.

``arm()`` (from ``register()``) opens the doors; an engine's settings arrive through them, and ``settle()``
installs the seams of the features that are on and removes those of the features that are not.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_pp_plugin import __version__
from vllm_pp_plugin import config as config_module
from vllm_pp_plugin.config import PluginConfig, Switch
from vllm_pp_plugin.errors import ConfigError, FeatureUnavailableError, SeamError

if TYPE_CHECKING:
    from vllm_pp_plugin.seams.facts import Situation
    from vllm_pp_plugin.seams.seam import Seam

__all__ = ["FEATURES", "Feature", "FeatureState", "arm", "disarm", "plan", "report", "settle"]

logger = logging.getLogger("vllm.pp_plugin")

ON = "on"
OFF = "off"
NOT_NEEDED = "not needed"
UNAVAILABLE = "unavailable"

_SAID_ENV = "_PP_PLUGIN_SAID"


@dataclasses.dataclass(frozen=True)
class Feature:
    """Something that can be on or off.

    Attributes:
        name: Its name and that of its setting.
        help: What it does, in half a sentence.
        seams: Makes its seams for an engine.
        not_needed: Why it has nothing to do in an engine, or None.
    """

    name: str
    help: str
    seams: Callable[[Situation], list[Seam]]
    not_needed: Callable[[Situation], str | None]


@dataclasses.dataclass(frozen=True)
class FeatureState:
    """Whether a feature is on, and why (not). ``state`` is on, off, not needed, or unavailable."""

    name: str
    state: str
    reason: str


def _one_rank(situation: Situation) -> str | None:
    return "pipeline_parallel_size is 1" if situation.pipeline_parallel_size <= 1 else None


def _async_sends_seams(situation: Situation) -> list[Seam]:
    from vllm_pp_plugin.seams import communicator_init, group_coordinator, worker_sleep

    seams = [
        communicator_init.communicator_init(lambda: _state.config),
        group_coordinator.isend_tensor_dict(),
        group_coordinator.send_tensor_dict(),
        group_coordinator.destroy(),
    ]
    worker = situation.worker_class
    if worker is None or hasattr(worker, "sleep"):  # a worker that cannot sleep has nothing to fence
        seams.append(worker_sleep.worker_sleep(worker))
    return seams


def _cpu_eager_pp_seams(situation: Situation) -> list[Seam]:
    from vllm_pp_plugin.seams import cpu_eager_pp

    return [cpu_eager_pp.cpu_eager_pp()]


def _cpu_eager_pp_not_needed(situation: Situation) -> str | None:
    if situation.device != "cpu":
        return f"the device is {situation.device}, not cpu"
    return _one_rank(situation) or (None if situation.eager else "the model is compiled")


FEATURES = (
    Feature("async_sends", "pipeline sends that never block", _async_sends_seams, _one_rank),
    Feature(
        "cpu_eager_pp",
        "repair of eager mode with pipeline parallelism on CPU",
        _cpu_eager_pp_seams,
        _cpu_eager_pp_not_needed,
    ),
)


class _State:
    """This process's state."""

    def __init__(self) -> None:
        self.config = PluginConfig()
        self.doors: list[Seam] = []
        self.seams: dict[str, Seam] = {}
        self.features: dict[str, FeatureState] = {
            f.name: FeatureState(f.name, OFF, "no engine has started in this process") for f in FEATURES
        }
        self.problems: list[str] = []
        self.front_end_pid = 0


_state = _State()


def _problem(text: str) -> None:
    """Keep a problem for doctor, and log it once."""
    if text not in _state.problems:
        _state.problems.append(text)
        logger.warning("vllm-pp-plugin %s: %s", __version__, text)


def disabled() -> bool:
    """Whether ``PP_PLUGIN_DISABLE`` turns everything off."""
    return os.environ.get(config_module.DISABLE_ENV, "").strip().lower() not in ("", "0", "false", "no")


def arm() -> None:
    """Open the doors of this process, as far as vLLM's modules are loaded in it. Cheap; may be called again."""
    if disabled():
        return
    try:
        config_module.load()
    except ConfigError as exc:
        # Only told here: `vllm --help` must work. An engine's start raises it.
        _problem(str(exc))
    from vllm_pp_plugin.seams import doors

    if not _state.doors:
        _state.doors = [doors.config_door(_engine_configured), doors.worker_door(_worker_starts)]
    for door in _state.doors:
        # What is not loaded yet is opened by the config door: every engine passes it before its workers.
        if door.module_loaded():
            _open(door)


def _open(door: Seam) -> None:
    try:
        door.install()
    except SeamError as exc:
        _problem(f"settings cannot be read: {exc}")


def disarm() -> None:
    """Take out every seam and door of this process.

    Raises:
        SeamError: When somebody has wrapped one of them since.
    """
    for seam in [*_state.seams.values(), *_state.doors]:
        seam.remove()


def _engine_configured(vllm_config: Any) -> None:
    """The process that starts an engine: refuse what cannot be, say what will be on, install nothing."""
    from vllm_pp_plugin.seams.facts import Situation

    config = config_module.load(vllm_config.additional_config)
    situation = Situation.of(vllm_config)
    _state.front_end_pid = os.getpid()
    states = plan(config, situation)
    for door in _state.doors:
        _open(door)  # in case the worker will live in this process
    _log_line(states, situation)


def _worker_starts(vllm_config: Any, worker_class: type) -> None:
    """A worker process: install what is on."""
    from vllm_pp_plugin.seams.facts import Situation

    config = config_module.load(vllm_config.additional_config)
    states = settle(config, Situation.of(vllm_config, worker_class))
    # A process that has configured an engine itself may start another one.
    only_a_worker = multiprocessing.parent_process() is not None and _state.front_end_pid != os.getpid()
    if only_a_worker and all(state.state != ON for state in states):
        # Nothing is on in it, and nothing else will be started in it: leave no trace.
        for door in _state.doors:
            _take_out(door)


def _take_out(seam: Seam) -> None:
    """Remove a seam, or leave it where somebody has wrapped it since: a door only reads, and the others hand
    over to stock wherever a group's communicator is not ours."""
    try:
        seam.remove()
    except SeamError as exc:
        _problem(f"left in place: {exc}")


def _log_line(states: list[FeatureState], situation: Situation) -> None:
    """The one INFO line of an engine's start."""
    from vllm_pp_plugin.seams.facts import version_note, vllm_version

    version = vllm_version()
    on = ", ".join(s.name for s in states if s.state == ON) or "nothing"
    rest = "".join(f"; {s.name} {s.state}: {s.reason}" for s in states if s.state != ON)
    line = f"vllm-pp-plugin {__version__} on vLLM {version}, {situation.device}: {on} on{rest}"
    # Children inherit it: with data parallelism, every API server makes the same configuration again.
    if os.environ.get(_SAID_ENV) == line:
        return
    os.environ[_SAID_ENV] = line
    logger.info("%s", line)
    note = version_note(version)
    if note is not None:
        _problem(note)


def _seams_of(feature: Feature, situation: Situation) -> list[Seam]:
    """The feature's seams; those that this process has made already are the same objects."""
    return [_state.seams.setdefault(s.info.target, s) for s in feature.seams(situation)]


def _wanted(feature: Feature, switch: Switch, situation: Situation) -> FeatureState:
    """The state a feature should have, before its seams are looked at."""
    if switch is False:
        return FeatureState(feature.name, OFF, f"pp_plugin.{feature.name} is false")
    reason = feature.not_needed(situation)
    if reason is not None:
        return FeatureState(feature.name, NOT_NEEDED, reason)
    return FeatureState(feature.name, ON, feature.help)


def _decide(config: PluginConfig, situation: Situation, act: Callable[[list[Seam]], None]) -> list[FeatureState]:
    """Decide on every feature; ``act`` is given the seams of those that should be on.

    The decisions are kept for :func:`report`, those of a start that is refused too.

    Raises:
        FeatureUnavailableError: If a feature that was asked for by name cannot be had.
    """
    states: list[FeatureState] = []
    refused: FeatureUnavailableError | None = None
    for feature in FEATURES:
        switch: Switch = getattr(config, feature.name)
        state = _wanted(feature, switch, situation)
        seams = _seams_of(feature, situation)  # of every feature, so that a report names what is not installed too
        if state.state == ON:
            try:
                act(seams)
            except SeamError as exc:
                state = FeatureState(feature.name, UNAVAILABLE, str(exc))
                if switch is True and refused is None:
                    refused = FeatureUnavailableError(
                        f"{feature.name} was asked for (pp_plugin.{feature.name} is true) and cannot be had: "
                        f'{exc}. Set it to "auto" to go on without it, or use a vLLM version that the README '
                        "lists; `vllm-pp doctor` says more"
                    )
        states.append(state)
    _state.features = {state.name: state for state in states}
    if refused is not None:
        raise refused
    return states


def plan(config: PluginConfig, situation: Situation) -> list[FeatureState]:
    """Say what would be on in an engine, without touching anything.

    Seams in modules that this process has not loaded are left for the workers to look at.

    Raises:
        FeatureUnavailableError: If a feature that was asked for by name cannot be had.
    """

    def verify(seams: list[Seam]) -> None:
        for seam in seams:
            if seam.module_loaded():
                seam.verify()

    return _decide(config, situation, verify)


def settle(config: PluginConfig, situation: Situation) -> list[FeatureState]:
    """Install the seams of the features that are on in this process, and remove all others.

    A feature is installed whole or not at all.

    Args:
        config: The engine's settings.
        situation: The engine's facts.

    Raises:
        FeatureUnavailableError: If a feature that was asked for by name cannot be had.
    """
    _state.config = config

    try:
        states = _decide(config, situation, _install)
    except FeatureUnavailableError:
        for seam in _state.seams.values():  # this engine will not start
            _take_out(seam)
        raise
    keep = {state.name for state in states if state.state == ON}
    for seam in _state.seams.values():
        if seam.info.feature not in keep:
            _take_out(seam)
    for state in states:
        if state.state == UNAVAILABLE:
            _problem(f"{state.name} steps aside: {state.reason}")
    return states


def _install(seams: list[Seam]) -> None:
    """All of them or none."""
    for seam in seams:
        seam.verify()
    fresh: list[Seam] = []
    try:
        for seam in seams:
            if not seam.installed():
                seam.install()
                fresh.append(seam)
    except SeamError:
        for seam in fresh:
            seam.remove()
        raise


def _reason(seam: Seam) -> str:
    state = _state.features[seam.info.feature]
    if state.state == ON and not seam.installed():
        return "not this engine's class"
    return state.reason


def report() -> dict[str, Any]:
    """The state of this process, read from vLLM's classes as they are now; JSON values only."""
    seams = [
        {
            **dataclasses.asdict(seam.info),
            "state": "installed" if seam.installed() else "not installed",
            "reason": _reason(seam),
        }
        for seam in _state.seams.values()
    ]
    doors = [
        {
            **dataclasses.asdict(door.info),
            "state": "watching" if door.installed() else "not installed",
            "reason": "reads the settings of an engine, changes nothing",
        }
        for door in _state.doors
    ]
    return {
        "plugin": __version__,
        "disabled": disabled(),
        "config": dataclasses.asdict(_state.config),
        "features": [dataclasses.asdict(state) for state in _state.features.values()],
        "seams": seams + doors,
        "problems": list(_state.problems),
    }
