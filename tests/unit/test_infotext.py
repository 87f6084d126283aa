"""What a picture's infotext says of OneDiff, round trip, also through the hosts' own infotext code."""
from __future__ import annotations

import re
from itertools import combinations, product
from typing import Any

import pytest

from lib_onediff import infotext
from lib_onediff.hosts.standalone.modules import infotext_utils
from lib_onediff.settings import Settings


def every_setting() -> list[Settings]:
    """Every pair of values that two options of a run can have, the others at their defaults."""
    others = {
        bool: lambda default: not default, int: lambda default: default + 2, float: lambda default: default / 2 + 0.5,
    }
    values = {
        name: option.metadata["choices"] or (option.default, others[type(option.default)](option.default))
        for name, option in infotext.options_of_a_run().items()
    }
    return [
        Settings(**dict(zip(names, chosen, strict=True)))
        for names in combinations(values, 2) for chosen in product(*(values[name] for name in names))
    ]


def test_form() -> None:
    assert infotext.describe(Settings()) == "on"
    assert infotext.describe(Settings(enabled=False)) == "off"
    assert infotext.describe(Settings(backend="eager", verify=False)) == "on; backend eager; verify off"


def test_what_holds_for_the_whole_webui_is_not_told() -> None:
    assert infotext.describe(Settings(memory_budget=512, prewarm="512x512", cache_folder="/home/me")) == "on"
    assert "cache_folder" not in infotext.options_of_a_run()


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
    settings = Settings(enabled=switched_on, backend="eager", verify=False)
    written = {"Steps": 20, "Sampler": "Euler a", "Size": "64x64", infotext.KEY: infotext.describe(settings)}
    line = ", ".join(f"{name}: {infotext_utils.quote(value)}" for name, value in written.items())
    read = infotext_utils.parse_generation_parameters(f"a fox: on, a hill\nNegative prompt: rain\n{line}")
    assert Settings.from_mapping(infotext.parse(read[infotext.KEY])) == settings
    assert infotext.pasted_switch(read) is switched_on


@pytest.mark.parametrize("text, expected", [
    ("", {}),
    ("maybe", {}),
    ("True", {}),
    ("on", {"enabled": True}),
    (" off ", {"enabled": False}),
    ("on; backend warp", {"enabled": True}),
    ("on; verify maybe; backend eager", {"enabled": True, "backend": "eager"}),
    ("on; speed 9; verify off", {"enabled": True, "verify": False}),
    ("on; cache_folder /tmp; memory_budget 9", {"enabled": True}),
    ("on; enabled off", {"enabled": True}),
    ("on;;; ;backend", {"enabled": True}),
    ("on\x00; verify off", {}),
])
def test_what_others_have_written(text: str, expected: dict[str, Any]) -> None:
    assert infotext.parse(text) == expected
    Settings.from_mapping(infotext.parse(text))


def test_pasting_something_else_leaves_the_checkbox_alone() -> None:
    for parameters in ({}, {"Steps": "20"}, {"OneDiff": "maybe"}, {"OneDiff": ""}):
        assert infotext.pasted_switch(parameters) is None


def test_paste_fields() -> None:
    checkbox = object()
    ((component, function),) = infotext.paste_fields(checkbox)
    assert component is checkbox and function({"OneDiff": "off; verify off"}) is False


def pasted(text: str, checked: bool) -> list[Any]:
    """What the standalone host's button puts into prompt, width, sampler and the accordion's checkbox."""
    gradio = pytest.importorskip("gradio")
    with gradio.Blocks() as page:
        prompt, width = gradio.Textbox(), gradio.Slider(64, 2048, value=512)
        sampler, enabled = gradio.Dropdown(["Euler", "Heun"], value="Euler"), gradio.Checkbox(checked)
        fields = [(prompt, "Prompt"), (width, "Size-1"), (sampler, "Sampler"), *infotext.paste_fields(enabled)]
        infotext_utils.connect_paste(gradio.Button("Read infotext"), fields, prompt)
    functions = page.fns.values() if isinstance(page.fns, dict) else page.fns
    (paste,) = (function.fn for function in functions)
    return [update.get("value", "unchanged") for update in paste(text)]


@pytest.mark.parametrize("text, expected", [
    ("a fox\nSteps: 3, Sampler: Heun, Size: 64x72, OneDiff: off; verify off", ["a fox", 64.0, "Heun", False]),
    ("a fox\nSteps: 3, Sampler: Heun, Size: 64x72, OneDiff: on", ["a fox", 64.0, "Heun", True]),
    ("a fox\nSteps: 3, Sampler: Heun, Size: 64x72", ["a fox", 64.0, "Heun", "unchanged"]),
    ("a fox\nSteps: 3, Sampler: Heun, Size-1: wide, OneDiff: maybe", ["a fox", "unchanged", "Heun", "unchanged"]),
    ("a fox", ["a fox", *["unchanged"] * 3]),
    ("", ["", *["unchanged"] * 3]),
])
@pytest.mark.parametrize("checked", [True, False])
def test_pasting_on_the_standalone_hosts_page(text: str, expected: list[Any], checked: bool) -> None:
    assert pasted(text, checked) == expected
