"""One wrapped method of vLLM: verified before it is touched, wrapped once, and removable."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

from vllm_pp_plugin.errors import SeamError

__all__ = ["Seam", "SeamInfo"]

_MARK = "__vllm_pp_plugin_seam__"


@dataclasses.dataclass(frozen=True)
class SeamInfo:
    """What a seam is, for people.

    Attributes:
        target: ``module:Class.method``.
        feature: Name of the feature that needs it.
        why: What is wrong or missing in vLLM without it.
        how: What the wrapper does.
        versions: The vLLM versions for which it is needed.
        removal: When it can go.
    """

    target: str
    feature: str
    why: str
    how: str
    versions: str
    removal: str


@dataclasses.dataclass(eq=False)
class Seam:
    """A method of vLLM and the wrapper for it.

    Attributes:
        info: What it is.
        parameters: Names of the method's parameters, ``self`` first, as the wrapper relies on them.
        make: Makes the wrapper from the original function.
        exact: Whether the method may have no further parameters (the wrapper replaces the method), or may
            (it passes everything on).
        owner: The class to wrap, where it is known only at run time; otherwise the one in ``info.target``.
        needs: Other names (``module:name`` or ``module:Class.name``) that the wrapper uses.
    """

    info: SeamInfo
    parameters: tuple[str, ...]
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    exact: bool = False
    owner: type | None = None
    needs: tuple[str, ...] = ()
    _wrapper: Callable[..., Any] | None = None
    _class: type | None = None
    _inherited: bool = False

    @property
    def _module_name(self) -> str:
        return self.info.target.split(":")[0]

    @property
    def _path(self) -> tuple[str, str]:
        class_name, method = self.info.target.split(":")[1].split(".")
        return class_name, method

    def module_loaded(self) -> bool:
        """Whether the target's module is imported, so that looking at it costs nothing."""
        return self._module_name in sys.modules

    def verify(self) -> type:
        """Check that the target is there and has the shape the wrapper expects. Imports its module.

        Returns:
            The class that holds the method.

        Raises:
            SeamError: Saying what is missing or different.
        """
        class_name, method = self._path
        if self.owner is not None:
            owner: Any = self.owner
        else:
            owner = getattr(self._import(self._module_name), class_name, None)
        if not isinstance(owner, type):
            raise SeamError(f"{self.info.target}: {self._module_name} has no class {class_name}")
        function = inspect.getattr_static(owner, method, None)
        if function is None:
            raise SeamError(f"{self.info.target}: {owner.__qualname__} has no method {method}")
        if not inspect.isfunction(function):
            raise SeamError(f"{self.info.target}: a plain method was expected, found {type(function).__name__}")
        found = tuple(inspect.signature(function).parameters)
        fits = found == self.parameters if self.exact else found[: len(self.parameters)] == self.parameters
        if not fits:
            raise SeamError(
                f"{self.info.target}: its parameters are ({', '.join(found)}), "
                f"expected ({', '.join(self.parameters)})"
            )
        for need in self.needs:
            module_name, path = need.split(":")
            found_need: Any = self._import(module_name)
            for part in path.split("."):
                found_need = getattr(found_need, part, None)
            if found_need is None:
                raise SeamError(f"{self.info.target}: {need} is missing, which the wrapper uses")
        return owner

    def _import(self, name: str) -> Any:
        try:
            return importlib.import_module(name)
        except Exception as exc:  # a module may raise anything (no driver, no device); kept as the cause
            raise SeamError(f"{self.info.target}: cannot import {name}: {type(exc).__name__}: {exc}") from exc

    def installed(self) -> bool:
        """Whether calls of the target go through the wrapper now, read from the class itself."""
        owner = self._class
        if owner is None or self._wrapper is None:
            return False
        function = owner.__dict__.get(self._path[1])
        # Somebody may have wrapped our wrapper: follow what functools.wraps leaves behind.
        while function is not None:
            if function is self._wrapper:
                return True
            function = getattr(function, "__wrapped__", None)
        return False

    def install(self) -> None:
        """Wrap the method; once, however often this is called.

        Raises:
            SeamError: See :meth:`verify`, or when another copy of the plugin has wrapped the method.
        """
        if self.installed():
            return
        owner = self.verify()
        method = self._path[1]
        original = inspect.getattr_static(owner, method)
        if getattr(original, _MARK, None) == self.info.target:
            raise SeamError(f"{self.info.target}: already wrapped by another copy of the plugin")
        wrapper = functools.wraps(original)(self.make(original))
        setattr(wrapper, _MARK, self.info.target)
        self._inherited = method not in owner.__dict__
        setattr(owner, method, wrapper)
        # Last, so that an error above leaves the seam as "not installed".
        self._class, self._wrapper = owner, wrapper

    def remove(self) -> None:
        """Give the class its own method back.

        Raises:
            SeamError: When somebody has wrapped the method after us: removing ours would remove theirs.
        """
        if not self.installed():
            return
        assert self._class is not None and self._wrapper is not None
        method = self._path[1]
        current = self._class.__dict__[method]
        if current is not self._wrapper:
            raise SeamError(
                f"{self.info.target}: wrapped again by {getattr(current, '__module__', '?')}; cannot be removed"
            )
        if self._inherited:
            delattr(self._class, method)
        else:
            setattr(self._class, method, self._wrapper.__wrapped__)
        self._class = self._wrapper = None
