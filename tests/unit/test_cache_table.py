"""What the OneDiff tab shows, as markup."""
from __future__ import annotations

import pytest
from panel_builders import MEBIBYTE, ROW, SHAPE, TOTALS, changed, text_of

from lib_onediff.devices.cuda.low_bit.sensitivity import ClassError
from lib_onediff.options.sizes import Size
from lib_onediff.prewarm.job import Job
from lib_onediff.runtime.rows import LowBitErrors
from lib_onediff.ui import amounts
from lib_onediff.ui.cache import table as cache_table
from lib_onediff.ui.cache import totals as cache_totals

ROWS = [
    changed(ROW, resolution="512x768", last_used=3.0, step_ms=9.0, needs=2, uses=1),
    changed(ROW, resolution="1024x1024", last_used=1.0, step_ms=None, needs=9, uses=5, model="SDXL"),
    changed(ROW, resolution="64x64", last_used=2.0, step_ms=4.0, needs=5, uses=3),
    changed(ROW, resolution="72x64", last_used=0.0, step_ms=None, needs=0, uses=0, state="queued"),
]


def test_totals() -> None:
    rows = [ROW, changed(ROW, state="proved"), changed(ROW, state="failed", bytes=0)]
    jobs = [Job(1, Size(64, 64), "panel", "done"), Job(2, Size(64, 64), "panel", estimated_seconds=3.0)]
    line = text_of(cache_totals.totals_html(TOTALS, rows, jobs))
    for part in ("Graph memory 6 MiB", "Disk 3 MiB", "Served by a graph 63 %", "Queue 1 size, about 3.0 s",
                 "Resolutions 3 (1 ready, 1 checked, 1 failed)",
                 "12 CUDA graph, 3 without CUDA graphs, 4 the WebUI's UNet".replace("'", "&#x27;")):
        assert part in line
    assert "inside" not in line


def test_what_low_bit_does_to_a_checkpoint() -> None:
    classes = (
        ClassError("self-attention QKV", "fp8", 0.0103, True),
        ClassError("feed-forward in", "fp8, int8", 0.0312, False),
        ClassError("feed-forward <out>", "", None, True),
    )
    measured = changed(TOTALS, low_bit_errors=[LowBitErrors("SDXL", 0.02, 0.01434, classes)])
    markup = cache_totals.totals_html(measured, [], [])
    said = text_of(markup)
    assert "Low-bit on this SDXL checkpoint. Whole step: 0.0143 of at most 0.02." in said
    assert "self-attention QKV fp8 0.0103 8 bits" in said and "feed-forward in fp8, int8 0.0312 16 bits" in said
    assert "feed-forward &lt;out&gt; – – 8 bits" in said, "what is not known is not shown"
    for word in ('scope="col"', 'scope="row"', "<caption>", 'tabindex="0" role="region" aria-label="Low-bit on this'):
        assert word in markup
    exact = changed(measured, low_bit_errors=[LowBitErrors("SDXL", 0.0, None, classes)])
    assert "No layer is in 8 bits within 0." in text_of(cache_totals.totals_html(exact, [], []))
    assert "<table" not in cache_totals.totals_html(TOTALS, [], []), "only where there is something"


@pytest.mark.parametrize("vram, share, full", [(0, 0, False), (128, 25, False), (512, 100, False), (600, 100, True)])
def test_the_budget_has_a_bar(vram: int, share: int, full: bool) -> None:
    held = changed(TOTALS, vram=vram * MEBIBYTE, budget=512 * MEBIBYTE)
    markup = cache_totals.totals_html(held, [], [])
    assert f"{vram} MiB of 512 MiB" in text_of(markup)
    assert f'role="meter" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{share}"' in markup
    assert ("onediff-full" in markup) == full
    assert "onediff-bar" not in cache_totals.totals_html(TOTALS, [], [])


def test_table_has_a_row_per_resolution_with_its_shapes_below() -> None:
    markup = cache_table.table_html([ROW, changed(ROW, resolution="64x64", shapes=(SHAPE, changed(SHAPE, batch=1)))])
    text = text_of(markup)
    assert "512x768 ready SD1 12.3 ms 24.7 ms 2.00x 5 MiB frees 3 MiB 7" in text
    assert "1 shape" in text and "2 shapes" in text
    assert "2 77 float16 – ready 12.3 ms 24.7 ms 2.00x 5 MiB frees 3 MiB 7 1.5e-03" in text
    assert markup.count("<details data-onediff-key=") == 2 and 'tabindex="0"' in markup
    assert 'value="512x768 SD1" aria-label="Select 512x768 of SD1"' in markup


def test_table_escapes_what_others_name() -> None:
    evil = "<script>alert('x')</script>\""
    markup = cache_table.table_html([
        changed(ROW, model=evil, reason=evil, resolution=evil, shapes=(changed(SHAPE, reason=evil, dtype=evil),)),
    ])
    markup += cache_totals.chart_html([changed(ROW, model=evil, resolution=evil)])
    assert "<script" not in markup and markup.count("&lt;script&gt;") > 5 and "alert('x')" not in markup


def test_only_so_many_rows_are_shown() -> None:
    rows = [changed(ROW, resolution=f"{64 + 8 * number}x64") for number in range(cache_table.MOST_ROWS + 3)]
    markup = cache_table.table_html(rows)
    assert markup.count("<tbody>") == 2 * cache_table.MOST_ROWS and "3 more: choose a model" in markup


@pytest.mark.parametrize("order, first_to_last", [
    ("Last used", ["72x64", "512x768", "64x64", "1024x1024"]),
    ("Resolution", ["64x64", "72x64", "512x768", "1024x1024"]),
    ("Step time", ["64x64", "512x768", "1024x1024", "72x64"]),
    ("Memory", ["1024x1024", "64x64", "512x768", "72x64"]),
    ("Uses", ["1024x1024", "64x64", "512x768", "72x64"]),
    ("nonsense", ["72x64", "512x768", "64x64", "1024x1024"]),
    (None, ["72x64", "512x768", "64x64", "1024x1024"]),
])
def test_sorting(order: str, first_to_last: list[str]) -> None:
    shown = cache_table.selected(ROWS, cache_table.ALL_MODELS, order)
    assert [row.resolution for row in shown] == first_to_last


def test_filtering() -> None:
    assert cache_table.models_of(ROWS) == ["All models", "SD1", "SDXL"]
    assert [row.resolution for row in cache_table.selected(ROWS, "SDXL", "Uses")] == ["1024x1024"]
    assert len(cache_table.selected(ROWS, None, "Uses")) == len(ROWS)
    assert cache_table.selected(ROWS, "SD2", "Uses") == []


def test_a_decode_is_no_model() -> None:
    decode = changed(ROW, model="VAE decoder", shapes=(changed(SHAPE, tokens=0),))
    queued = changed(ROW, model="SDXL", shapes=())
    assert cache_table.models_of([ROW, decode, queued]) == ["All models", "SD1", "SDXL"]
    assert cache_totals.chart_html([decode]) == ""


@pytest.mark.parametrize("ratio, bounds, text", [
    (1.62, (1.5, 1.7), "1.6x faster"), (0.5, None, "2.0x slower"), (1.3, (0.9, 1.6), "about as fast"),
    (1.04, None, "about as fast"), (None, None, "–"),
])
def test_times(ratio: float | None, bounds: tuple[float, float] | None, text: str) -> None:
    assert amounts.times(ratio, bounds) == text
