"""The benchmark of two GPUs: one card beside two, here this CPU twice."""
from __future__ import annotations

import pytest
import torch
from two_cpus import TwoCpus

from lib_onediff.bench.clock import CALLS_IN_TURN
from lib_onediff.bench.options import parse
from lib_onediff.bench.two_gpus import HEADINGS, two_gpus
from lib_onediff.runtime.runtime import runtime


@pytest.mark.parametrize(("cards", "said"), [
    (TwoCpus(), "cpu + cpu:1, 1+1 rows"), (TwoCpus([]), "this UNet is on the CPU"),
])
def test_a_row_has_both_in_turn_and_says_what_computed(
    cards: TwoCpus, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime.two_gpus, "cards", cards)
    options = parse(["--two-gpus", "--models", "tiny-sd15", "--sizes", "64x64", "--runs", "2", "--steps", "2"])
    assert options.two_gpus
    (row,) = two_gpus("tiny-sd15", options, torch.device("cpu"))
    assert row.cards == said and row.largest_difference < 1e-3
    assert {len(times) for times in row.calls_ms} == {CALLS_IN_TURN} and {len(times) for times in row.images_s} == {2}
    assert len(row.cells()) == len(HEADINGS) and min(*row.call_ms, *row.image_s) > 0
    assert len(runtime.services.managed) == 0 and runtime.two_gpus.bytes() == 0
