"""Settings: defaults, checks, and where they come from."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pp_plugin.config import CONFIG_ENV, PluginConfig, load, parse
from vllm_pp_plugin.errors import ConfigError, PPPluginError

DEFAULTS = {
    "async_sends": "auto",
    "cpu_eager_pp": "auto",
    "max_pending_sends": 64,
    "max_retained_bytes": 512 * 1024 * 1024,
    "send_warn_s": 10.0,
    "send_deadline_s": 300.0,
    "drain_deadline_s": 10.0,
}
SWITCHES = ("async_sends", "cpu_eager_pp")
COUNTS = ("max_pending_sends", "max_retained_bytes")
SECONDS = ("send_warn_s", "send_deadline_s", "drain_deadline_s")

# Values that no setting of a kind may have, with what the message must say of them.
WRONG_SWITCHES = ["on", "true", "AUTO", "", 0, 1, 1.0, [], {}, [True]]
WRONG_COUNTS = [None, True, False, "8", "", 1.5, float("nan"), float("inf"), -float("inf"), [], {}, [8]]
SMALL_COUNTS = [0, -1, -0.0, -7.0]
WRONG_SECONDS = [None, True, False, "10", "", float("nan"), float("inf"), -float("inf"), [], {}, [1.0]]
SMALL_SECONDS = [0, 0.0, -0.0, -1, -0.5]


def as_dict(config: PluginConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


@pytest.mark.parametrize("raw", [None, {}])
def test_nothing_given_means_the_defaults(raw: dict[str, Any] | None) -> None:
    assert as_dict(parse(raw)) == DEFAULTS


def test_describe_tells_every_setting_in_order_with_its_default() -> None:
    told = PluginConfig.describe()
    assert [(name, default) for name, default, _ in told] == list(DEFAULTS.items())
    assert all(meaning.strip() for _, _, meaning in told)


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize(("given_value", "kept"), [(True, True), (False, False), ("auto", "auto"), (None, "auto")])
def test_switch(name: str, given_value: Any, kept: Any) -> None:
    config = parse({name: given_value})
    assert getattr(config, name) is kept or getattr(config, name) == kept == "auto"
    assert as_dict(config) == {**DEFAULTS, name: kept}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("given_value", "kept"), [(1, 1), (8, 8), (8.0, 8), (2**40, 2**40)])
def test_count(name: str, given_value: Any, kept: int) -> None:
    config = parse({name: given_value})
    assert type(getattr(config, name)) is int
    assert as_dict(config) == {**DEFAULTS, name: kept}


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize(("given_value", "kept"), [(1, 1.0), (0.001, 0.001), (9.5, 9.5)])
def test_seconds(name: str, given_value: Any, kept: float) -> None:
    config = parse({name: given_value})
    assert type(getattr(config, name)) is float
    assert as_dict(config) == {**DEFAULTS, name: kept}


REFUSED = [
    *[(name, value, 'allowed are true, false and "auto"') for name in SWITCHES for value in WRONG_SWITCHES],
    *[(name, value, "a whole number is needed") for name in COUNTS for value in WRONG_COUNTS],
    *[(name, value, "at least 1") for name in COUNTS for value in SMALL_COUNTS],
    *[(name, value, "a finite number of seconds is needed") for name in SECONDS for value in WRONG_SECONDS],
    *[(name, value, "more than 0 seconds") for name in SECONDS for value in SMALL_SECONDS],
]


@pytest.mark.parametrize(("name", "value", "says"), REFUSED, ids=lambda part: repr(part)[:30])
def test_a_value_that_is_not_allowed_is_named_with_what_is(name: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({name: value})
    message = str(caught.value)
    assert message.startswith(f"pp_plugin.{name} is ")
    assert says in message


def test_the_refused_value_itself_is_shown() -> None:
    with pytest.raises(ConfigError, match=r"pp_plugin\.async_sends is 'yes, please'"):
        parse({"async_sends": "yes, please"})


def test_a_config_error_is_also_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, PPPluginError)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("async_send", "async_sends"),
        ("asyncsends", "async_sends"),
        ("max_pending", "max_pending_sends"),
        ("send_deadline", "send_deadline_s"),
        ("nope", None),
        ("", None),
        (7, None),  # a mapping from Python may have keys that JSON cannot have
    ],
)
def test_an_unknown_name_lists_the_valid_ones(name: Any, suggested: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({name: True})
    message = str(caught.value)
    assert message.startswith(f"pp_plugin.{name} is unknown.")
    assert message.endswith("Valid settings: " + ", ".join(DEFAULTS))
    if suggested is None:
        assert "Did you mean" not in message
    else:
        assert f"Did you mean {suggested!r}?" in message


@pytest.mark.parametrize("raw", [False, True, 0, 1, "", "async_sends", [], ["async_sends"], 1.5])
def test_settings_that_are_no_mapping_are_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match="an object with settings is needed"):
        parse(raw)


@pytest.mark.parametrize(
    ("raw", "allowed"),
    [
        ({"send_warn_s": 300}, False),  # the default deadline
        ({"send_warn_s": 400, "send_deadline_s": 399}, False),
        ({"send_warn_s": 5, "send_deadline_s": 5}, False),
        ({"send_warn_s": 5, "send_deadline_s": 5.1}, True),
        # Who shortens the deadline alone need not know that there is a warning.
        ({"send_deadline_s": 2}, True),
    ],
)
def test_the_warning_comes_before_the_deadline(raw: dict[str, Any], allowed: bool) -> None:
    if allowed:
        assert parse(raw).send_deadline_s == raw["send_deadline_s"]
        return
    with pytest.raises(ConfigError, match=r"send_warn_s is .* send_deadline_s .* must come before"):
        parse(raw)


def test_settings_are_frozen_and_comparable() -> None:
    config = parse({"max_pending_sends": 3})
    for name in DEFAULTS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, getattr(config, name))
    assert config == parse({"max_pending_sends": 3})
    assert len({config, parse({"max_pending_sends": 3}), parse(None)}) == 2


class Opaque:
    """What vLLM also accepts as additional_config: an object of somebody's own."""


@pytest.mark.parametrize("additional", [None, {}, {"other": {"async_sends": False}}, Opaque(), [], "pp_plugin", 3])
def test_an_additional_config_without_our_key_has_no_settings(additional: Any) -> None:
    assert as_dict(load(additional, {})) == DEFAULTS


@pytest.mark.parametrize(
    ("environment", "additional", "differs"),
    [
        (None, {"pp_plugin": {"max_pending_sends": 9}}, {"max_pending_sends": 9}),
        ({"max_pending_sends": 3}, None, {"max_pending_sends": 3}),
        ({"max_pending_sends": 3}, Opaque(), {"max_pending_sends": 3}),
        ({"max_pending_sends": 3}, {"pp_plugin": None}, {"max_pending_sends": 3}),
        ({"max_pending_sends": 3}, {"pp_plugin": {}}, {"max_pending_sends": 3}),
        ({"max_pending_sends": 3}, {"pp_plugin": {"max_pending_sends": 9}}, {"max_pending_sends": 9}),
        ({"async_sends": False}, {"pp_plugin": {"async_sends": None}}, {"async_sends": "auto"}),
        # They are merged setting by setting, not one object in place of the other.
        (
            {"max_pending_sends": 3, "async_sends": False},
            {"pp_plugin": {"max_pending_sends": 9}},
            {"max_pending_sends": 9, "async_sends": False},
        ),
    ],
)
def test_additional_config_is_stronger_than_the_environment(
    environment: dict[str, Any] | None, additional: Any, differs: dict[str, Any]
) -> None:
    environ = {} if environment is None else {CONFIG_ENV: json.dumps(environment)}
    assert as_dict(load(additional, environ)) == {**DEFAULTS, **differs}


def test_the_warning_and_the_deadline_are_compared_after_merging() -> None:
    environ = {CONFIG_ENV: '{"send_warn_s": 20}'}
    assert load(None, environ).send_warn_s == 20
    with pytest.raises(ConfigError, match="must come before"):
        load({"pp_plugin": {"send_deadline_s": 15}}, environ)


@pytest.mark.parametrize("blank", ["", "  ", "\n\t"])
def test_a_blank_environment_variable_is_none(blank: str) -> None:
    assert as_dict(load(None, {CONFIG_ENV: blank})) == DEFAULTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", f"{CONFIG_ENV} is not JSON"),
        ("async_sends=false", f"{CONFIG_ENV} is not JSON"),
        ("{'async_sends': false}", f"{CONFIG_ENV} is not JSON"),
        ("null", f"{CONFIG_ENV} must hold a JSON object"),
        ("[]", f"{CONFIG_ENV} must hold a JSON object"),
        ("true", f"{CONFIG_ENV} must hold a JSON object"),
        ('"auto"', f"{CONFIG_ENV} must hold a JSON object"),
        ('{"nope": 1}', "pp_plugin.nope is unknown"),
        ('{"max_pending_sends": 0}', "pp_plugin.max_pending_sends is 0"),
        ('{"send_warn_s": NaN}', "pp_plugin.send_warn_s is nan"),
    ],
)
def test_a_wrong_environment_variable_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {CONFIG_ENV: text})
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("own", [False, 0, "", [], "async_sends", True])
def test_our_key_with_something_else_than_a_mapping_is_refused(own: Any) -> None:
    with pytest.raises(ConfigError, match="an object with settings is needed"):
        load({"pp_plugin": own}, {})


def test_the_environment_is_this_process_s_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_ENV, '{"drain_deadline_s": 2}')
    assert load().drain_deadline_s == 2.0
    monkeypatch.delenv(CONFIG_ENV)
    assert load() == PluginConfig()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto")
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)  # a busy machine is no error
@given(name=st.sampled_from(list(DEFAULTS)), value=JSON)
def test_any_json_value_is_a_valid_setting_or_an_error_that_names_it(name: str, value: Any) -> None:
    try:
        config = parse({name: value})
    except ConfigError as exc:
        assert f"pp_plugin.{name}" in str(exc)
        return
    kept = getattr(config, name)
    if name in SWITCHES:
        assert kept in (True, False, "auto")
    elif name in COUNTS:
        assert type(kept) is int and kept >= 1 and kept == value
    else:
        assert type(kept) is float and 0 < kept < float("inf")
    assert as_dict(config) == {**DEFAULTS, name: kept}


@settings(deadline=None)  # a busy machine is no error
@given(text=st.text(max_size=20) | JSON.map(json.dumps))
def test_any_text_in_the_environment_is_valid_or_a_config_error(text: str) -> None:
    try:
        config = load(None, {CONFIG_ENV: text})
    except ConfigError as exc:
        assert CONFIG_ENV in str(exc) or "pp_plugin." in str(exc)
        return
    assert isinstance(config, PluginConfig)
