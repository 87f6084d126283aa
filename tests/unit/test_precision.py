"""torch's switches for precision (TF32, sums in float16) are set around our calls, and restored afterwards."""
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch

from lib_onediff.core import precision
from lib_onediff.core.precision import (
    FP16_REDUCTION,
    HALF_SUMS,
    SWITCHES,
    TF32_CONVOLUTION,
    TF32_MATMUL,
    applied,
    flags_for,
    switch_of,
)
from lib_onediff.core.settings import Settings

GPU = torch.device("cuda", 0)
HALF = Settings(accumulation="half")
# The other switches keep the host's values.
WRITTEN = [name for name in (HALF_SUMS, TF32_MATMUL, TF32_CONVOLUTION) if SWITCHES[name].read() is not None]
HAS_NEWER_TF32 = switch_of(torch.backends.cuda.matmul, "fp32_precision") is not None


def standing() -> dict[str, Any]:
    """The present values of all switches, read in every way that torch has."""
    matmul = torch.backends.cuda.matmul
    convolutions = getattr(torch.backends.cudnn, "conv", None)
    found: dict[str, Any] = {name: switch.state() for name, switch in SWITCHES.items()}
    ways = {
        "matmul tf32": lambda: matmul.allow_tf32, "cudnn tf32": lambda: torch.backends.cudnn.allow_tf32,
        "matmul fp32": lambda: matmul.fp32_precision, "convolution fp32": lambda: convolutions.fp32_precision,
        "matmul precision": torch.get_float32_matmul_precision,
    }
    for name, way in ways.items():
        try:
            found[name] = way()
        except (AttributeError, AssertionError, RuntimeError) as error:
            found[name] = type(error)
    return found


@pytest.fixture(autouse=True)
def torch_as_found() -> Iterator[None]:
    before = {name: SWITCHES[name].state() for name in WRITTEN}
    yield
    for name, state in before.items():
        SWITCHES[name].restore(state)


# --- switches are set and restored ------------------------------------------------------------------------------------


MATMUL = torch.backends.cuda.matmul
CUDNN = torch.backends.cudnn
WAYS_OF_HOSTS: list[Callable[[], object]] = [
    lambda: None, lambda: setattr(MATMUL, "allow_tf32", True), lambda: setattr(CUDNN, "allow_tf32", False),
    lambda: torch.set_float32_matmul_precision("high"),
]
if HAS_NEWER_TF32:
    WAYS_OF_HOSTS += [
        lambda: setattr(MATMUL, "fp32_precision", "ieee"), lambda: setattr(MATMUL, "fp32_precision", "tf32"),
        lambda: setattr(CUDNN.conv, "fp32_precision", "ieee"), lambda: setattr(CUDNN.conv, "fp32_precision", "tf32"),
    ]


@pytest.mark.parametrize("way", WAYS_OF_HOSTS)
def test_the_hosts_switches_are_restored_after_our_calls_and_after_an_exception(way: Callable[[], object]) -> None:
    """way: a way in which a host sets torch's switches. standing() reads the switches in every way that torch has."""
    way()
    before = standing()
    for value, fault in product((True, False), (None, RuntimeError("a fault"), KeyboardInterrupt())):
        with contextlib.suppress(RuntimeError, KeyboardInterrupt), applied(tuple((name, value) for name in WRITTEN)):
            assert all(SWITCHES[name].read() is value for name in WRITTEN)
            if fault is not None:
                raise fault
        assert standing() == before


@pytest.mark.skipif(not HAS_NEWER_TF32, reason="PyTorch has fp32_precision from 2.9 on")
def test_a_switch_that_inherits_a_wider_setting_still_inherits_it_afterwards() -> None:
    """torch.backends.fp32_precision applies to products where their own switch is "none"."""
    generic = torch.backends.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "none"
        torch.backends.fp32_precision = "tf32"
        with applied(((TF32_MATMUL, False),)):
            assert SWITCHES[TF32_MATMUL].read() is False
        assert SWITCHES[TF32_MATMUL].read() is True
        torch.backends.fp32_precision = "ieee"
        assert SWITCHES[TF32_MATMUL].read() is False
    finally:
        torch.backends.fp32_precision = generic


def test_a_switch_that_cannot_be_written_leaves_all_switches_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing a TF32 switch raises; those that were written before it must be restored."""
    before = standing()
    monkeypatch.setattr(precision.Tf32Switch, "write", lambda self, value: 1 / 0)
    with pytest.raises(ZeroDivisionError), applied(tuple((name, not SWITCHES[name].read()) for name in WRITTEN)):
        raise AssertionError("not reached")
    monkeypatch.undo()
    assert standing() == before


def test_threads_set_switches_one_after_the_other() -> None:
    """If two threads set switches at once, the one that ends last would restore the other's values. seen: the WebUI's
    value as the second thread reads it, while the first has set the opposite."""
    before = standing()
    first_is_in = threading.Event()
    seen = []
    other = ((TF32_MATMUL, not SWITCHES[TF32_MATMUL].read()),)

    def first() -> None:
        with applied(other):
            first_is_in.set()
            time.sleep(0.05)

    def second() -> None:
        first_is_in.wait()
        seen.append(dict(flags_for(Settings(), torch.float32, GPU))[TF32_MATMUL])
        with applied(other):
            time.sleep(0.02)

    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(first), threads.submit(second)]:
            ended.result()
    assert standing() == before and seen == [not other[0][1]]


# --- the switches for each setting ------------------------------------------------------------------------------------


def test_accumulation_full_keeps_the_switches_of_the_webui_and_half_sets_the_faster_ones() -> None:
    """flags_for returns the switches that are set around a call. With both values of the setting, the switch for
    float16 reductions is the WebUI's."""
    flags = lambda **values: dict(flags_for(Settings(**values), torch.float32, GPU))  # noqa: E731
    for value in (True, False):
        torch.backends.cuda.matmul.allow_tf32 = value
        assert flags()[TF32_MATMUL] is value
    assert flags(accumulation="half") == {TF32_MATMUL: True, TF32_CONVOLUTION: True}
    found = SWITCHES[FP16_REDUCTION].read()
    of_half = dict(flags_for(HALF, torch.float16, GPU))
    assert of_half[FP16_REDUCTION] is found and of_half.get(HALF_SUMS, True)
