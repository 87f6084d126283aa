"""A run's settings: the settings tab's, then a preset, then changes, then what a mapping from the API says."""
from __future__ import annotations

from typing import Any

import pytest

from lib_onediff.options.presets import AS_IN_SETTINGS, BALANCED, EXACT
from lib_onediff.options.settings import OFF_IN_SETTINGS, Settings
from lib_onediff.ui.run_settings import AS_AT_FIRST, refusal_while_off, settings_of_run


@pytest.mark.parametrize("argument, standing, expected", [
    (True, Settings(), Settings()),
    (False, Settings(), Settings(enabled=False)),
    (True, Settings(enabled=False), Settings(enabled=False)),
    ({"enabled": True}, Settings(enabled=False, backend="eager"), Settings(enabled=False, backend="eager")),
    ({"enabled": False}, Settings(), Settings(enabled=False)),
    ({"backend": "eager"}, Settings(memory_budget=500), Settings(backend="eager", memory_budget=500)),
    ({}, Settings(verify=False), Settings(verify=False)),
])
def test_clients_that_know_one_argument(argument: Any, standing: Settings, expected: Settings) -> None:
    """Their WebUI fills in the others, or it does not."""
    assert settings_of_run([argument], standing) == expected
    assert settings_of_run([argument, *AS_AT_FIRST[1:]], standing) == expected


def test_without_arguments() -> None:
    assert settings_of_run([], Settings(tf32="on")) == Settings(tf32="on")


@pytest.mark.parametrize("argument", [None, "yes", 1, [], {"speed": 9}, {"enabled": "x"}, {"backend": "warp"},
                                      {"cache_folder": "/tmp"}, {"prewarm": "512x512"}, {"memory_budget": 1},
                                      {"deepcache_interval": 0}, {"deepcache_start": float("nan")}])
def test_wrong_first_arguments(argument: Any) -> None:
    with pytest.raises(ValueError, match="OneDiff"):
        settings_of_run([argument], Settings())


@pytest.mark.parametrize(("preset", "changes", "says"), [
    ("Warp", "", "no preset 'Warp'. Choose from Exact, Balanced, Fast, Draft"),
    ("balanced", "", "Did you mean 'Balanced'"),
    (["Balanced"], "", "second script argument"), (3, "", "second script argument"),
    (None, 3, "third script argument"), ("", {"tf32": "on"}, "third script argument"),
    (BALANCED, "speed 9", "no option 'speed'"), (BALANCED, "tf32 maybe", "it takes auto, on, off"),
    (BALANCED, "deepcache_interval 99", "it takes 1 to 20"), (BALANCED, "memory_budget 9", "no option"),
])
def test_other_wrong_arguments(preset: Any, changes: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings_of_run([True, preset, changes], Settings())


def test_the_order_in_which_they_count() -> None:
    standing = Settings(deepcache_interval=9, tf32="on", vae_precision="bf16", backend="eager")
    assert settings_of_run([True, BALANCED, ""], standing) == Settings(
        deepcache_interval=3, deepcache_depth=3, backend="eager",
    )
    assert settings_of_run([True, BALANCED, "deepcache_depth 2; verify off"], standing) == Settings(
        deepcache_interval=3, deepcache_depth=2, backend="eager", verify=False,
    )
    mapping = [{"deepcache_interval": 4}, BALANCED, "deepcache_interval 3; tf32 off"]
    assert settings_of_run(mapping, standing) == Settings(
        deepcache_interval=4, deepcache_depth=3, backend="eager", tf32="off",
    )
    for nothing in (AS_IN_SETTINGS, "", None):
        assert settings_of_run([True, nothing, nothing and ""], standing) == standing


@pytest.mark.parametrize("arguments", [
    [False, BALANCED, "on"], [True, BALANCED, "off"], [{"enabled": False}, BALANCED, "on"],
    [{"enabled": True}, BALANCED, "off"],
], ids=str)
def test_off_at_one_place_is_off(arguments: list[Any]) -> None:
    assert settings_of_run(arguments, Settings()) == Settings(
        enabled=False, deepcache_interval=3, deepcache_depth=3,
    )


def test_nothing_switches_on_what_the_settings_tab_has_off() -> None:
    assert not settings_of_run([{"enabled": True}, EXACT, "on"], Settings(enabled=False)).enabled


@pytest.mark.parametrize(("arguments", "told"), [
    ([], False), (AS_AT_FIRST, False), ([True, None, None], False), ([False, BALANCED, "tf32 on"], False),
    ([{"enabled": False, "tf32": "on"}], False), ([{"enabled": True}], True), ([{"tf32": "on"}], True),
    ([True, BALANCED], True), ([True, "", "tf32 on"], True), (["yes"], True), ([{"enabled": "no"}], True),
], ids=str)
def test_what_a_run_asks_for_while_onediff_is_off_in_the_settings(arguments: Any, told: bool) -> None:
    expected = f"{OFF_IN_SETTINGS}: the options of this run have no effect." if told else ""
    assert refusal_while_off(arguments) == expected


def test_the_sentence_names_the_option_as_the_settings_tab_does() -> None:
    label = Settings.__dataclass_fields__["enabled"].metadata["label"]
    assert f"Settings > OneDiff > {label})" in OFF_IN_SETTINGS
