"""One seam, on made-up modules: what is verified, and that the class looks as before once it is removed."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from vllm_pp_plugin.errors import SeamError
from vllm_pp_plugin.seams.seam import Seam, SeamInfo

MODULE = "made_up_engine"
TARGET = f"{MODULE}:Engine.run"


class Calls(list[str]):
    """What was called, in order."""


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> types.ModuleType:
    """A module with ``class Engine`` and its method ``run(self, what, times=1)``; ``Quick`` inherits it."""
    made = types.ModuleType(MODULE)

    class Engine:
        def run(self, what: str, times: int = 1) -> str:
            """Runs."""
            calls.append("original")
            return what * times

    class Quick(Engine):
        pass

    made.Engine, made.Quick, made.helper = Engine, Quick, len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def make_seam(
    calls: Calls,
    target: str = TARGET,
    parameters: tuple[str, ...] = ("self", "what", "times"),
    name: str = "wrapper",
    **options: Any,
) -> Seam:
    """A seam whose wrapper leaves a trace in ``calls`` and passes everything on."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(self, *args, **kwargs)

        return run

    return Seam(SeamInfo(target, "feature", "why", "how", "1", "never"), parameters, make, **options)


def traced(thing: Any, calls: Calls) -> list[str]:
    """What a call of ``thing.run`` passes through."""
    calls.clear()
    assert thing.run("a", times=2) == "aa"
    return list(calls)


def test_verify_returns_the_class_and_changes_nothing(module: types.ModuleType, calls: Calls) -> None:
    before = dict(vars(module.Engine))
    seam = make_seam(calls, needs=(f"{MODULE}:helper", f"{MODULE}:Engine.run"))
    assert seam.verify() is module.Engine
    assert dict(vars(module.Engine)) == before
    assert not seam.installed()


class Odd:
    """Attributes that look like methods and are none."""

    @staticmethod
    def static(what: str, times: int) -> None: ...

    @classmethod
    def klass(cls, what: str, times: int) -> None: ...

    @property
    def prop(self) -> None: ...

    data = 3
    builtin = len


MISFITS = [
    ("a_module_that_is_not_there:Engine.run", {}, "cannot import a_module_that_is_not_there"),
    (f"{MODULE}:Motor.run", {}, f"{MODULE} has no class Motor"),
    (f"{MODULE}:helper.run", {}, f"{MODULE} has no class helper"),
    (f"{MODULE}:Engine.walk", {}, "Engine has no method walk"),
    (f"{MODULE}:Odd.static", {}, "a plain method was expected, found staticmethod"),
    (f"{MODULE}:Odd.klass", {}, "a plain method was expected, found classmethod"),
    (f"{MODULE}:Odd.prop", {}, "a plain method was expected, found property"),
    (f"{MODULE}:Odd.data", {}, "a plain method was expected, found int"),
    (f"{MODULE}:Odd.builtin", {}, "a plain method was expected, found builtin_function_or_method"),
    (TARGET, {"parameters": ("self", "whom")}, "its parameters are (self, what, times), expected (self, whom)"),
    (TARGET, {"parameters": ("self", "times", "what")}, "expected (self, times, what)"),
    (TARGET, {"parameters": ("self", "what", "times", "more")}, "expected (self, what, times, more)"),
    (TARGET, {"parameters": ("self", "what"), "exact": True}, "expected (self, what)"),
    (TARGET, {"needs": (f"{MODULE}:tool",)}, f"{MODULE}:tool is missing, which the wrapper uses"),
    (TARGET, {"needs": (f"{MODULE}:helper", f"{MODULE}:Engine.stop")}, f"{MODULE}:Engine.stop is missing"),
    (TARGET, {"needs": (f"{MODULE}:Motor.stop",)}, f"{MODULE}:Motor.stop is missing"),
]


@pytest.mark.parametrize(("target", "options", "says"), MISFITS, ids=lambda part: str(part)[:40])
@pytest.mark.parametrize("action", ["verify", "install"])
def test_what_does_not_fit_is_said_and_nothing_is_touched(
    module: types.ModuleType, calls: Calls, target: str, options: dict[str, Any], says: str, action: str
) -> None:
    module.Odd = Odd  # type: ignore[attr-defined]
    before = [dict(vars(owner)) for owner in (module.Engine, module.Quick, Odd)]
    seam = make_seam(calls, target, **options)
    with pytest.raises(SeamError) as caught:
        getattr(seam, action)()
    assert str(caught.value).startswith(f"{target}: ")
    assert says in str(caught.value)
    assert not seam.installed()
    assert [dict(vars(owner)) for owner in (module.Engine, module.Quick, Odd)] == before


@pytest.mark.parametrize(
    ("parameters", "exact"),
    [
        (("self",), False),
        (("self", "what"), False),
        (("self", "what", "times"), False),
        (("self", "what", "times"), True),
    ],
)
@pytest.mark.usefixtures("module")
def test_a_method_may_have_more_parameters_unless_it_is_replaced(
    calls: Calls, parameters: tuple[str, ...], exact: bool
) -> None:
    make_seam(calls, parameters=parameters, exact=exact).verify()


def test_module_loaded_tells_and_does_not_import(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    seam = make_seam(calls, "colorsys:Engine.run")
    assert not seam.module_loaded()
    assert "colorsys" not in sys.modules
    monkeypatch.setitem(sys.modules, "colorsys", types.ModuleType("colorsys"))
    assert seam.module_loaded()


def test_install_goes_through_the_wrapper_once_and_keeps_the_method_s_looks(
    module: types.ModuleType, calls: Calls
) -> None:
    original = module.Engine.run
    seam = make_seam(calls)
    seam.install()
    assert seam.installed()
    assert traced(module.Engine(), calls) == ["wrapper", "original"]
    assert traced(module.Quick(), calls) == ["wrapper", "original"]
    wrapped = module.Engine.run
    assert (wrapped.__name__, wrapped.__doc__) == (original.__name__, "Runs.")
    seam.install()
    seam.install()
    assert module.Engine.run is wrapped
    assert traced(module.Engine(), calls) == ["wrapper", "original"]
    # What it is now still is what was verified: the plugin may look again.
    assert seam.verify() is module.Engine


def test_remove_gives_the_identical_function_back(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]
    seam = make_seam(calls)
    for _ in range(2):
        seam.install()
        assert vars(module.Engine)["run"] is not original
        seam.remove()
        assert vars(module.Engine)["run"] is original
        assert not seam.installed()
    seam.remove()
    assert vars(module.Engine)["run"] is original
    assert traced(module.Engine(), calls) == ["original"]


def test_an_inherited_method_is_wrapped_on_the_named_class_only(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]
    seam = make_seam(calls, f"{MODULE}:Quick.run")
    seam.install()
    assert seam.installed()
    assert traced(module.Quick(), calls) == ["wrapper", "original"]
    assert traced(module.Engine(), calls) == ["original"]
    seam.remove()
    # Gone, and not the base's function put into the subclass: later changes of the base must be seen.
    assert "run" not in vars(module.Quick)
    assert module.Quick.run is original
    assert not seam.installed()


def test_seams_on_a_class_and_on_its_subclass_do_not_meet(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]
    base = make_seam(calls, name="base")
    sub = make_seam(calls, f"{MODULE}:Quick.run", name="sub")
    base.install()
    sub.install()
    assert traced(module.Quick(), calls) == ["sub", "base", "original"]
    assert traced(module.Engine(), calls) == ["base", "original"]
    sub.remove()
    base.remove()
    assert vars(module.Engine)["run"] is original
    assert "run" not in vars(module.Quick)


def test_the_owner_known_at_run_time_is_wrapped(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]

    class Vendor(module.Engine):  # type: ignore[name-defined,misc]
        def run(self, what: str, times: int = 1) -> str:
            calls.append("vendor")
            return what * times

    seam = make_seam(calls, f"{MODULE}:Vendor.run", owner=Vendor)
    assert seam.verify() is Vendor
    seam.install()
    assert traced(Vendor(), calls) == ["wrapper", "vendor"]
    assert vars(module.Engine)["run"] is original


@pytest.mark.parametrize("leaves_wrapped", [True, False], ids=["functools.wraps", "bare"])
def test_a_wrapper_of_somebody_else_around_ours(module: types.ModuleType, calls: Calls, leaves_wrapped: bool) -> None:
    seam = make_seam(calls)
    seam.install()
    ours = vars(module.Engine)["run"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return ours(self, *args, **kwargs)

    module.Engine.run = functools.wraps(ours)(theirs) if leaves_wrapped else theirs
    current = vars(module.Engine)["run"]
    if leaves_wrapped:
        assert seam.installed()
        with pytest.raises(SeamError, match="wrapped again by .*cannot be removed"):
            seam.remove()
        seam.install()  # it is there already
        assert seam.installed()
        assert traced(module.Engine(), calls) == ["theirs", "wrapper", "original"]
    else:
        # Nothing tells that ours is inside, so it counts as gone; theirs must not be taken away.
        assert not seam.installed()
        seam.remove()
    assert vars(module.Engine)["run"] is current


def test_once_theirs_is_gone_ours_can_be_removed(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]
    seam = make_seam(calls)
    seam.install()
    ours = vars(module.Engine)["run"]
    module.Engine.run = functools.wraps(ours)(lambda self, *args, **kwargs: ours(self, *args, **kwargs))
    with pytest.raises(SeamError):
        seam.remove()
    module.Engine.run = ours
    seam.remove()
    assert vars(module.Engine)["run"] is original


def test_installed_is_read_from_the_class(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]
    seam = make_seam(calls)
    seam.install()
    module.Engine.run = original  # somebody has put the original back behind our back
    assert not seam.installed()
    seam.remove()
    assert vars(module.Engine)["run"] is original
    seam.install()
    assert traced(module.Engine(), calls) == ["wrapper", "original"]


def test_a_second_copy_of_the_plugin_does_not_wrap_again(module: types.ModuleType, calls: Calls) -> None:
    original = vars(module.Engine)["run"]
    first, second = make_seam(calls, name="first"), make_seam(calls, name="second")
    first.install()
    with pytest.raises(SeamError, match="already wrapped by another copy of the plugin"):
        second.install()
    assert not second.installed()
    second.remove()  # nothing of its own is there
    assert traced(module.Engine(), calls) == ["first", "original"]
    first.remove()
    assert vars(module.Engine)["run"] is original
    second.install()
    assert traced(module.Engine(), calls) == ["second", "original"]


@pytest.mark.usefixtures("module")
def test_a_wrapper_that_cannot_be_made_leaves_the_seam_as_it_was(calls: Calls) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        raise LookupError("no such thing")

    seam = make_seam(calls)
    seam.make = make
    original = vars(sys.modules[MODULE].Engine)["run"]
    with pytest.raises(LookupError):
        seam.install()
    assert not seam.installed()
    assert vars(sys.modules[MODULE].Engine)["run"] is original
