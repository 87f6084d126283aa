"""OneDiff's section in the WebUI's settings, with the standalone host's options."""
from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("gradio")

import gradio

from lib_onediff.accelerator import runtime
from lib_onediff.hosts.standalone.modules.options import OptionInfo, Options
from lib_onediff.settings import Settings
from lib_onediff.ui import settings_tab


class OlderOptionInfo(OptionInfo):
    """As in a WebUI whose options the API may all set."""

    def __init__(self, default: Any, label: str, component: Any, arguments: Any, onchange: Any, section: Any) -> None:
        super().__init__(default, label, component, arguments, onchange, section)


def the_options(option_info: Any = OptionInfo) -> tuple[Options, list[Settings]]:
    """The options and the settings after every change that settings_tab told of."""
    opts, told = Options({}), []
    settings_tab.add_options(opts, option_info, lambda: told.append(runtime.settings))
    return opts, told


def test_kinds_of_components() -> None:
    opts, _ = the_options()
    kinds = {key: info.component for key, info in opts.data_labels.items()}
    assert kinds["onediff_enabled"] is gradio.Checkbox and kinds["onediff_backend"] is gradio.Radio
    assert kinds["onediff_memory_budget"] is gradio.Number
    assert opts.data_labels["onediff_memory_budget"].component_args == {"precision": 0}
    assert kinds["onediff_prewarm"] is kinds["onediff_cache_folder"] is gradio.Textbox


def test_every_option_can_be_shown() -> None:
    opts, _ = the_options()
    with gradio.Blocks():
        for key, info in opts.data_labels.items():
            assert info.component(value=getattr(opts, key), label=info.label, **info.arguments()).value == info.default


def test_a_client_of_the_api_cannot_choose_the_folder() -> None:
    opts, _ = the_options()
    assert [key for key, info in opts.data_labels.items() if info.restrict_api] == ["onediff_cache_folder"]
    assert not opts.set("onediff_cache_folder", "/etc", is_api=True)
    assert opts.onediff_cache_folder == runtime.settings.cache_folder == ""


def test_a_host_that_cannot_restrict_the_api() -> None:
    opts, _ = the_options(OlderOptionInfo)
    assert len(opts.data_labels) == len(the_options()[0].data_labels)


@pytest.mark.parametrize("key, value, part", [
    ("onediff_prewarm", "512x512, wide", "'wide' is not a size"),
    ("onediff_prewarm", "65x64", "multiple of 8"),
    ("onediff_memory_budget", -1, "MiB"),
    ("onediff_prewarm_most_used", -1, "from 0 to 100, not -1"),
    ("onediff_prewarm_most_used", 101, "from 0 to 100"),
    ("onediff_idle_prewarm", 1, "takes a bool"),
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


def test_a_folder_set_by_a_client_is_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """Forge's API sets what its own OptionInfo restricts."""
    opts, _ = the_options()
    opts.set("onediff_cache_folder", "/somewhere/else")
    assert opts.data["onediff_cache_folder"] == "" and runtime.settings.cache_folder == ""
    assert "can only be set in the settings tab" in caplog.text


def test_a_folder_set_on_the_page_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    opts, _ = the_options()
    monkeypatch.setattr(settings_tab, "somebody_is_at_the_page", lambda: True)
    opts.set("onediff_cache_folder", "/somewhere/else")
    assert runtime.settings.cache_folder == "/somewhere/else"
