"""Vendors' plugins: found by entry point, asked first, and skipped by name when they fail."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_pp_plugin import hookspecs
from vllm_pp_plugin.devices.base import DeviceBackend
from vllm_pp_plugin.errors import HookError, PPPluginError
from vllm_pp_plugin.hookspecs import PluginFailure, PluginManager

HEADER = "from vllm_pp_plugin.devices import DeviceBackend\nfrom vllm_pp_plugin.hookspecs import hookimpl\n"

GOOD = """
class Chip(DeviceBackend):
    name = "cuda"
    communicator_name = "Chip"

@hookimpl
def vllm_pp_device_backend(device_type):
    return Chip() if device_type in ("cuda", "chip") else None
"""
FEWER_ARGUMENTS = """
class Anything(DeviceBackend):
    communicator_name = "Anything"

@hookimpl
def vllm_pp_device_backend():
    return Anything()
"""
MORE_ARGUMENTS = """
@hookimpl
def vllm_pp_device_backend(device_type, device_index):
    return None
"""
UNKNOWN_HOOK = """
@hookimpl
def vllm_pp_device_backend(device_type):
    raise AssertionError("a plugin that was skipped is not asked")

@hookimpl
def vllm_pp_device_backendd(device_type):
    return None
"""
RAISES_ON_IMPORT = 'raise OSError("libchip.so.1: cannot open shared object file")\n'
MISSING_IMPORT = "import a_module_that_is_not_there\n"
SYNTAX = "def vllm_pp_device_backend(device_type:\n"
RAISES_IN_HOOK = """
ASKED = []

@hookimpl
def vllm_pp_device_backend(device_type):
    ASKED.append(device_type)
    raise RuntimeError("no driver")
"""
WRONG_TYPE = """
@hookimpl
def vllm_pp_device_backend(device_type):
    return "chip" if device_type == "cuda" else None
"""

BUILT_IN = ["cpu", "cuda", "npu", "xpu"]


def write_vendor(folder: Path, name: str, body: str, value: str | None = None) -> None:
    """A distribution as an installer leaves it: a module, and the metadata that names it.

    Args:
        folder: What will be on ``sys.path``.
        name: Of the distribution and of its entry point; its module is called ``name_pp``.
        body: The module's code, after the imports that every vendor has.
        value: What the entry point names, by default the module.
    """
    (folder / f"{name}_pp.py").write_text(HEADER + body)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{hookspecs.ENTRY_POINT_GROUP}]\nchip = {value or name + '_pp'}\n")


Installer = Callable[..., PluginManager]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """``install(acme=CODE, ...)``: a manager that was made with these vendors' distributions installed."""
    monkeypatch.syspath_prepend(tmp_path)

    def with_vendors(**vendors: str) -> PluginManager:
        for name, body in vendors.items():
            write_vendor(tmp_path, name, body)
        importlib.invalidate_caches()
        return PluginManager()

    before = set(sys.modules)
    yield with_vendors
    for name in set(sys.modules) - before:
        if name.endswith("_pp"):
            del sys.modules[name]


@pytest.mark.parametrize(("device", "prefix"), [("cpu", "Cpu"), ("cuda", "Cuda"), ("npu", "Npu"), ("xpu", "Xpu")])
def test_the_built_in_backends_answer_for_their_device(install: Installer, device: str, prefix: str) -> None:
    backend = install().device_backend(device)
    assert (backend.name, backend.communicator_name) == (device, prefix)


def test_without_vendors_nothing_has_failed(install: Installer) -> None:
    manager = install()
    assert sorted(manager.names()) == BUILT_IN
    assert manager.failures == []


def test_a_vendor_is_asked_before_the_built_in(install: Installer) -> None:
    manager = install(acme=GOOD)
    assert manager.device_backend("cuda").communicator_name == "Chip"
    assert manager.device_backend("chip").communicator_name == "Chip"
    # It leaves what is not its own to the others.
    assert manager.device_backend("cpu").communicator_name == "Cpu"
    assert sorted(manager.names()) == sorted([*BUILT_IN, "acme:chip"])
    assert manager.failures == []


def test_a_vendor_may_take_fewer_arguments_than_the_hook_has(install: Installer) -> None:
    manager = install(acme=FEWER_ARGUMENTS)
    assert manager.device_backend("whatever").communicator_name == "Anything"
    assert manager.failures == []


def test_an_entry_point_may_name_an_object_in_a_module(install: Installer, tmp_path: Path) -> None:
    body = GOOD.replace("@hookimpl", "class Hooks:\n  @hookimpl").replace("def vllm", "  def vllm")
    body = body.replace("(device_type):", "(self, device_type):").replace("    return", "      return")
    write_vendor(tmp_path, "acme", body + "\nhooks = Hooks()\n", value="acme_pp:hooks")
    manager = install()
    assert manager.failures == []
    assert manager.device_backend("chip").communicator_name == "Chip"


SKIPPED_WHEN_LOADED = [
    pytest.param(RAISES_ON_IMPORT, r"^OSError: libchip\.so\.1: cannot open shared object file$", id="raises"),
    pytest.param(MISSING_IMPORT, r"^ModuleNotFoundError: .*a_module_that_is_not_there", id="missing import"),
    pytest.param(SYNTAX, r"^SyntaxError: ", id="syntax error"),
    pytest.param(MORE_ARGUMENTS, r"^PluginValidationError: .*device_index", id="more arguments"),
    pytest.param(UNKNOWN_HOOK, r"^PluginValidationError: .*vllm_pp_device_backendd", id="unknown hook"),
]
SKIPPED_WHEN_ASKED = [
    pytest.param(RAISES_IN_HOOK, r"^RuntimeError: no driver$", id="raises"),
    pytest.param(WRONG_TYPE, r"^HookError: returned str, a DeviceBackend is needed$", id="wrong type"),
]


def check_failure(failures: list[PluginFailure], reason: str) -> None:
    (failure,) = failures
    assert (failure.plugin, failure.distribution) == ("broken:chip", "broken")
    # pluggy puts what is wrong on lines of their own.
    assert re.search(reason, failure.reason.replace("\n", " ")), failure.reason


@pytest.mark.parametrize(("body", "reason"), SKIPPED_WHEN_LOADED)
def test_a_vendor_that_cannot_be_loaded_is_skipped_and_named(
    install: Installer, log: pytest.LogCaptureFixture, body: str, reason: str
) -> None:
    manager = install(broken=body, acme=GOOD)
    check_failure(manager.failures, reason)
    assert sorted(manager.names()) == sorted([*BUILT_IN, "acme:chip"])
    assert manager.device_backend("cuda").communicator_name == "Chip"
    assert manager.device_backend("cpu").communicator_name == "Cpu"
    (record,) = log.records
    assert record.levelno == logging.WARNING
    assert "broken:chip is skipped" in record.getMessage()


@pytest.mark.parametrize(("body", "reason"), SKIPPED_WHEN_ASKED)
def test_a_vendor_that_fails_when_it_is_asked_is_dropped_and_the_next_answers(
    install: Installer, log: pytest.LogCaptureFixture, body: str, reason: str
) -> None:
    manager = install(broken=body)
    assert manager.failures == []
    assert manager.device_backend("cuda").communicator_name == "Cuda"
    check_failure(manager.failures, reason)
    assert sorted(manager.names()) == BUILT_IN
    # Asked once, reported once.
    assert manager.device_backend("cuda").communicator_name == "Cuda"
    check_failure(manager.failures, reason)
    assert [record.levelno for record in log.records] == [logging.WARNING]


def test_a_vendor_that_raised_is_not_asked_again(install: Installer) -> None:
    manager = install(broken=RAISES_IN_HOOK)
    manager.device_backend("cuda")
    manager.device_backend("cpu")
    assert sys.modules["broken_pp"].ASKED == ["cuda"]


def test_each_of_several_broken_vendors_is_named(install: Installer) -> None:
    manager = install(one=RAISES_ON_IMPORT, two=RAISES_IN_HOOK, three=WRONG_TYPE, four=UNKNOWN_HOOK, acme=GOOD)
    assert manager.device_backend("npu").communicator_name == "Npu"
    assert manager.device_backend("cuda").communicator_name == "Chip"
    failed = {failure.plugin: failure.reason.split(":")[0] for failure in manager.failures}
    assert failed.pop("three:chip", "HookError") == "HookError"  # only where it was asked before acme
    assert failed == {"one:chip": "OSError", "two:chip": "RuntimeError", "four:chip": "PluginValidationError"}


def test_a_device_that_nobody_knows_lists_who_was_asked(install: Installer) -> None:
    manager = install(broken=RAISES_IN_HOOK, acme=GOOD)
    with pytest.raises(HookError) as caught:
        manager.device_backend("tpu")
    message = str(caught.value)
    assert "no plugin knows the device 'tpu'" in message
    for name in [*BUILT_IN, "acme:chip"]:
        assert name in message.split("asked: ")[1]
    assert "broken:chip was skipped (RuntimeError: no driver)" in message
    assert "vllm-pp doctor" in message
    assert isinstance(caught.value, PPPluginError)


@pytest.mark.usefixtures("install")
def test_the_manager_of_the_process_is_made_on_first_use_and_kept(tmp_path: Path) -> None:
    hookspecs.manager.cache_clear()
    try:
        write_vendor(tmp_path, "acme", GOOD)
        importlib.invalidate_caches()
        assert "acme_pp" not in sys.modules
        backend: DeviceBackend = hookspecs.device_backend("chip")
        assert backend.communicator_name == "Chip"
        assert hookspecs.manager() is hookspecs.manager()
    finally:
        hookspecs.manager.cache_clear()
