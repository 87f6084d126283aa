"""OneDiff's section in the WebUI's settings, with the demo's options."""
from __future__ import annotations

import html
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gradio")


from store_builders import FILE

from lib_onediff.core.settings import Settings, host_key
from lib_onediff.demo.modules.shared import OptionInfo, Options
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui import effects, settings_tab
from lib_onediff.ui.presets import preset_options


def options_with_reports() -> tuple[Options, list[Settings]]:
    """The options, and a list of the settings after every change that settings_tab has reported."""
    opts = Options()
    reported = []
    settings_tab.add_options(opts, OptionInfo, lambda: reported.append(runtime.settings))
    return opts, reported


def for_the_browser() -> dict[str, Any]:
    text = html.unescape(settings_tab.for_the_browser())
    return json.loads(text[text.index("{"):text.rindex("}") + 1])


def test_a_choice_without_effect_on_this_machine_has_a_note_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has neither an NVIDIA GPU nor OneFlow. Of the option Accumulation, only the choice "half" gets a
    note."""
    monkeypatch.setattr(effects, "has_oneflow", lambda: False)
    options = for_the_browser()["options"]
    notes = options["onediff_accumulation"]["notes"]
    assert list(notes) == ["half"] and notes["half"].startswith("No effect here: this needs an NVIDIA GPU")
    assert options["onediff_enabled"]["notes"] == {}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_setting_graph_memory_is_marked_as_useless_only_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    monkeypatch.setattr(effects.torch.cuda, "is_available", lambda: has_gpu)
    (option,) = (one for one in fields(Settings) if one.name == "memory_budget")
    expected = "" if has_gpu else "CUDA graphs need a GPU, and PyTorch sees none here"
    assert settings_tab.why_useless(option) == expected


def test_a_speed_button_sets_the_options_of_presets_and_no_others() -> None:
    """The button "Exact" sets them to their defaults."""
    known = for_the_browser()
    assert list(known["speeds"]) == ["Exact", "Balanced", "Fast", "Draft"]
    for speed in known["speeds"].values():
        assert set(speed["values"]) == {host_key(name) for name in preset_options()}
    exact = known["speeds"]["Exact"]["values"]
    assert exact == {key: known["options"][key]["default"] for key in exact}


@pytest.mark.parametrize(("stored", "expected", "logged"), [
    ({"deepcache_interval": 2, "backend": "eager"}, {"deepcache_interval": 2, "backend": "eager"}, []),
    ({"fp8": True, "deepcache_interval": 2, "verify": False}, {"deepcache_interval": 2},
     ["are removed from the WebUI's settings: onediff_fp8, onediff_verify."]),
    # A wrong value costs no other option.
    ({"deepcache_interval": 99, "vae_precision": "fp32"}, {"vae_precision": "fp32"}, ["from 1 to 20, not 99"]),
    ({"backend": "inductor"}, {}, ["backend must be one of"]),
], ids=str)
def test_a_wrong_stored_value_is_logged_and_costs_no_other_option(
    stored: dict[str, Any], expected: dict[str, Any], logged: list[str], caplog: pytest.LogCaptureFixture,
) -> None:
    """stored: OneDiff's values in the WebUI's settings file. Options of older versions and wrong values are removed
    from it; other extensions' values stay. logged: a part of each message; loading again logs none."""
    opts = Options()
    opts.data.update({host_key(name): value for name, value in stored.items()}, other=1)
    assert settings_tab.stored_settings(opts) == Settings(**expected)
    assert len(caplog.records) == len(logged)
    assert all(part in record.message for part, record in zip(logged, caplog.records, strict=True))
    assert opts.data["other"] == 1 and "onediff_fp8" not in opts.data
    settings_tab.add_options(opts, OptionInfo, lambda: None)
    assert runtime.settings == Settings(**expected)
    caplog.clear()
    settings_tab.stored_settings(opts)
    assert not caplog.records


def test_a_cache_folder_that_cannot_be_written_is_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where the folder should be. A writable folder logs nothing."""
    runtime.history.open(tmp_path)
    settings_tab.tell_of_trouble()
    assert not caplog.records
    (tmp_path / "file").touch()
    runtime.history.open(tmp_path / "file" / "cache")
    settings_tab.tell_of_trouble()
    (record,) = caplog.records
    assert "are forgotten when this WebUI is closed" in record.message
    assert record.message.endswith(settings_tab.OTHER_FOLDER)


def test_after_a_damaged_file_the_log_names_it_and_advises_no_other_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A new file in the same folder is in use, so nothing is to be done."""
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    runtime.history.open(tmp_path)
    assert runtime.history.saves
    settings_tab.tell_of_trouble()
    (record,) = caplog.records
    assert "was damaged" in record.message and "ONEDIFF_CACHE" not in record.message


@pytest.mark.parametrize("key, value, part", [
    ("onediff_prewarm", "512x512, wide", "'wide' is not a size"),
    ("onediff_prewarm", "most used 101", "give at most 100"),
    ("onediff_memory_budget", 10**30, "from 0 to 1048576"),
    ("onediff_deepcache_interval", 21, "from 1 to 20, not 21"),
    ("onediff_deepcache_depth", 12, "from 0 to 11"),
    ("onediff_skip_negative_after", 100, "from 0 to 99"),
    ("onediff_low_bit_only", 1, "takes True or False"),
    ("onediff_backend", "warp", "must be one of"),
])
def test_an_invalid_value_is_logged_with_a_sentence_and_the_old_value_stays(
    key: str, value: Any, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """part: a part of the message."""
    opts, _ = options_with_reports()
    opts.set("onediff_prewarm", "64x64")
    before = dict(opts.data)
    settings_before = runtime.settings
    opts.set(key, value)
    assert (opts.data, runtime.settings) == (before, settings_before)
    (record,) = [record for record in caplog.records if record.name == settings_tab.log.name]
    assert part in record.message and record.message.endswith("The setting stays as it was.")


def test_a_whole_number_sent_as_a_float_is_stored_as_an_integer() -> None:
    """A1111's API returns 1 as 1.0, so a client may send 1.0."""
    opts, _ = options_with_reports()
    opts.set("onediff_deepcache_depth", 3)
    opts.set("onediff_deepcache_depth", 1.0)
    assert opts.onediff_deepcache_depth == runtime.settings.deepcache_depth == 1
    assert type(runtime.settings.deepcache_depth) is int


def test_a_users_text_is_escaped_in_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """gradio shows warnings as markup."""
    shown: list[str] = []
    monkeypatch.setattr(settings_tab.gr, "Warning", shown.append)
    settings_tab.tell("<img src=x onerror=alert(1)> is no backend & nothing else.")
    assert shown == ["&lt;img src=x onerror=alert(1)&gt; is no backend &amp; nothing else."]


@pytest.mark.parametrize(("name", "value", "says"), [
    ("deepcache_interval", "99", "This must be from 1 to 20, not 99."), ("deepcache_interval", "3", ""),
    ("deepcache_interval", 10**400, "This is not a number"),
    ("deepcache_interval", "2.5", "This takes a whole number, not 2.5."), ("deepcache_interval", 2.5, "a whole number"),
    ("deepcache_interval", 2.0, ""), ("deepcache_interval", "inf", "This takes a whole number"),
    ("deepcache_interval", "", "This is not a number: ''."), ("prewarm", "huge", "'huge' is not a size"),
    ("prewarm", "most used 4", ""), ("enabled", True, ""), ("low_bit_budget", "0.02", ""), ("backend", "auto", ""),
    ("backend", "warp", "This must be one of auto, native"),
])
def test_the_settings_page_shows_what_is_wrong_with_a_value_before_it_is_applied(
    name: str, value: Any, says: str
) -> None:
    """says: a part of the sentence in the answer to the page; "" for a valid value. The answer also has the values in
    force, which this request does not change."""
    key = host_key(name)
    markup = settings_tab.checked_for_the_browser(json.dumps({key: value}))
    answer = json.loads(html.unescape(markup.partition('="')[2].partition('"')[0]))
    assert answer["problems"].keys() == ({key} if says else set()) and says in answer["problems"].get(key, "")
    assert answer["in_force"][key] == getattr(runtime.settings, name)


@pytest.mark.parametrize("request_", [None, "[1]"])
def test_the_page_gets_an_answer_to_an_unreadable_request(request_: str | None) -> None:
    assert settings_tab.checked_for_the_browser(request_)
