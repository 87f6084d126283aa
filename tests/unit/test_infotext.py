"""OneDiff's field of an image's infotext: how it is written, read, and pasted into the accordion."""
from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, product
from typing import Any

import pytest

from lib_onediff.core.settings import DEEPCACHE_OPTIONS, TRANSFORMER_OPTIONS, Settings, options_of_a_run
from lib_onediff.demo.modules import processing
from lib_onediff.ui import infotext
from lib_onediff.ui.presets import AS_IN_SETTINGS, BALANCED, DRAFT, EXACT, FAST, PRESETS, with_preset
from lib_onediff.ui.run_settings import settings_of_run


def every_setting() -> list[Settings]:
    """Settings for every pair of values of two options of a run, with the others at their defaults."""
    def other(option: Any) -> Any:
        if isinstance(option.default, float):
            least, most = option.metadata["bounds"]
            return (least + most) / 2
        return not option.default if isinstance(option.default, bool) else option.default + 2

    values = {
        name: option.metadata["choices"] or (option.default, other(option))
        for name, option in options_of_a_run().items()
    }
    return [
        Settings(**dict(zip(names, chosen, strict=True)))
        for names in combinations(values, 2) for chosen in product(*(values[name] for name in names))
    ]


def test_infotext_needs_no_quotes() -> None:
    """A1111 writes an infotext as "name: value, name: value", and quotes a value with a comma, a colon, a quote or a
    line break. No pair of option values leads to one."""
    for settings in every_setting():
        text = infotext.describe(settings)
        assert processing.quote(text) == text
        assert not re.search(r'[,:\n"]', text)


@pytest.mark.parametrize("text, expected", [
    ("", {}),
    ("maybe", {}), (infotext.NOT_SERVED, {}), (infotext.VAE_ALONE, {}),
    ("True", {}),
    ("on", {"enabled": True}),
    (" off ", {"enabled": False}),
    ("on; backend warp", {"enabled": True}),
    ("on; low_bit_only maybe; backend eager", {"enabled": True, "backend": "eager"}),
    ("on; speed 9; low_bit_only on", {"enabled": True, "low_bit_only": True}),
    ("on; cache_folder /tmp; memory_budget 9", {"enabled": True}),
    ("on;;; ;backend", {"enabled": True}),
    ("on\x00; low_bit_only on", {}),
])
def test_parse_keeps_the_valid_settings_of_texts_by_other_versions_and_users(
    text: str, expected: dict[str, Any]
) -> None:
    """Unknown options, invalid values and options that are not of a single run (cache_folder) are dropped. A text that
    does not begin with on or off gives nothing."""
    assert infotext.parse(text) == expected
    Settings.from_mapping(infotext.parse(text))


def read_by_the_accordion(
    parameters: dict[str, str], standing: Settings, tell: Callable[[str], object] = lambda problem: None,
) -> list[Any]:
    """The values that pasting an infotext puts into the accordion."""
    return [fill(parameters) for fill in infotext.paste_functions(lambda: standing, tell)]


def per_run(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in options_of_a_run()}


TABS = [
    Settings(), Settings(backend="eager", deepcache_interval=5, low_bit_only=True), Settings(skip_negative_after=55),
    with_preset(Settings(), FAST),
]


@pytest.mark.parametrize("standing", TABS, ids=infotext.describe)
def test_a_run_has_exactly_the_settings_of_the_infotext_that_was_pasted(standing: Settings) -> None:
    """standing: the options in the settings tab, which the accordion's values override."""
    for settings in every_setting():
        run = settings_of_run(read_by_the_accordion({infotext.KEY: infotext.describe(settings)}, standing), standing)
        assert per_run(run) == per_run(settings)


@pytest.mark.parametrize(("options", "is_transformer", "text"), [
    ({"deepcache_interval": 3, "transformer_interval": 3}, False, "on; deepcache_interval 3"),
    ({"deepcache_interval": 3, "transformer_interval": 3}, True, "on; transformer_interval 3"),
    ({"deepcache_interval": 4, "deepcache_depth": 2}, True, "on; deepcache_interval 4; deepcache_depth 2"),
    (PRESETS[BALANCED].values, False, "on; speed Balanced"), (PRESETS[BALANCED].values, True, "on; speed Balanced"),
    ({**PRESETS[DRAFT].values, "transformer_interval": 5}, False, "on; speed Draft"),
    ({**PRESETS[DRAFT].values, "transformer_interval": 5}, True, "on; speed Draft; transformer_interval 5"),
], ids=str)
def test_an_option_without_effect_on_the_images_model_is_not_in_its_infotext(
    options: dict[str, Any], is_transformer: bool, text: str
) -> None:
    """transformer_* options have no effect on UNets; deepcache_* ones have none on transformers, if transformer_*
    options are set. A preset is written by name. A run with the pasted text has the same effect on the same model."""
    settings = Settings(**options)
    followed = settings.cache_options(is_transformer)
    others = (DEEPCACHE_OPTIONS | TRANSFORMER_OPTIONS) - followed
    assert infotext.describe(settings, of_other_models=others) == text
    run = settings_of_run(read_by_the_accordion({infotext.KEY: text}, Settings()), Settings())
    assert run.cache(is_transformer) == settings.cache(is_transformer)
    assert run.changed_from(settings).keys() <= others


@pytest.mark.parametrize(("text", "standing", "arguments"), [
    ("on", Settings(), [True, AS_IN_SETTINGS, ""]),
    ("off", Settings(), [False, AS_IN_SETTINGS, ""]),
    ("on", Settings(deepcache_interval=3), [True, AS_IN_SETTINGS, "deepcache_interval 1"]),
    ("on", with_preset(Settings(), FAST), [True, EXACT, ""]),
    ("on; speed Fast; backend eager", Settings(), [True, FAST, "backend eager"]),
    ("on; speed Fast; accumulation full", with_preset(Settings(), FAST), [True, AS_IN_SETTINGS, "accumulation full"]),
    ("on; deepcache_interval 2", Settings(backend="eager"),
     [True, AS_IN_SETTINGS, "deepcache_interval 2; backend auto"]),
    ("on; from_the_future 3; low_bit fp8", Settings(), [True, AS_IN_SETTINGS, "low_bit fp8"]),
    ("on; deepcache_interval 99", Settings(), [True, AS_IN_SETTINGS, ""]),
])
def test_pasting_infotext_sets_the_accordion(text: str, standing: Settings, arguments: list[Any]) -> None:
    """standing: the options in the settings tab. arguments: the accordion's switch, preset and changes, which override
    options of the settings tab that the image did not have."""
    assert read_by_the_accordion({infotext.KEY: text}, standing) == arguments


@pytest.mark.parametrize(("text", "part"), [
    ("on; deepcache_interval 4; tf32 on", "no option 'tf32'"),
    ("on; backend inductor", "backend does not take 'inductor'"),
    ("on; deepcache_interval 4; low_bit fp8", ""), (infotext.NOT_SERVED, ""), ("", ""),
    ("anything", "no option 'anything'"), ("speed Turbo; nonsense 5", "no preset 'Turbo'"),
    ("speed Turbo; nonsense 5", "no option 'nonsense'"), ("speed Fast", infotext.NO_SWITCH),
])
def test_unused_parts_of_a_paste_are_reported_once(text: str, part: str) -> None:
    """part: a part of the only message; "": there is no message."""
    problems: list[str] = []
    read_by_the_accordion({infotext.KEY: text}, Settings(), problems.append)
    assert len(problems) == bool(part) and all(part in problem for problem in problems)


@pytest.mark.parametrize("parameters", [{}, {"Steps": "20"}, {"OneDiff": "maybe"}, {"OneDiff": ""}], ids=str)
def test_pasting_an_infotext_without_our_part_leaves_the_accordion_unchanged(parameters: dict[str, str]) -> None:
    """A value that does not begin with on or off counts as none."""
    assert read_by_the_accordion(parameters, Settings(deepcache_interval=3)) == [None] * 3


@pytest.mark.parametrize("text, expected", [
    ("", {}), ("off", {"enabled": False}),
    ("backend = eager\nlow_bit_only=on;", {"backend": "eager", "low_bit_only": True}),
    ("DeepCache interval 3; vae precision: bf16; Skip the negative prompt after=60",
     {"deepcache_interval": 3, "vae_precision": "bf16", "skip_negative_after": 60}),
    ("Use OneDiff off; low-bit  fp8", {"enabled": False, "low_bit": "fp8"}),
    ("OneDiff: on; backend eager", {"enabled": True, "backend": "eager"}),
])
def test_the_changes_field_accepts_names_of_options_and_labels_of_the_settings_tab(
    text: str, expected: dict[str, Any]
) -> None:
    """Case, blanks, and = or : after a name do not matter. A pasted infotext is accepted, too."""
    assert infotext.read_changes(text) == expected


@pytest.mark.parametrize("name", ["memory_budget", "prewarm", "second_gpu"])
def test_an_option_for_all_images_gets_a_sentence_that_names_the_settings(name: str) -> None:
    with pytest.raises(ValueError, match=f"option {name} cannot be set for a single image: use Settings > OneDiff"):
        infotext.read_changes(f"{name} 1")


def test_a_presets_name_is_read_as_its_options_and_written_for_them() -> None:
    """The name is written for settings that equal the preset. An unknown name raises ValueError."""
    expected = {**with_preset(Settings(), FAST).changed_from(Settings()), "low_bit": "fp8"}
    found = infotext.read_changes("Speed fast; low_bit fp8")
    assert Settings(**found).changed_from(Settings()) == expected
    assert infotext.describe(with_preset(Settings(), FAST)) == "on; speed Fast"
    with pytest.raises(ValueError, match="no preset 'Best'"):
        infotext.read_changes("speed Best")
