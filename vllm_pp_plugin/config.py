"""Settings of the plugin: frozen, checked, with one place where each default is written down.

They come from vLLM's ``additional_config`` under the key ``pp_plugin``, so they reach every worker::

    vllm serve MODEL -pp 2 --additional-config '{"pp_plugin": {"max_pending_sends": 32}}'
    LLM(MODEL, additional_config={"pp_plugin": {"async_sends": False}})

or, weaker, from the environment variable ``PP_PLUGIN_CONFIG`` (the same keys, as JSON).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

from vllm_pp_plugin.errors import ConfigError

__all__ = ["ADDITIONAL_CONFIG_KEY", "CONFIG_ENV", "DISABLE_ENV", "PluginConfig", "Switch", "load", "parse"]

ADDITIONAL_CONFIG_KEY = "pp_plugin"
CONFIG_ENV = "PP_PLUGIN_CONFIG"
DISABLE_ENV = "PP_PLUGIN_DISABLE"

Switch = bool | Literal["auto"]
"""True: asked for by name (an error where it cannot be had); "auto": on where it can be had; False: off."""

_MIB = 1024 * 1024


def _setting(default: Any, kind: str, help: str, low: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "low": low})


@dataclasses.dataclass(frozen=True)
class PluginConfig:
    """All settings. Times are in seconds, sizes in bytes."""

    async_sends: Switch = _setting(
        "auto", "switch", "pipeline sends that never block and keep a private copy of what they send"
    )
    cpu_eager_pp: Switch = _setting(
        "auto", "switch", "repair of enforce_eager=True with pipeline parallelism on the CPU backend"
    )
    max_pending_sends: int = _setting(
        64, "int", "sends in flight per group before the caller waits for the oldest", low=1
    )
    max_retained_bytes: int = _setting(
        512 * _MIB,
        "int",
        "bytes of private copies in flight per group before the caller waits; one larger send goes alone",
        low=1,
    )
    send_warn_s: float = _setting(10.0, "seconds", "age at which a send that is not taken is logged")
    send_deadline_s: float = _setting(
        300.0, "seconds", "time without progress after which the group is aborted and an error raised"
    )
    drain_deadline_s: float = _setting(
        10.0, "seconds", "time given to sends in flight before sleep, destroy and exit"
    )

    @classmethod
    def describe(cls) -> list[tuple[str, Any, str]]:
        """(name, default, meaning) of every setting, in the order of declaration."""
        return [(f.name, f.default, f.metadata["help"]) for f in dataclasses.fields(cls)]


_LONGEST_S = 30 * 24 * 3600.0


def _show(value: Any) -> str:
    """A value for a message: short, and safe for numbers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check(name: str, value: Any, kind: str, low: float | None) -> Any:
    """Return ``value`` as its setting's type.

    Raises:
        ConfigError: With the setting's name, the value, and what is allowed.
    """
    shown = f"pp_plugin.{name} is {_show(value)}"
    if kind == "switch":
        if value is None or value == "auto":
            return "auto"
        if isinstance(value, bool):
            return value
        raise ConfigError(f'{shown}: allowed are true, false and "auto"')
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind == "int":
        if not is_number or (isinstance(value, float) and not value.is_integer()):
            raise ConfigError(f"{shown}: a whole number is needed")
        value = int(value)
        if low is not None and value < low:
            raise ConfigError(f"{shown}: it must be at least {low:g}")
        return value
    if not is_number or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{shown}: a finite number of seconds is needed")
    if value <= 0:
        raise ConfigError(f"{shown}: it must be more than 0 seconds")
    if value > _LONGEST_S:
        raise ConfigError(f"{shown}: it must be at most {_LONGEST_S:g} seconds (30 days)")
    return float(value)


def parse(raw: Mapping[str, Any] | None) -> PluginConfig:
    """Make settings from a mapping.

    Args:
        raw: Setting names and values, as they stand in ``additional_config["pp_plugin"]``. None means none.

    Raises:
        ConfigError: For an unknown name (all valid ones are listed) or a value that is not allowed.
    """
    if raw is None:
        return PluginConfig()
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f'pp_plugin is {_show(raw)}: an object with settings is needed, e.g. {{"async_sends": false}}'
        )
    fields = {f.name: f for f in dataclasses.fields(PluginConfig)}
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in fields:
            close = difflib.get_close_matches(str(name), fields, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"pp_plugin.{name} is unknown.{hint} Valid settings: {', '.join(fields)}")
        meta = fields[name].metadata
        values[name] = _check(name, value, meta["kind"], meta["low"])
    config = PluginConfig(**values)
    if config.send_warn_s >= config.send_deadline_s and "send_warn_s" in values:
        raise ConfigError(
            f"pp_plugin.send_warn_s is {config.send_warn_s:g} and send_deadline_s {config.send_deadline_s:g}: "
            "the warning must come before the deadline"
        )
    return config


def _from_env(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(CONFIG_ENV, "")
    if not text.strip():
        return {}
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:  # also numbers and nestings that Python refuses to read
        raise ConfigError(f"{CONFIG_ENV} is not JSON ({exc}); example: {CONFIG_ENV}='{{}}'") from exc
    if not isinstance(raw, dict):
        raise ConfigError(f"{CONFIG_ENV} must hold a JSON object, e.g. {CONFIG_ENV}='{{\"async_sends\": false}}'")
    return raw


def load(additional_config: Any = None, environ: Mapping[str, str] | None = None) -> PluginConfig:
    """Settings of an engine: ``PP_PLUGIN_CONFIG`` first, then ``additional_config["pp_plugin"]`` over it.

    Args:
        additional_config: vLLM's ``VllmConfig.additional_config``; what is not a mapping has no settings.
        environ: Environment to read, by default this process's.

    Raises:
        ConfigError: See :func:`parse`.
    """
    merged = _from_env(os.environ if environ is None else environ)
    if isinstance(additional_config, Mapping) and ADDITIONAL_CONFIG_KEY in additional_config:
        own = additional_config[ADDITIONAL_CONFIG_KEY]
        if own is not None and not isinstance(own, Mapping):
            return parse(own)  # raises, naming the value
        merged.update(own or {})
    return parse(merged)
