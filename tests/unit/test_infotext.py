"""What an image's infotext says of OneDiff, round trip, also through the hosts' own infotext code."""
from __future__ import annotations

import re
from itertools import combinations, product
from typing import Any

import pytest

from lib_onediff.demo.modules import infotext_utils
from lib_onediff.options import infotext
from lib_onediff.options.presets import AS_IN_SETTINGS, FAST, with_preset
from lib_onediff.options.settings import Settings
from lib_onediff.ui.run_settings import settings_of_run


def every_setting() -> list[Settings]:
    """Every pair of values that two options of a run can have, the others at their defaults."""
    def other(option: Any) -> Any:
        if isinstance(option.default, float):
            least, most = option.metadata["bounds"]
            return (least + most) / 2
        return not option.default if isinstance(option.default, bool) else option.default + 2

    values = {
        name: option.metadata["choices"] or (option.default, other(option))
        for name, option in infotext.options_of_a_run().items()
    }
    return [
        Settings(**dict(zip(names, chosen, strict=True)))
        for names in combinations(values, 2) for chosen in product(*(values[name] for name in names))
    ]


def test_form() -> None:
    assert infotext.describe(Settings()) == "on"
    assert infotext.describe(Settings(enabled=False)) == "off"
    assert infotext.describe(Settings(backend="eager", low_bit_only=True)) == "on; backend eager; low_bit_only on"


def test_what_holds_for_the_whole_webui_is_not_told() -> None:
    assert infotext.describe(Settings(memory_budget=512, prewarm="512x512")) == "on"
    assert "memory_budget" not in infotext.options_of_a_run()


def test_round_trip() -> None:
    for settings in every_setting():
        assert Settings.from_mapping(infotext.parse(infotext.describe(settings))) == settings


def test_hosts_need_not_quote_it() -> None:
    for settings in every_setting():
        text = infotext.describe(settings)
        assert infotext_utils.quote(text) == text
        assert not re.search(r'[,:\n"]', text)


@pytest.mark.parametrize("switched_on", [True, False])
def test_round_trip_through_the_standalone_hosts_infotext(switched_on: bool) -> None:
    settings = Settings(enabled=switched_on, backend="eager", low_bit_only=True)
    written = {"Steps": 20, "Sampler": "Euler a", "Size": "64x64", infotext.KEY: infotext.describe(settings)}
    line = ", ".join(f"{name}: {infotext_utils.quote(value)}" for name, value in written.items())
    read = infotext_utils.parse_generation_parameters(f"a fox: on, a hill\nNegative prompt: rain\n{line}")
    assert Settings.from_mapping(infotext.parse(read[infotext.KEY])) == settings
    assert pasting().switch(read) is switched_on


@pytest.mark.parametrize("text, expected", [
    ("", {}),
    ("maybe", {}),
    ("True", {}),
    ("on", {"enabled": True}),
    (" off ", {"enabled": False}),
    ("on; backend warp", {"enabled": True}),
    ("on; low_bit_only maybe; backend eager", {"enabled": True, "backend": "eager"}),
    ("on; speed 9; low_bit_only on", {"enabled": True, "low_bit_only": True}),
    ("on; cache_folder /tmp; memory_budget 9", {"enabled": True}),
    ("on; enabled off", {"enabled": True}),
    ("on;;; ;backend", {"enabled": True}),
    ("on\x00; low_bit_only on", {}),
    ("on; forecast_interval x; prewarm_most_used y", {"enabled": True, "deepcache_depth": 0}),
])
def test_what_others_have_written(text: str, expected: dict[str, Any]) -> None:
    assert infotext.parse(text) == expected
    Settings.from_mapping(infotext.parse(text))


def pasting(standing: Settings | None = None) -> infotext.Pasting:
    return infotext.Pasting(lambda: standing or Settings())


def read_by_the_accordion(text: str, standing: Settings) -> list[Any]:
    """What pasting puts into the accordion."""
    found, parameters = pasting(standing), {infotext.KEY: text}
    return [found.switch(parameters), found.preset(parameters), found.changes(parameters)]


def per_run(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in infotext.options_of_a_run()}


TABS = [
    Settings(), Settings(backend="eager", deepcache_interval=5, low_bit_only=True), Settings(guidance_end=0.55),
    with_preset(Settings(), FAST),
]


@pytest.mark.parametrize("standing", TABS, ids=infotext.describe)
def test_a_run_has_exactly_the_settings_of_the_infotext_that_was_pasted(standing: Settings) -> None:
    for settings in every_setting():
        run = settings_of_run(read_by_the_accordion(infotext.describe(settings), standing), standing)
        assert per_run(run) == per_run(settings)


@pytest.mark.parametrize("pasted", [Settings(), Settings(enabled=False), Settings(deepcache_interval=2, low_bit="fp8")])
def test_what_is_pasted_holds_no_option_but_those_that_it_writes_down(pasted: Settings) -> None:
    """Whatever else is set later counts, and the accordion shows what does not."""
    arguments = read_by_the_accordion(infotext.describe(pasted), Settings())
    later = Settings(backend="eager", low_bit="int8", guidance_end=0.5, deepcache_interval=5)
    run = settings_of_run(arguments, later)
    written = pasted.changed_from(Settings())
    assert arguments[1] == AS_IN_SETTINGS and all(name in arguments[2] for name in written if name != "enabled")
    assert per_run(run) == per_run(later) | written
    assert not settings_of_run(arguments, Settings(enabled=False)).enabled


@pytest.mark.parametrize(("text", "standing", "arguments"), [
    ("on", Settings(), [True, AS_IN_SETTINGS, ""]),
    ("off", Settings(), [False, AS_IN_SETTINGS, ""]),
    ("on", Settings(deepcache_interval=3), [True, AS_IN_SETTINGS, "deepcache_interval 1"]),
    ("on; deepcache_interval 2", Settings(backend="eager"),
     [True, AS_IN_SETTINGS, "deepcache_interval 2; backend auto"]),
    ("on; from_the_future 3; low_bit fp8", Settings(), [True, AS_IN_SETTINGS, "low_bit fp8"]),
    ("on; deepcache_interval 4; deepcache_hires own values; tf32 on; verify off; deepcache_start 0.2", Settings(),
     [True, AS_IN_SETTINGS, "deepcache_interval 4"]),
    ("on; forecast_interval 3", Settings(), [True, AS_IN_SETTINGS, "deepcache_interval 3; deepcache_depth 0"]),
    ("on; backend inductor", Settings(backend="eager"), [True, AS_IN_SETTINGS, "backend auto"]),
    ("on; fp8 on", Settings(), [True, AS_IN_SETTINGS, "low_bit fp8"]),
    ("on; fp8 off", Settings(low_bit="int8"), [True, AS_IN_SETTINGS, "low_bit off"]),
    ("on; deepcache_interval 99", Settings(), [True, AS_IN_SETTINGS, ""]),
])
def test_what_pasting_shows(text: str, standing: Settings, arguments: list[Any]) -> None:
    assert read_by_the_accordion(text, standing) == arguments


def test_pasting_something_else_leaves_the_accordion_alone() -> None:
    for parameters in ({}, {"Steps": "20"}, {"OneDiff": "maybe"}, {"OneDiff": ""}):
        found = pasting(Settings(deepcache_interval=3))
        assert [found.switch(parameters), found.preset(parameters), found.changes(parameters)] == [None] * 3


def test_paste_fields_are_the_same_in_both_tabs() -> None:
    """Hosts hand components on from tab to tab whose infotext field is among a script's paste_field_names."""
    found = pasting()
    one, other = (found.fields(*components) for components in ("abc", "xyz"))
    assert [component for component, _ in one] == ["a", "b", "c"]
    names = [target for _, target in one]
    assert all(target in names for _, target in other) and len(set(names)) == 3


def pasted(text: str, checked: bool, standing: Settings) -> list[Any]:
    """What the standalone host's button puts into prompt, width, sampler and the accordion."""
    gradio = pytest.importorskip("gradio")
    with gradio.Blocks() as page:
        prompt, width = gradio.Textbox(), gradio.Slider(64, 2048, value=512)
        sampler, enabled = gradio.Dropdown(["Euler", "Heun"], value="Euler"), gradio.Checkbox(checked)
        accordion = enabled, gradio.Dropdown([AS_IN_SETTINGS], value=AS_IN_SETTINGS), gradio.Textbox("")
        fields = [(prompt, "Prompt"), (width, "Size-1"), (sampler, "Sampler"), *pasting(standing).fields(*accordion)]
        infotext_utils.connect_paste(gradio.Button("Read infotext"), fields, prompt)
    functions = page.fns.values() if isinstance(page.fns, dict) else page.fns
    (paste,) = (function.fn for function in functions)
    return [update.get("value", "unchanged") for update in paste(text)]


@pytest.mark.parametrize("text, expected", [
    ("a fox\nSteps: 3, Sampler: Heun, Size: 64x72, OneDiff: off; low_bit_only on",
     ["a fox", 64.0, "Heun", False, AS_IN_SETTINGS, "low_bit off; low_bit_only on"]),
    ("a fox\nSteps: 3, Sampler: Heun, OneDiff: on; deepcache_interval 3; deepcache_hires off, Size: 64x72",
     ["a fox", 64.0, "Heun", True, AS_IN_SETTINGS, "deepcache_interval 3; low_bit off"]),
    ("a fox\nSteps: 3, Sampler: Heun, Size: 64x72", ["a fox", 64.0, "Heun", *["unchanged"] * 3]),
    ("a fox\nSteps: 3, Sampler: Heun, Size-1: wide, OneDiff: maybe",
     ["a fox", "unchanged", "Heun", *["unchanged"] * 3]),
    ("a fox", ["a fox", *["unchanged"] * 5]),
    ("", ["", *["unchanged"] * 5]),
])
@pytest.mark.parametrize("checked", [True, False])
def test_pasting_on_the_standalone_hosts_page(text: str, expected: list[Any], checked: bool) -> None:
    assert pasted(text, checked, Settings(low_bit="int8")) == expected
