"""Tuned choices (kernels and launch sizes chosen by measurement): kept in memory and in the store, ignored if invalid,
and valid for one GPU model alone."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from store_builders import opened

from lib_onediff.core.card import TuningCache
from lib_onediff.core.leaves import NORMED
from lib_onediff.devices.cuda.kernels.launch_config import LAYER_NORM, Launches, choice_name
from lib_onediff.devices.cuda.low_bit.choice import LowBit
from lib_onediff.devices.torch.attention import FLASH, GEMM, TORCH, Attention, class_of, kernel_of
from lib_onediff.store.history import History
from lib_onediff.weights.low_bit import FP8, INT8, Product

STRANGE = [None, True, 7, "flash", {}, [], [None], [["flash"]], ["warp drive"], [{"flash": 1}], ["flash, as it was"]]


def cache_in(folder: Path) -> tuple[History, TuningCache]:
    history = opened(folder)
    tuning_cache = TuningCache()
    tuning_cache.attach(history.tuned, history.tune)
    return history, tuning_cache


def test_choices_made_before_the_store_was_opened_are_saved_and_take_precedence(tmp_path: Path) -> None:
    """The store has two choices of an earlier process, "tile" and "layout". "tile" is chosen anew before the store is
    attached. The next process reads the new one."""
    _, earlier = cache_in(tmp_path)
    earlier.set("tile", {"block": [64, 128], "why": "größer"})
    earlier.set("layout", "nhwc")
    tuning_cache = TuningCache()
    history = opened(tmp_path)
    tuning_cache.set("tile", 128)
    assert tuning_cache.get("tile") == 128 and tuning_cache.get("layout") is None
    tuning_cache.attach(history.tuned, history.tune)
    for cache in (tuning_cache, cache_in(tmp_path)[1]):
        assert cache.get("tile") == 128 and cache.get("layout") == "nhwc"


@pytest.mark.parametrize("value", STRANGE, ids=json.dumps)
def test_an_invalid_stored_choice_of_an_attention_kernel_is_ignored(tmp_path: Path, value: Any) -> None:
    """value: what is stored in place of a list with a known kernel's name. The default is then used: TORCH for narrow
    heads, GEMM for wide ones."""
    narrow = (2, 8, 64, 40)
    wide = (1, 1, 64, 512)
    history = opened(tmp_path)
    for shape in (narrow, wide):
        history.tune(choice_name(kernel_of(shape), class_of(shape, shape), torch.float16), value)
    attention = Attention(Launches(cache_in(tmp_path)[1]))
    assert attention.pick(narrow, narrow, torch.float16) == TORCH
    assert attention.pick(wide, wide, torch.float16) == GEMM


HALF = torch.float16
SHAPE = (2, 8, 4096, 64)
PRODUCT = Product(8, 16, 32, NORMED)
SECOND = torch.device("cuda", 1)


class TwoCards:
    """Stands for two GPUs. current: the index of torch's current device."""

    def __init__(self) -> None:
        self.current = 0

    @contextlib.contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        before = self.current
        self.current = device.index
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> TwoCards:
    """Two GPUs, "Large" and "Small", in place of torch.cuda's."""
    cards = TwoCards()
    patched: dict[str, Any] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "current_device": lambda: cards.current,
        "get_device_name": lambda device: ("Large", "Small")[cards.current if device.index is None else device.index],
        "device": cards.using,
    }
    for name, function in patched.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return cards


def test_choices_apply_to_the_gpu_model_that_was_measured(cards: TwoCards) -> None:
    """Three choices are made by measurement on the first GPU, "Large". With the second GPU, "Small", as the current
    device, the defaults are chosen. The names in the store contain that of the GPU."""
    cache = TuningCache()
    launches = Launches(cache)
    products = LowBit(cache, launches)
    attention = Attention(launches)

    def choices() -> tuple[object, ...]:
        return (
            launches.of(LAYER_NORM, "64", HALF), attention.pick(SHAPE, SHAPE, HALF),
            products.best(PRODUCT, HALF, [FP8, INT8]),
        )

    unmeasured = choices()
    launches.choose(LAYER_NORM, "64", HALF, LAYER_NORM.candidates[1])
    launches.choose(kernel_of(SHAPE), class_of(SHAPE, SHAPE), HALF, (FLASH,))
    products.note(PRODUCT, HALF, FP8, 2.0, 1.0)
    measured = LAYER_NORM.candidates[1], FLASH, FP8
    for _ in range(2):
        assert choices() == measured
        with cards.using(SECOND):
            assert choices() == unmeasured
    saved: dict[str, object] = {}
    cache.attach(dict, saved.__setitem__)
    assert saved and all(name.endswith(", Large") for name in saved)
