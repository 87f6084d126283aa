"""The benchmark on Forge Neo's backend, as far as it goes without a checkout of it."""
from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from lib_onediff.bench.forge_neo.__main__ import main, parse
from lib_onediff.bench.forge_neo.host import import_backend
from lib_onediff.bench.forge_neo.measure import LORA, START, After, Measured, OutOfTime, time_limit
from lib_onediff.bench.forge_neo.partial import Stage
from lib_onediff.bench.forge_neo.report import HEADINGS, cells, table
from lib_onediff.bench.forge_neo.variants import ALL, HOST, ONEDIFF, CannotRun, Failure, Sage


def row(variant: str, later: float, error: float, **others: str) -> Measured:
    after = {change: After(first_s=2 * later, later_s=later, step_ms=50.0, error=error,
                           peak_mib=5000.0) for change in (START, LORA)}
    return Measured("sdxl", variant, after, **others)


def test_both_models_and_all_variants_are_measured_unless_others_are_named() -> None:
    options = parse(["--forge-neo", "neo"])
    assert (options.models, options.variants, options.steps, options.later) == (["sd15", "sdxl"], list(ALL), 20, 5)
    chosen = parse(["--forge-neo", "neo", "--models", "sdxl", "--variants", "onediff", "--small"])
    assert (chosen.models, chosen.variants, chosen.steps) == (["sdxl"], [HOST, ONEDIFF], 2)


@pytest.mark.parametrize("wrong", [["--models", "flux"], ["--variants", "host,xformers"], []])
def test_what_it_does_not_know_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--forge-neo", "neo", *wrong] if wrong else [])
    assert "is none of" in capsys.readouterr().err or not wrong


def test_a_folder_without_neo_is_refused_in_one_line_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    paths, modules = list(sys.path), "modules" in sys.modules
    with pytest.raises(ImportError, match="no checkout"):
        import_backend(tmp_path, cpu=True)
    assert main(["--forge-neo", str(tmp_path), "--small"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert sys.path == paths and ("modules" in sys.modules) == modules


def test_ratios_and_errors_are_the_hosts_of_the_same_model() -> None:
    host, ours = row(HOST, 1.0, 2e-3), row(ONEDIFF, 0.5, 1e-3, note="why not faster")
    ours.after[START].first_routes = {"host": 2, "graph": 18}
    found = dict(zip(HEADINGS, cells(ours, host), strict=True))
    assert (found["first image s"], found["ms a step"], found["error x host"]) == ("1.00", "50.0", "0.50 / 0.50")
    assert found["remarks"] == "why not faster; start 2 host+18 graph" and found["peak MiB"] == "5000"
    ours.after[LORA].first_routes, ours.after[LORA].unsettled = {"host": 20}, [1.0]
    assert cells(ours, host)[-1].endswith(", LoRA 20 host and 1 images more until ready")
    assert cells(ours, host)[4] == "2.00" and cells(host, host)[12] == "2.0e-03 / 2.0e-03"
    assert len(table([host, ours]).splitlines()) == 4


def test_a_variant_that_was_stopped_says_where_and_shows_what_it_had() -> None:
    stopped = Measured("sdxl", "compile dynamic", problem="not done within 160 s (start)")
    line = cells(stopped, row(HOST, 1.0, 2e-3))
    assert len(line) == len(HEADINGS) and line[-1] == "not done within 160 s (start)" and not any(line[2:-1])


def test_errors_in_float32_are_told_as_they_are() -> None:
    assert "1.0e-06" in cells(row(ONEDIFF, 1.0, 1e-6), row(HOST, 1.0, 5e-8))[12]


def test_what_takes_too_long_is_stopped_past_who_swallows_exceptions() -> None:
    with pytest.raises(OutOfTime), time_limit(0.05):
        while True:
            try:
                time.sleep(5)
            except Exception:
                continue
    with time_limit(0.05):
        pass
    time.sleep(0.1)


def test_partial_loading_is_told_in_a_line() -> None:
    stage = Stage("sdxl", "ours, card full", 4.0, 2800.0, [9.0], {"host": 16}, "partial loading", True, 0.0, 1e-3)
    assert stage.line() == (
        "sdxl, ours, card full: 2800 MiB of weights loaded; 4.00 GiB were free; 9.00 s; 16 host; partial loading;"
        " the host's latent bit for bit; 1.0e-03 from the host's with room"
    )


def test_sage_says_how_many_calls_it_took() -> None:
    sage = Sage()
    sage._calls = Counter(sage=6, pytorch=2)
    assert sage.note() == "6 of 8 attention calls have a head size that it takes"
    assert Sage().note() == ""


def test_an_attention_that_fails_ends_its_variant_instead_of_being_replaced_unseen() -> None:
    logger = logging.Logger("attention")
    logger.addHandler(Failure())
    logger.info("Using SageAttention")
    with pytest.raises(CannotRun, match="^no kernel$"):
        logger.error("no kernel\nat line 3")
