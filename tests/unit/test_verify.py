"""The check of a first use, which compares our first output of a shape with the host's: which errors it accepts, when
it is needed, and that it restores random generators and the state of extensions' functions before the host runs."""
from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from builders import a_call, shared_unet
from torch import Tensor

from lib_onediff.core.key import Lossy, ShapeKey
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.table import ENOUGH, Entry, State
from lib_onediff.devices.oneflow.route import OneFlow
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.verify import HOST_NOT_FINITE, computed_twice, prove, rewinder_of, why_it_differs
from lib_onediff.store.history import History


def an_entry(dtype: torch.dtype = torch.float32, **more: object) -> Entry:
    """A new table entry of a shape. more: other fields of its ShapeKey."""
    unet = shared_unet("small")
    key = ShapeKey.of(FAMILIES.read(unet).architecture, dtype, a_call(unet), "eager")
    return Entry(replace(key, dtype=dtype, **more))


ONEFLOW = OneFlow(FAMILIES.output)


@pytest.mark.parametrize(("entry", "allowed", "passes", "fails"), [
    (an_entry(), 0.0, 4e-6, 6e-6), (an_entry(torch.float16), 0.0, 3e-3, 5e-3),
    (an_entry(torch.bfloat16), 0.0, 2e-2, 4e-2),
    # It may use float16 sums, and is not checked again when these are switched on.
    (an_entry(torch.float16), ONEFLOW.allowed_error(torch.float16), 5e-2, 7e-2),
    (an_entry(), ONEFLOW.allowed_error(torch.float32), 4e-6, 6e-6),
    (an_entry(torch.float16, lossy=Lossy("fp8")), 0.0, 0.11, 0.13),
])
def test_a_check_accepts_errors_up_to_the_limit_of_the_dtype_and_the_options(
    entry: Entry, allowed: float, passes: float, fails: float
) -> None:
    """passes, fails: relative errors just below and above the limit. allowed: an error that the backend may have
    although rounding does not explain it. The last entry is of an option that computes in 8 bits."""
    expected = torch.ones(64)
    assert why_it_differs(entry, expected * (1 + passes), lambda: expected, allowed=allowed) is None
    assert "rounding explains" in why_it_differs(entry, expected * (1 + fails), lambda: expected, allowed=allowed)


@pytest.mark.parametrize(("dtype", "moves", "passes", "fails"), [
    (torch.float32, 1e-7, 4e-6, 6e-6), (torch.float32, 1e-5, 2.9e-5, 3.1e-5), (torch.float32, 1.0, 9e-5, 1.1e-4),
    (torch.float32, float("nan"), 4e-6, 6e-6), (torch.float16, 2e-3, 5.5e-3, 6.5e-3),
    (torch.float16, 1.0, 9e-3, 1.1e-2), (torch.bfloat16, 1.5e-2, 4e-2, 5e-2), (torch.bfloat16, 1.0, 5e-2, 7e-2),
])
def test_a_check_accepts_more_where_the_network_amplifies_rounding(
    dtype: torch.dtype, moves: float, passes: float, fails: float
) -> None:
    """moves: the measured relative change of the network's output due to rounding. The limit for our error follows it
    between a least and a most value; without a number (NaN), the least one applies. passes, fails: relative errors just
    below and above the limit."""
    expected = torch.ones(64)
    entry = an_entry(dtype)
    assert why_it_differs(entry, expected * (1 + passes), lambda: expected, spread=lambda: moves) is None
    assert "rounding explains" in why_it_differs(entry, expected * (1 + fails), lambda: expected, spread=lambda: moves)


def test_the_effect_of_rounding_is_measured_only_for_errors_between_the_two_limits() -> None:
    """The measurement costs two forwards. An error below the least limit is accepted without it, and one above the
    largest limit is refused without it."""
    def spread() -> float:
        raise AssertionError("two forwards for nothing")

    expected = torch.ones(64)
    assert why_it_differs(an_entry(), expected * (1 + 1e-6), lambda: expected, spread=spread) is None
    assert "explains 1.0e-04" in why_it_differs(an_entry(), 2 * expected, lambda: expected, spread=spread)


def test_the_reason_of_a_failed_check_shows_a_larger_error_than_the_limit() -> None:
    """The limit is 1.6e-4: rounded to one digit, it would be shown as 2e-4, above the error."""
    expected = torch.ones(64, dtype=torch.float64)
    reason = why_it_differs(an_entry(), expected * (1 + 1.7e-4), lambda: expected, allowed=1.6e-4)
    error, limit = map(float, re.findall(r"\d\.\de-\d\d|\de-\d\d", str(reason)))
    assert error > limit, reason


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_a_check_fails_if_either_output_is_not_finite(worst: float) -> None:
    assert "rounding explains" in why_it_differs(an_entry(), torch.full((64,), worst), lambda: torch.ones(64))
    assert why_it_differs(an_entry(), torch.ones(64), lambda: torch.full((64,), worst)) == HOST_NOT_FINITE


# The random generator of an extension, such as HyperTile's.
OWN = random.Random()
PATCHED = {"patches": ("patches[attn2_patch] by somebody",)}


def begin_anew() -> None:
    for generator in (torch.manual_seed, random.seed, numpy.random.seed, OWN.seed):
        generator(1)


def next_numbers() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand()), OWN.random()


def test_checks_restore_the_random_generators_before_the_host_runs() -> None:
    """The generators of torch, Python, NumPy, and an extension (OWN). computed_twice() calls functions of extensions
    twice and returns None if their results differ; prove() compares our output with the host's. After both, the
    generators give the numbers that they would have given before."""
    def compute() -> Tensor:
        return torch.randn(8) + random.random() + numpy.random.rand()

    begin_anew()
    expected = next_numbers()
    begin_anew()
    assert torch.is_tensor(computed_twice(an_entry(**PATCHED), compute))
    counter = itertools.count(1)
    begin_anew()
    assert computed_twice(an_entry(**PATCHED), lambda: compute() * next(counter)) is None
    assert next_numbers() == expected

    def host() -> Tensor:
        return compute() + OWN.random()

    begin_anew()
    with pytest.raises(Refusal, match="output differs too much from the one without OneDiff"):
        prove(an_entry(**PATCHED), torch.zeros(8), History(), host, None, False, (host,))
    assert next_numbers() == expected


def counting(counter: Any) -> Callable[[], int]:
    """A forward as Regional Prompter's: a closure over an object that counts its calls."""

    def forward() -> int:
        counter.count += 1
        return counter.count

    return forward


@pytest.mark.parametrize(("module", "is_set_back"), [
    # Its own, one of its package's, and a script, which a WebUI names by its file.
    (__name__, True), (f"{__name__}.more", True), ("rp.py", True),
    ("somebody_else", False),
])
def test_a_check_sets_back_the_counters_that_an_extension_has_in_its_own_objects(
    module: str, is_set_back: bool
) -> None:
    """The extension's function, of this test's module, counts its calls in an object, and must not count a check.
    module: the module of the object's class. is_set_back: whether it belongs to the extension. Attributes that are not
    numbers are not set back."""
    counter = type("Counter", (), {"__module__": module})()
    counter.count = 0
    counter.name = "kept"
    forward = counting(counter)
    forward()
    rewind = rewinder_of([forward])
    assert forward() == 2
    counter.name = "changed"
    rewind()
    assert forward() == (2 if is_set_back else 3) and counter.name == "changed"


class Recalled(History):
    """A history that has a verdict on every entry, or on none."""

    def __init__(self, is_known: bool) -> None:
        super().__init__()
        self.is_known = is_known

    def recall(self, entry: Entry) -> bool:
        return self.is_known


@pytest.mark.parametrize(("recalled", "state", "patches", "is_warm_up", "is_compared"), [
    (False, State.COLD, False, False, True), (True, State.COLD, False, False, False),
    (True, State.PROVED, False, True, False),
    # PROVED without a verdict in the history: compared with noise in a warm-up only, and so once more in an image.
    (False, State.PROVED, False, False, True), (False, State.COLD, False, True, True),
    # Functions of other extensions may compute something else each time.
    (True, State.PROVED, True, False, True), (True, State.PROVED, True, True, True),
])
def test_an_output_is_compared_with_the_host_unless_the_history_has_a_verdict_on_it(
    recalled: bool, state: State, patches: bool, is_warm_up: bool, is_compared: bool
) -> None:
    """recalled: whether the history has the verdict that our output is close to the host's. state: the state of the
    entry; PROVED if an output was compared in this process. patches: whether functions of other extensions are called:
    such an output is always compared. is_warm_up: whether the call is part of a warm-up, not of an image."""
    entry = an_entry(**(PATCHED if patches else {}))
    calls = []
    entry.state = state

    def host() -> Tensor:
        calls.append(1)
        return torch.ones(8)

    prove(entry, torch.ones(8), Recalled(recalled), host, None, is_warm_up, times_host=False)
    assert bool(calls) == is_compared and entry.state is State.PROVED


@pytest.mark.parametrize(("is_warm_up", "times_host", "is_settled", "is_timed"), [
    (True, True, False, True), (False, True, False, False), (True, False, False, False), (True, True, True, False),
])
def test_a_host_whose_output_needs_no_check_is_timed_only_in_a_warm_up(
    is_warm_up: bool, times_host: bool, is_settled: bool, is_timed: bool
) -> None:
    """The history has the verdict, so that no check is needed. Timing the host would delay an image. times_host:
    whether the time is wanted. is_settled: whether it is known from an earlier process."""
    entry = an_entry()
    calls = []
    if is_settled:
        entry.host.remembered = 5.0

    def host() -> Tensor:
        calls.append(1)
        return torch.ones(8)

    prove(entry, torch.ones(8), Recalled(True), host, None, is_warm_up, times_host=times_host)
    assert (len(calls) >= ENOUGH) if is_timed else not calls
    assert (entry.host.settled_ms is not None) == (is_timed or is_settled)


def test_if_the_host_output_is_not_finite_ours_is_used_if_it_is_finite() -> None:
    """If neither is finite, the check refuses our output."""
    black = lambda: torch.full((8,), float("nan"))  # noqa: E731
    entry = an_entry()
    prove(entry, torch.ones(8), History(), black, None, False)
    assert entry.state is State.PROVED
    with pytest.raises(Refusal, match=re.escape(HOST_NOT_FINITE)):
        prove(an_entry(), black(), History(), black, None, False)
