"""The benchmark measures what it says. No test here looks at a time beyond asking that it is one."""
from __future__ import annotations

import argparse
import logging
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from lib_onediff.bench import measure as measuring
from lib_onediff.bench import models, report
from lib_onediff.bench.measure import Plan, Row, compare, measure, modules_in_turn
from lib_onediff.bench.options import another_size, many_sizes_for, ours_among, parse, size_of
from lib_onediff.bench.variants import BASELINE, COMPILED, VARIANTS, Own
from lib_onediff.options.settings import Settings

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
EAGER = "onediff eager"


def tiny(dtype: torch.dtype = torch.float32) -> nn.Module:
    return models.random_unet("tiny-sd15", CPU).to(dtype)


def addresses(unet: nn.Module) -> list[int]:
    return [parameter.data_ptr() for parameter in unet.parameters()]


@pytest.mark.parametrize("wrong", ["1024", "axb", "100x100", "0x512", "1024x", "-8x8"])
def test_a_wrong_size_is_refused_with_a_sentence(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="multiples of 8"):
        size_of(wrong)


def documented_commands() -> list[list[str]]:
    """The arguments of the benchmark's commands in the documentation."""
    pages = [ROOT / "README.md", *sorted((ROOT / ".readme").glob("*.md"))]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    # A command within a sentence ends with its backtick.
    found = [re.search(r"-m lib_onediff\.bench ([^`]*)", line) for line in lines]
    return [shlex.split(match[1]) for match in found if match]


@pytest.mark.parametrize("arguments", documented_commands())
def test_the_commands_of_the_documentation_are_understood(arguments: list[str]) -> None:
    if arguments != ["--help"]:
        parse(arguments)


def test_sections_are_off_unless_asked_for_and_take_sizes_or_the_twelve() -> None:
    nothing = parse([])
    assert (nothing.new_sizes, nothing.cold, nothing.images) == (None, False, False)
    asked = parse(["--new-sizes"])
    assert asked.new_sizes == []
    for model in ("sdxl", "sd15", "tiny-sdxl"):
        twelve = many_sizes_for(model, asked.new_sizes)
        assert len(set(twelve)) == 12 and all(width % 8 == height % 8 == 0 for width, height in twelve)
    assert many_sizes_for("sdxl", parse(["--new-sizes", "64x72"]).new_sizes) == [(64, 72)]


@pytest.mark.parametrize("sizes", [[(1024, 1024)], [(512, 512), (960, 720)], [(64, 64)], [(64, 64), (512, 512)]])
def test_a_process_warms_up_at_a_size_that_is_not_measured(sizes: list[tuple[int, int]]) -> None:
    width, height = another_size(sizes)
    assert (width, height) not in sizes and width % 64 == height % 64 == 0


def test_ours_is_the_first_variant_of_ours_that_was_asked_for() -> None:
    assert ours_among([BASELINE, "onediff cudagraph", EAGER]) == "onediff cudagraph"
    assert VARIANTS[ours_among([BASELINE])].ours


def test_rows_hold_times_ratios_and_the_error_against_float32() -> None:
    plan = Plan("tiny-sdxl", [(64, 64), (72, 88)], [BASELINE, EAGER], 1, 77, torch.bfloat16, 5)
    unet = models.random_unet("tiny-sdxl", CPU)
    rows = measure(unet, plan)
    assert [(row.size, row.variant) for row in rows] == [
        ("64x64", BASELINE), ("64x64", EAGER), ("72x88", BASELINE), ("72x88", EAGER)
    ]
    for row in rows:
        assert not row.problem and len(row.times_ms) == 5 and row.first_call_s
        assert row.relative_error and 1e-4 < row.relative_error < 5e-2
        assert row.median_ms
        assert row.compiled_ratio is None
    for host, ours in zip(rows[::2], rows[1::2], strict=True):
        assert host.ratio == host.host_errors == 1.0 and not host.routes
        assert ours.ratio == pytest.approx(host.median_ms / ours.median_ms)
        assert ours.host_errors == pytest.approx(ours.relative_error / host.relative_error)
        assert ours.routes == "plain"
    assert "forward" not in unet.__dict__, "the UNet is given back"


def test_the_host_is_measured_on_a_unet_that_ours_has_not_bound() -> None:
    unet = tiny()
    before = addresses(unet)
    (modules,) = modules_in_turn(unet, [BASELINE, "host eager + CUDA graph", EAGER, "onediff cudagraph"])
    assert modules[BASELINE] is modules["host eager + CUDA graph"] is unet
    assert modules[EAGER] is not unet and modules["onediff cudagraph"] not in (unet, modules[EAGER])
    assert not set(addresses(modules[EAGER])) & set(before)
    rows = measure(unet, Plan("tiny-sd15", [(64, 64)], [BASELINE, EAGER], 2, 77, torch.float32, 5))
    assert not any(row.problem for row in rows)
    assert addresses(unet) == before, "binding would have moved its weights"


def test_without_room_for_copies_the_host_comes_first_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measuring, "has_room_for", lambda unet, copies: False)
    unet = tiny()
    groups = list(modules_in_turn(unet, [EAGER, BASELINE]))
    assert groups == [{BASELINE: unet}, {EAGER: unet}]
    with caplog.at_level(logging.WARNING, "onediff.bench"):
        rows = measure(unet, Plan("tiny-sd15", [(64, 64)], [EAGER, BASELINE], 2, 77, torch.float32, 5))
    assert [row.variant for row in rows] == [EAGER, BASELINE] and all(row.ratio for row in rows)
    assert "the host is measured first" in caplog.text


def test_ratios_are_against_the_host_and_against_what_the_compiler_makes_of_it() -> None:
    rows = [
        Row("sdxl", "64x64", BASELINE, median_ms=48.0, relative_error=1.5e-3),
        Row("sdxl", "64x64", COMPILED, median_ms=32.0, relative_error=1e-3),
        Row("sdxl", "64x64", EAGER, median_ms=24.0, relative_error=1.2e-3),
        Row("sdxl", "72x72", EAGER, median_ms=24.0, relative_error=1.2e-3),
    ]
    compare(rows)
    assert [row.ratio for row in rows] == [1.0, 1.5, 2.0, None]
    assert [row.compiled_ratio for row in rows] == [pytest.approx(2 / 3), 1.0, pytest.approx(4 / 3), None]
    assert rows[2].host_errors == pytest.approx(0.8) and rows[3].host_errors is None
    line = report.markdown(measuring.HEADINGS, [row.cells() for row in rows]).splitlines()[-2]
    assert line == "| sdxl | 64x64 | onediff eager | 24.00 | 2.00 | 1.33 | 1.2e-03 | 0.80 |  |  |  |  |"


@pytest.mark.parametrize(
    ("variant", "reason"),
    [("host eager + CUDA graph", "CUDA graphs need a GPU"), ("onediff native", "native backend needs an NVIDIA GPU")],
)
def test_a_variant_that_the_machine_lacks_is_a_sentence_in_its_row(variant: str, reason: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    plan = Plan("tiny-sd15", [(64, 64)], [BASELINE, variant], 1, 77, torch.float32, 5)
    rows = measure(tiny(), plan)
    assert reason in rows[1].problem and rows[1].median_ms is None
    assert reason in report.markdown(measuring.HEADINGS, [row.cells() for row in rows])


def test_a_call_that_the_host_served_is_not_counted_as_ours() -> None:
    unet = tiny()
    own = Own(unet, "eager")
    own._settings = Settings(enabled=False)
    arguments = models.inputs(unet, 64, 64, 2, 77, torch.float32)
    with torch.no_grad():
        own(arguments)
    assert "own forward ran: OneDiff is switched off" in own.not_ours()


@pytest.mark.parametrize("content", [None, b"not a checkpoint"])
def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path, content: bytes | None) -> None:
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors could not be loaded as a UNet: ."):
        models.load_unet(path, CPU)
