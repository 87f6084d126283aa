"""OneDiff's section in the WebUI's settings, with the standalone host's options."""
from __future__ import annotations

import html
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio

from lib_onediff.demo.modules.options import OptionInfo, Options
from lib_onediff.options.option import check_value, warn_of_replaced
from lib_onediff.options.settings import GROUPS, Settings, host_key
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import settings_form, settings_tab


def the_options() -> tuple[Options, list[Settings]]:
    """The options and the settings after every change that settings_tab told of."""
    opts, told = Options({}), []
    settings_tab.add_options(opts, OptionInfo, lambda: told.append(runtime.settings))
    return opts, told


def test_kinds_of_components() -> None:
    opts, _ = the_options()
    kinds = {key: info.component for key, info in opts.data_labels.items()}
    assert kinds["onediff_enabled"] is gradio.Checkbox and kinds["onediff_backend"] is gradio.Radio
    assert kinds["onediff_memory_budget"] is gradio.Number
    assert opts.data_labels["onediff_memory_budget"].component_args == {"precision": 0}
    assert kinds["onediff_prewarm"] is kinds["onediff_folder_in_use"] is gradio.Textbox
    for option in fields(Settings):
        number = type(option.default) in (int, float) and option.name != "memory_budget"
        assert (kinds[host_key(option.name)] is gradio.Slider) == number, "a range that is known is a slider's"
    end = opts.data_labels["onediff_deepcache_end"].component_args
    assert end == {"minimum": 0.0, "maximum": 1.0, "step": 0.01}


def test_every_option_can_be_shown() -> None:
    opts, _ = the_options()
    with gradio.Blocks():
        for key, info in opts.data_labels.items():
            assert info.component(value=getattr(opts, key), label=info.label, **info.arguments()).value == info.default


def test_the_page_has_its_options_in_groups() -> None:
    opts, _ = the_options()
    groups = {host_key(option.name): option.metadata["group"] for option in fields(Settings)}
    shown = [groups[key] for key in opts.data_labels if key in groups]
    assert list(dict.fromkeys(shown)) == list(GROUPS) and shown == sorted(shown, key=GROUPS.index)
    keys = list(opts.data_labels)
    assert groups[keys[keys.index("onediff_folder_in_use") - 1]] == "Cache"


def test_a_row_depends_on_values_that_the_other_option_takes() -> None:
    known = Settings.__dataclass_fields__
    dependent = {name: option for name, option in known.items() if option.metadata["no_effect_when"]}
    assert {"deepcache_depth", "deepcache_schedule", "low_bit", "convolution_accumulation"} <= set(dependent)
    for option in dependent.values():
        for other, values in option.metadata["no_effect_when"].items():
            for value in values:
                check_value(known[other], value)


def told_of(**values: Any) -> tuple[dict[str, str], dict[str, str]]:
    """What the page is told of typed values: what is wrong, and what does nothing here."""
    message = json.dumps({"number": 4, "values": {host_key(name): value for name, value in values.items()}})
    text = html.unescape(settings_form.answer(message))
    found = json.loads(text[text.index("{"):text.rindex("}") + 1])
    assert found["number"] == 4
    return found["wrong"], found["notes"]


@pytest.mark.parametrize("name, value, part", [
    ("prewarm", "512x512, wide", "'wide' is not a size"), ("memory_budget", "-1", "from 0 to 1048576, not -1"),
    ("memory_budget", "", "takes a number, not ''"), ("prewarm_most_used", "2.5", "takes a whole number, not 2.5"),
    ("deepcache_interval", "21", "from 1 to 20, not 21"),
])
def test_the_page_is_told_what_is_wrong_before_it_is_applied(name: str, value: str, part: str) -> None:
    wrong, _ = told_of(**{name: value, "enabled": True, "deepcache_end": "0.5", "vae_precision": "auto"})
    assert list(wrong) == [host_key(name)] and part in wrong[host_key(name)]


def test_the_page_is_told_what_does_nothing_on_this_machine() -> None:
    _, notes = told_of(convolution_accumulation="half", tf32="auto", backend="auto")
    assert list(notes) == ["onediff_convolution_accumulation"]
    assert notes["onediff_convolution_accumulation"].startswith("No effect here: PyTorch asks cuDNN")


@pytest.mark.parametrize("message", [None, "", "[]", "{}", '{"number": 1, "values": 3}'])
def test_what_is_no_message_gets_no_answer(message: Any) -> None:
    assert settings_form.answer(message) == ""


def test_the_folder_is_shown_and_nobody_can_set_it(tmp_path: Path) -> None:
    runtime.history.open(tmp_path / "<cache>")
    opts, told = the_options()
    info = opts.data_labels["onediff_folder_in_use"]
    assert info.arguments() == {"interactive": False} and "ONEDIFF_CACHE" in info.comment_after
    assert not opts.set("onediff_folder_in_use", "/etc")
    assert opts.onediff_folder_in_use == str(tmp_path / "<cache>") and len(told) == 1
    assert "onediff_folder_in_use" not in opts.data, "or it would be stored"
    with gradio.Blocks():
        assert not info.component(value=opts.onediff_folder_in_use, **info.arguments()).interactive


@pytest.mark.parametrize("stored, said", [("/somewhere/else", True), ("", False), (None, False)])
def test_a_folder_that_an_earlier_version_has_stored_is_ignored_with_a_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: str | None, said: bool
) -> None:
    runtime.history.open(tmp_path)
    opts = Options({})
    if stored is not None:
        opts.data["onediff_cache_folder"] = stored
    assert settings_tab.stored_settings(opts) == Settings()
    settings_tab.tell_of_stored_folder(opts)
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    sentence = "The stored setting onediff_cache_folder is ignored:"
    assert (sentence in caplog.text and "environment variable ONEDIFF_CACHE" in caplog.text) is said
    assert opts.onediff_folder_in_use == str(tmp_path) and runtime.settings == Settings()


def test_a_folder_that_cannot_be_written_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_tab.log, "propagate", True)
    runtime.history.open(tmp_path)
    settings_tab.tell_of_trouble()
    assert not caplog.records
    (tmp_path / "file").touch()
    runtime.history.open(tmp_path / "file" / "cache")
    settings_tab.tell_of_trouble()
    (record,) = caplog.records
    assert "is forgotten when this WebUI is closed" in record.message
    assert record.message.endswith("Set the environment variable ONEDIFF_CACHE to a folder that can be written.")


@pytest.mark.parametrize("own, hires", [
    ({}, "off"), ({"onediff_deepcache_hires_interval": 1}, "off"),
    ({"onediff_deepcache_hires_interval": 3, "onediff_deepcache_hires_depth": 2}, "as the first pass"),
])
def test_what_an_earlier_version_has_stored_of_the_hires_pass_is_replaced(own: dict[str, Any], hires: str) -> None:
    opts = Options({})
    opts.data.update({"onediff_deepcache_interval": 3, "onediff_deepcache_hires": "own values", **own})
    wanted = Settings(deepcache_interval=3, deepcache_hires=hires)
    assert settings_tab.stored_settings(opts) == wanted
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert opts.onediff_deepcache_hires == hires and runtime.settings == wanted


def test_a_backend_of_an_earlier_version_is_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_tab.log, "propagate", True)
    warn_of_replaced.cache_clear()
    opts = Options({})
    opts.data.update({"onediff_backend": "inductor"})
    assert settings_tab.stored_settings(opts) == Settings(backend="inductor") == Settings()
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert opts.onediff_backend == "auto" and runtime.settings == Settings()
    (record,) = caplog.records
    assert record.message == "OneDiff has no backend 'inductor' any more: auto is used."


def test_a_schedule_of_an_earlier_version_is_replaced() -> None:
    opts = Options({})
    opts.data.update({"onediff_deepcache_schedule": "uneven", "onediff_deepcache_center": 0.2})
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert opts.onediff_deepcache_schedule == "early" and runtime.settings == Settings()


@pytest.mark.parametrize(("switch", "low_bit"), [(True, "fp8"), (False, "off")])
def test_the_switch_of_an_earlier_version_is_replaced(switch: bool, low_bit: str) -> None:
    opts = Options({})
    opts.data.update({"onediff_fp8": switch})
    assert settings_tab.stored_settings(opts) == Settings(low_bit=low_bit)
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert opts.onediff_low_bit == low_bit and runtime.settings == Settings(low_bit=low_bit)


@pytest.mark.parametrize("key, value, part", [
    ("onediff_prewarm", "512x512, wide", "'wide' is not a size"),
    ("onediff_prewarm", "65x64", "multiple of 8"),
    ("onediff_memory_budget", -1, "from 0 to 1048576, not -1"),
    ("onediff_memory_budget", 1048577, "from 0 to 1048576, not 1048577"),
    ("onediff_memory_budget", 10**30, "from 0 to 1048576"),
    ("onediff_prewarm_most_used", -1, "from 0 to 100, not -1"),
    ("onediff_prewarm_most_used", 101, "from 0 to 100"),
    ("onediff_deepcache_interval", 21, "from 1 to 20, not 21"),
    ("onediff_deepcache_depth", 12, "from 1 to 11"),
    ("onediff_deepcache_end", 1.01, "from 0 to 1"),
    ("onediff_deepcache_schedule", "sometimes", "is one of"),
    ("onediff_idle_prewarm", 1, "takes True or False"),
    ("onediff_backend", "warp", "is one of"),
])
def test_invalid_values_give_a_sentence_and_the_old_value_stays(
    key: str, value: Any, part: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings_tab.log, "propagate", True)
    opts, _ = the_options()
    opts.set("onediff_prewarm", "64x64")
    before, standing = dict(opts.data), runtime.settings
    opts.set(key, value)
    assert (opts.data, runtime.settings) == (before, standing)
    (record,) = [record for record in caplog.records if record.name == settings_tab.log.name]
    assert part in record.message and record.message.endswith("The setting stays as it was.")


def test_a_whole_number_as_a_client_of_the_api_reads_it() -> None:
    """A1111 tells 1 as 1.0, and takes what it has told."""
    opts, _ = the_options()
    opts.set("onediff_deepcache_depth", 3)
    opts.set("onediff_deepcache_depth", 1.0)
    assert opts.onediff_deepcache_depth == runtime.settings.deepcache_depth == 1
    assert type(runtime.settings.deepcache_depth) is int


def test_the_sentence_is_shown_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(gradio, "Warning", shown.append)
    opts, _ = the_options()
    opts.set("onediff_prewarm", "wide")
    assert len(shown) == 1 and "'wide' is not a size" in shown[0]


def test_changes_are_told() -> None:
    opts, told = the_options()
    opts.set("onediff_prewarm", "64x64, 72x64 x2")
    assert [settings.prewarm for settings in told] == ["", "64x64, 72x64 x2"]


# --- set by our own pages ---------------------------------------------------------------------------------------------


def test_options_are_stored_as_applying_the_tab_does(tmp_path: Path) -> None:
    opts, told = the_options()
    file = tmp_path / "config.json"
    wanted = {"deepcache_interval": 3, "tf32": "auto", "vae_precision": "fp32"}
    assert settings_tab.store(opts, wanted, str(file)) == ["deepcache_interval", "vae_precision"]
    assert runtime.settings == told[-1] == Settings(deepcache_interval=3, vae_precision="fp32")
    again = Options({})
    again.load(str(file))
    assert again.data["onediff_deepcache_interval"] == 3
    assert settings_tab.store(opts, wanted, str(file)) == []


def test_what_cannot_be_stored_is_said(tmp_path: Path) -> None:
    class Frozen(Options):
        """As A1111 with --freeze-settings, or with an option that it restricts."""

        refusal: AssertionError | None = AssertionError("changing settings is disabled")

        def set(self, key: str, value: Any, run_callbacks: bool = True) -> bool:
            if self.refusal:
                raise self.refusal
            return False

    opts = Frozen({})
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    with pytest.raises(ValueError, match="does not let its settings be changed: changing settings is disabled"):
        settings_tab.store(opts, {"tf32": "on"}, str(tmp_path / "config.json"))
    object.__setattr__(opts, "refusal", None)
    with pytest.raises(ValueError, match="did not take TF32"):
        settings_tab.store(opts, {"tf32": "on"}, str(tmp_path / "config.json"))
    opts, _ = the_options()
    with pytest.raises(ValueError, match="hold until the WebUI ends; they could not be saved"):
        settings_tab.store(opts, {"tf32": "on"}, str(tmp_path))
    assert runtime.settings.tf32 == "on"
