"""Hooks for hardware vendors, and the manager that loads their plugins.

A vendor writes one module with ``hookimpl`` functions and names it in its own package::

    [project.entry-points.vllm_pp_plugin]
    mychip = "mychip_vllm.pp"

    # mychip_vllm/pp.py
    from vllm_pp_plugin.devices import DeviceBackend
    from vllm_pp_plugin.hookspecs import hookimpl

    class MyChip(DeviceBackend):
        name = "mychip"                # torch.device("mychip:0").type
        communicator_name = "MyChip"   # the composed class is called MyChipPPCommunicator

    @hookimpl
    def vllm_pp_device_backend(device_type):
        return MyChip() if device_type == "mychip" else None

Vendors' plugins are asked before the built-in ones. One that fails to load, or raises, is named, skipped
and reported by ``vllm-pp doctor``; the others go on.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import logging
from typing import TYPE_CHECKING

import pluggy

from vllm_pp_plugin.errors import HookError

if TYPE_CHECKING:
    from vllm_pp_plugin.devices.base import DeviceBackend

__all__ = ["ENTRY_POINT_GROUP", "HookSpecs", "PluginFailure", "device_backend", "hookimpl", "manager"]

ENTRY_POINT_GROUP = "vllm_pp_plugin"
_BUILT_IN = ("cpu", "cuda", "npu", "xpu")

logger = logging.getLogger("vllm.pp_plugin")
hookspec = pluggy.HookspecMarker("vllm_pp_plugin")
hookimpl = pluggy.HookimplMarker("vllm_pp_plugin")


class HookSpecs:
    """The hooks a vendor can implement."""

    @hookspec(firstresult=True)
    def vllm_pp_device_backend(self, device_type: str) -> DeviceBackend | None:
        """Return the backend for a device, or None when it is not yours.

        Called once for each process group, when its communicator is built: after the device has been
        chosen, before any message travels. Must not initialise the device.

        Args:
            device_type: ``torch.device.type``, e.g. ``"npu"``.
        """


@dataclasses.dataclass(frozen=True)
class PluginFailure:
    """A vendor's plugin that was skipped."""

    plugin: str
    distribution: str
    reason: str


class PluginManager:
    """The registered plugins, and those that failed."""

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager("vllm_pp_plugin")
        self._pluggy.add_hookspecs(HookSpecs)
        self.failures: list[PluginFailure] = []
        for name in _BUILT_IN:
            self._pluggy.register(importlib.import_module(f"vllm_pp_plugin.devices.{name}"), name=name)
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            self._load(point)

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        distribution = point.dist.name if point.dist is not None else "unknown"
        try:
            module = point.load()
            self._pluggy.register(module, name=f"{distribution}:{point.name}")
            self._pluggy.check_pending()
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - foreign code: named, skipped, reported by doctor
            self._drop(f"{distribution}:{point.name}", distribution, exc)

    def _drop(self, plugin: str, distribution: str, exc: BaseException) -> None:
        if self._pluggy.has_plugin(plugin):
            self._pluggy.unregister(name=plugin)
        reason = f"{type(exc).__name__}: {exc}"
        self.failures.append(PluginFailure(plugin, distribution, reason))
        logger.warning("vllm-pp-plugin: vendor plugin %s is skipped: %s", plugin, reason)

    def names(self) -> list[str]:
        """Names of the registered plugins."""
        return [name for name, plugin in self._pluggy.list_name_plugin() if plugin is not None]

    def device_backend(self, device_type: str) -> DeviceBackend:
        """The backend for a device.

        A vendor's plugin that raises is dropped and the rest are asked again.

        Raises:
            HookError: If nobody knows the device, or a plugin returned something else than a backend.
        """
        from vllm_pp_plugin.devices.base import DeviceBackend

        impls = self._pluggy.hook.vllm_pp_device_backend.get_hookimpls()
        for impl in reversed(impls):
            # One plugin at a time, so that the one that raises can be named.
            others = [other.plugin for other in impls if other is not impl]
            ask = self._pluggy.subset_hook_caller("vllm_pp_device_backend", remove_plugins=others)
            try:
                backend = ask(device_type=device_type)
                if backend is not None and not isinstance(backend, DeviceBackend):
                    raise HookError(f"returned {type(backend).__name__}, a DeviceBackend is needed")
            except Exception as exc:  # noqa: BLE001 - foreign code: named, skipped, reported by doctor
                self._drop(impl.plugin_name, impl.plugin_name.split(":")[0], exc)
                continue
            if backend is not None:
                return backend
        skipped = "".join(f"; {f.plugin} was skipped ({f.reason})" for f in self.failures)
        raise HookError(
            f"no plugin knows the device {device_type!r} (asked: {', '.join(self.names())}{skipped}). "
            "Its vendor provides one by the hook vllm_pp_device_backend; see `vllm-pp doctor`"
        )


@functools.cache
def manager() -> PluginManager:
    """The manager of this process, made on first use: scanning distributions is no work for `vllm --help`."""
    return PluginManager()


def device_backend(device_type: str) -> DeviceBackend:
    """Short for ``manager().device_backend(device_type)``."""
    return manager().device_backend(device_type)
