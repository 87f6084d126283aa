"""The HTML of the Cache page: its line of totals, its table, its list of sizes, and its queue."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from panel_builders import ROW, SHAPE, TOTALS, text_of

from lib_onediff.core.family import UsualSizes
from lib_onediff.core.jobs import PREWARM, Job
from lib_onediff.core.sizes import Size
from lib_onediff.prewarm.worker import Estimate
from lib_onediff.runtime.rows import LowBitErrors
from lib_onediff.ui.cache import table as cache_table
from lib_onediff.ui.jobs import jobs_html


def test_the_line_of_totals_counts_resolutions_by_state_and_calls_by_route() -> None:
    rows = [ROW, replace(ROW, state="proved"), replace(ROW, state="failed", bytes=0)]
    jobs = [Job(PREWARM, "64x64", state="done"), Job(PREWARM, "64x64")]
    line = text_of(cache_table.totals_html(TOTALS, rows, jobs, Path("/cache/<onediff>")))
    for part in ("Graph memory 6 MiB", "Disk 3 MiB /cache/&lt;onediff&gt;", "Served by a graph 63 %", "Queue 1 size",
                 "Resolutions 3 (1 ready, 1 checked, 1 failed)",
                 "12 by a CUDA graph, 3 without CUDA graphs, 4 by the WebUI alone"):
        assert part in line
    assert "inside" not in line


def test_the_totals_show_the_low_bit_error_of_each_checkpoint_beside_its_limit() -> None:
    """Without a measured error, they say that no layer of the checkpoint uses 8 bits."""
    errors = [LowBitErrors("SDXL", 0.02, 0.01234, ()), LowBitErrors("SD1", 0.0, None, ())]
    said = text_of(cache_table.totals_html(replace(TOTALS, low_bit_errors=errors), [], [], None))
    assert "Low-bit on this SDXL checkpoint: error 1.2e-02, limit 2.0e-02" in said
    assert "Low-bit on this SD1 checkpoint: no layer uses 8 bits" in said


def test_the_table_has_a_row_for_each_resolution_with_its_shapes_below() -> None:
    rows = [ROW, replace(ROW, resolution="64x64", shapes=(SHAPE, replace(SHAPE, batch=1)))]
    markup = cache_table.resolutions_html(rows)
    text = text_of(markup)
    assert "512x768 ready 12.3 ms 24.7 ms 2.0x faster 5 MiB frees 3 MiB SD1 1.2 s saved 0.9 s 3" in text
    assert "1 shape" in text and "2 shapes" in text
    assert "2 77 float16 – ready 12.3 ms 24.7 ms 2.0x faster 5 MiB frees 3 MiB 7 1.5e-03" in text
    assert 'value="512x768 SD1" aria-label="Select 512x768 of SD1"' in markup


def test_names_and_reasons_with_markup_are_escaped_in_the_html() -> None:
    evil = "<script>alert('x')</script>\""
    row = replace(ROW, model=evil, reason=evil, resolution=evil, shapes=(replace(SHAPE, reason=evil, dtype=evil),))
    job = Job(PREWARM, evil, evil, state="failed", reason=evil)
    markup = cache_table.resolutions_html([row]) + jobs_html([job])
    assert "<script" not in markup and markup.count("&lt;script&gt;") > 5 and "alert('x')" not in markup


def test_without_a_gpu_no_graph_memory_and_no_vram_are_shown() -> None:
    totals = replace(TOTALS, vram=0)
    line = text_of(cache_table.totals_html(totals, [], [], None))
    assert "Graph memory" not in line and "Served by a graph" not in line and not cache_table.has_gpu(totals)
    text = text_of(cache_table.resolutions_html([ROW], has_gpu=False))
    assert "VRAM" not in text and "MiB" not in text and "512x768 ready 12.3 ms 24.7 ms 2.0x faster SD1" in text


def test_rows_are_sorted_by_the_clicked_heading_and_unknown_values_come_last() -> None:
    """sort: a heading, and whether the order is descending. Without a heading, or with an unknown one, the most
    recently used rows come first."""
    rows = [
        replace(ROW, resolution=name, step_ms=step, last_used=used)
        for name, step, used in (("64x64", 2.0, 1.0), ("512x512", None, 3.0), ("72x64", 1.0, 2.0))
    ]
    for sort, order in (
        (("", False), ["512x512", "72x64", "64x64"]), (("Step", False), ["72x64", "64x64", "512x512"]),
        (("Step", True), ["64x64", "72x64", "512x512"]), (("Resolution", True), ["512x512", "72x64", "64x64"]),
        (("nothing", True), ["512x512", "72x64", "64x64"]),
    ):
        assert [row.resolution for row in cache_table.selected(rows, None, sort)] == order
    markup = cache_table.resolutions_html(rows, sort=("Step", True))
    assert 'aria-sort="descending" class="onediff-number"' in markup and "Step ▼" in markup


def test_only_a_row_whose_pre_warming_is_queued_has_a_cancel_button() -> None:
    queued = replace(ROW, state="queued")
    markup = cache_table.resolutions_html([queued, replace(ROW, resolution="64x64")], jobs={"512x768 SD1": 7})
    assert markup.count('data-onediff-job="7" aria-label="Cancel: 512x768 of SD1"') == 1 == markup.count(">Cancel<")


def test_in_the_list_of_sizes_used_ones_come_first_and_slow_ones_show_how_long_they_take() -> None:
    """The time is the estimate for pre-warming: shown from minutes on, and with > if it is only a lower bound
    (is_least)."""
    usual = [UsualSizes("SD 1.5", ("SD1",), ("512x512", "256x256", "1024x1024"))]
    estimates = {
        Size(512, 512): Estimate(59.0), Size(1024, 1024): Estimate(245.0),
        Size(64, 64): Estimate(24180.0, is_least=True),
    }
    markup = cache_table.sizes_html({"256x256": "used", "64x64": "used"}, usual, estimates)
    assert text_of(markup) == "Yours 256x256 64x64 &gt; 6.7 h SD 1.5 512x512 1024x1024 4 min"
    assert 'title="about 4 min on this machine"' in markup and 'title="used, more than 6.7 h on this machine"' in markup


def test_the_table_shows_a_limited_number_of_rows_and_says_how_many_more_there_are() -> None:
    """The limit is MOST_ROWS. Each row has two <tbody> elements: its own, and the one of its shapes."""
    rows = [replace(ROW, resolution=f"{64 + 8 * number}x64") for number in range(cache_table.MOST_ROWS + 3)]
    markup = cache_table.resolutions_html(rows)
    assert markup.count("<tbody>") == 2 * cache_table.MOST_ROWS and "3 more: choose a model" in markup


def test_rows_are_filtered_by_model_and_the_last_used_come_first() -> None:
    """A size that is queued and was never used (last_used is 0) comes before all others. The row of VAE decodes adds no
    entry to the list of models."""
    queued = replace(ROW, resolution="72x64", model="SDXL", last_used=0.0, state="queued", shapes=())
    rows = [replace(ROW, last_used=1.0), replace(ROW, resolution="64x64", last_used=2.0), queued]
    decode = replace(ROW, model="VAE decoder", shapes=(replace(SHAPE, tokens=0),))
    assert cache_table.models_of([*rows, decode]) == ["All models", "SD1", "SDXL"]
    for model, shown in (("All models", ["72x64", "64x64", "512x768"]), ("SDXL", ["72x64"]), ("SD2", [])):
        assert [row.resolution for row in cache_table.selected(rows, model)] == shown


def test_the_queue_counts_the_sizes_that_wait_or_are_being_pre_warmed() -> None:
    states = ("done", "failed", "cancelled", "queued", "running", "queued")
    jobs = [Job(PREWARM, "64x64", state=state) for state in states]
    for last, said in ((3, "Queue empty"), (4, "Queue 1 size"), (5, "Queue 2 sizes"), (6, "Queue 3 sizes")):
        line = text_of(cache_table.totals_html(TOTALS, [], jobs[:last], None))
        assert said in line, line


def test_the_share_of_calls_served_by_a_graph_is_a_dash_if_unknown_and_0_percent_if_zero() -> None:
    unknown = text_of(cache_table.totals_html(replace(TOTALS, hit_rate=None), [], [], None))
    assert "Served by a graph –" in unknown and "Served by a graph 0 %" in text_of(
        cache_table.totals_html(replace(TOTALS, hit_rate=0.0), [], [], None)
    )
