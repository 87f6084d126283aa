"""Tuned choices: in memory, in the store, and what a strange store may hold."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from store_builders import opened

from lib_onediff.ops.attention import GEMM, TORCH, Attention, choice_name
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.store import history as history_module
from lib_onediff.store.history import History

STRANGE = [None, True, 7, "flash", ["flash"], {}, {"backend": None}, {"backend": ["flash"]}, {"backend": "warp drive"},
           {"backend": {"flash": 1}}, {"backend": "flash, as it was"}]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_module, "WRITE_AFTER_SECONDS", 0.05)


def cache_in(folder: Path) -> tuple[History, TuningCache]:
    history, tuning_cache = opened(folder), TuningCache()
    tuning_cache.attach(history.tuned, history.tune)
    return history, tuning_cache


def test_what_was_chosen_before_the_store_came_is_saved_and_counts_more(tmp_path: Path) -> None:
    _, earlier = cache_in(tmp_path)
    earlier.set("tile", {"block": [64, 128], "why": "größer"})
    earlier.set("layout", "nhwc")
    tuning_cache, history = TuningCache(), opened(tmp_path)
    tuning_cache.set("tile", 128)
    assert tuning_cache.get("tile") == 128 and tuning_cache.get("layout") is None
    tuning_cache.attach(history.tuned, history.tune)
    for cache in (tuning_cache, cache_in(tmp_path)[1]):
        assert cache.get("tile") == 128 and cache.get("layout") == "nhwc"


@pytest.mark.parametrize("value", STRANGE, ids=json.dumps)
def test_a_strange_choice_is_no_choice(tmp_path: Path, value: Any) -> None:
    narrow, wide = (2, 8, 64, 40), (1, 1, 64, 512)
    history = opened(tmp_path)
    for shape in (narrow, wide):
        history.tune(choice_name(shape, shape, torch.float16), value)
    attention = Attention(cache_in(tmp_path)[1])
    assert attention.pick(narrow, narrow, torch.float16) == TORCH
    assert attention.pick(wide, wide, torch.float16) == GEMM
