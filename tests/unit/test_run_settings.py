"""The settings of a run: those of the settings tab (standing), changed by a preset, then by the extra options, then by
a mapping from the API. Script arguments: [True, False or the mapping; the preset's name; the extra options as text]."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lib_onediff.core.settings import OFF_IN_SETTINGS, Settings
from lib_onediff.ui.presets import AS_IN_SETTINGS, BALANCED, PRESETS, with_preset
from lib_onediff.ui.run_settings import AS_AT_FIRST, refusal_while_off, settings_of_run


@pytest.mark.parametrize("argument, standing, expected", [
    (True, Settings(), Settings()),
    (False, Settings(), Settings(enabled=False)),
    (True, Settings(enabled=False), Settings(enabled=False)),
    ({"enabled": True}, Settings(enabled=False, backend="eager"), Settings(enabled=False, backend="eager")),
    ({"enabled": False}, Settings(), Settings(enabled=False)),
    ({"backend": "eager"}, Settings(memory_budget=500), Settings(backend="eager", memory_budget=500)),
    ({}, Settings(low_bit="int8"), Settings(low_bit="int8")),
])
def test_a_client_may_send_the_first_script_argument_alone(
    argument: Any, standing: Settings, expected: Settings
) -> None:
    """Older clients of the API send True, False or a mapping, and nothing else. Some WebUIs add the values of a new
    page for the missing arguments (AS_AT_FIRST), others do not."""
    assert settings_of_run([], standing) == standing
    assert settings_of_run([argument], standing) == expected
    assert settings_of_run([argument, *AS_AT_FIRST[1:]], standing) == expected


@pytest.mark.parametrize("argument", [None, "yes", 1, [], {"speed": 9}, {"enabled": "x"}, {"backend": "warp"},
                                      {"prewarm": "512x512"}, {"memory_budget": 1}, {"fp8": True},
                                      {"deepcache_interval": 0}, {"skip_negative_after": float("nan")}])
def test_a_wrong_first_argument_is_refused_in_one_line(argument: Any) -> None:
    """It must be True, False, or a mapping of options that a run may have, with valid values."""
    with pytest.raises(ValueError, match=r"^OneDiff[^\n]*\.\Z"):
        settings_of_run([argument], Settings())


@pytest.mark.parametrize(("preset", "changes", "says"), [
    ("Fastest", "", "no preset 'Fastest'. Did you mean 'Fast'"),
    ("Balancd", "", "Did you mean 'Balanced'"),
    (["Balanced"], "", "second script argument"), (3, "", "second script argument"),
    (None, 3, "third script argument"), ("", {"low_bit": "int8"}, "third script argument"),
    (BALANCED, "speed 9", "no preset '9'"),
    ("Quality first", "", "no preset 'Quality first'"), (BALANCED, "verify off", "no option 'verify'"),
    (BALANCED, "deepcache_interval 99", "it takes 1 to 20"), (BALANCED, "memory_budget 9", "use Settings > OneDiff"),
])
def test_a_wrong_preset_or_wrong_extra_options_are_refused_in_one_line(preset: Any, changes: Any, says: str) -> None:
    """changes: the extra options. says: a part of the line."""
    with pytest.raises(ValueError, match=says) as refused:
        settings_of_run([True, preset, changes], Settings())
    assert "\n" not in str(refused.value)


def test_a_run_with_onediff_off_ignores_wrong_options() -> None:
    for preset, changes in (("Fastest", ""), (None, "nonsense 5"), (BALANCED, "deepcache_interval 99")):
        assert not settings_of_run([False, preset, changes], Settings()).enabled


def test_extra_options_override_the_preset_and_the_preset_the_settings() -> None:
    standing = Settings(deepcache_interval=9, low_bit="fp8", vae_precision="bf16", backend="eager")
    balanced = with_preset(Settings(backend="eager"), BALANCED)
    assert settings_of_run([True, BALANCED, ""], standing) == balanced
    changes = "deepcache_interval 5; low_bit int8"
    assert settings_of_run([True, BALANCED, changes], standing) == replace(
        balanced, deepcache_interval=5, low_bit="int8"
    )
    mapping = [{"deepcache_interval": 4}, BALANCED, "deepcache_interval 5"]
    assert settings_of_run(mapping, standing) == replace(balanced, deepcache_interval=4)
    for nothing in (AS_IN_SETTINGS, "", None):
        assert settings_of_run([True, nothing, nothing and ""], standing) == standing


@pytest.mark.parametrize(("arguments", "standing"), [
    ([False, BALANCED, "on"], True), ([True, BALANCED, "off"], True), ([{"enabled": False}, BALANCED, "on"], True),
    ([{"enabled": True}, BALANCED, "off"], True), ([{"enabled": True}, BALANCED, "on"], False),
], ids=str)
def test_onediff_is_off_if_any_of_argument_options_and_settings_says_so(arguments: list[Any], standing: bool) -> None:
    """argument: the first one of the run. standing: whether the settings tab has OneDiff on."""
    off = replace(with_preset(Settings(), BALANCED), enabled=False)
    assert settings_of_run(arguments, Settings(enabled=standing)) == off


@pytest.mark.parametrize(("arguments", "is_reported"), [
    ([], False), (AS_AT_FIRST, False), ([True, None, None], False), ([False, BALANCED, "low_bit fp8"], False),
    ([{"enabled": False, "low_bit": "fp8"}], False), ([{"enabled": True}], True), ([{"low_bit": "fp8"}], True),
    ([True, BALANCED], True), ([True, "", "low_bit fp8"], True), (["yes"], True), ([{"enabled": "no"}], True),
], ids=str)
def test_options_of_a_run_are_reported_as_useless_while_onediff_is_off_in_the_settings(
    arguments: Any, is_reported: bool
) -> None:
    """Wrong arguments, such as "yes", are reported in the same way. Arguments without options, and those that switch
    OneDiff off, are not reported."""
    expected = f"{OFF_IN_SETTINGS}: the options of this run have no effect." if is_reported else ""
    assert refusal_while_off(arguments) == expected


# --- presets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_its_options_and_resets_the_other_options_of_speed_and_quality(name: str) -> None:
    """Backend and graph memory are not set by presets, and keep their values."""
    before = Settings(
        backend="eager", memory_budget=7, skip_negative_after=50, deepcache_interval=9, vae_precision="bf16",
    )
    assert with_preset(before, name) == Settings(backend="eager", memory_budget=7, **PRESETS[name].values)
