"""What "auto" means where OneDiff's own kernels cannot run: measured with real calls, and kept."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, relative_error, served
from inductor_fixtures import without_our_files
from test_inductor import LACK, SMALL_SD1

import lib_onediff
from lib_onediff.engines import EAGER, INDUCTOR, Candidates
from lib_onediff.engines import auto_backend as auto_choice
from lib_onediff.engines.auto_backend import ENOUGH_CALLS, AutoBackend, name_for
from lib_onediff.engines.inductor.compiler import Inductor
from lib_onediff.ops.inductor.compiled import CompiledRegion
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.runtime.call_stats import GRAPH
from lib_onediff.runtime.fallback import FallbackChain
from lib_onediff.runtime.runtime import runtime

CPU = torch.device("cpu")
PLAIN = Candidates((EAGER,), "there is no GPU")


@pytest.fixture
def tuning_cache(compilers_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TuningCache]:
    without_our_files(compilers_store, monkeypatch)
    tuning_cache = TuningCache()
    monkeypatch.setattr(runtime.operators, "auto", AutoBackend(tuning_cache))
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(runtime.operators.attention, helpers=0))
    yield tuning_cache
    runtime.operators.inductor.finish()


def backends_of(count: int, unet: Any) -> list[str]:
    used = []
    for seed in range(count):
        call = a_call(unet, seed=seed)
        runtime.operators.inductor.finish()
        with runtime.wait_for_compile():
            assert relative_error(served(unet, call), diffusers_output(unet, call)) < 1e-5
        used.append(str(lib_onediff.status()["backend"]))
    return used


@pytest.mark.skipif(LACK is not None, reason=LACK or "")
def test_both_make_some_calls_and_the_faster_one_makes_the_rest(
    tuning_cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(auto_choice.WORTH_LOOKING_MS, "cpu", 0.0)
    # Compiled for another, so that auto need not wait, which it never does.
    assert backends_of(1, lib_onediff.compile_unet(diffusers_unet(**SMALL_SD1), backend=INDUCTOR)) == [INDUCTOR]
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_SD1), backend="auto")
    # The first call of a shape is checked, and not timed.
    used = backends_of(3 * ENOUGH_CALLS + 4, unet)
    changed = used.index(INDUCTOR)
    assert ENOUGH_CALLS <= changed <= ENOUGH_CALLS + 2 and set(used[:changed]) == {EAGER}
    kept = tuning_cache.get(name_for(CPU))
    faster = INDUCTOR if kept["times"][INDUCTOR] < 0.95 * kept["times"][EAGER] else EAGER
    assert kept["backend"] == faster == used[-1]
    sentence = lib_onediff.status()["auto"]
    assert sentence.startswith(f"auto is {faster} here: ") and sentence.endswith("measured once on this machine")
    # Another process of this machine begins with it.
    monkeypatch.setattr(runtime.operators, "auto", AutoBackend(tuning_cache))
    assert backends_of(1, unet) == [faster]


def test_calls_that_take_no_time_are_not_worth_a_compiler(
    tuning_cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(auto_choice.WORTH_LOOKING_MS, "cpu", 60_000.0)
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_SD1), backend="auto")
    assert set(backends_of(ENOUGH_CALLS + 3, unet)) == {EAGER}
    assert runtime.operators.inductor.status()["graphs"] == 0
    assert lib_onediff.status()["auto"] == ""


def test_calls_that_a_graph_serves_count_too(tuning_cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    serve, noted = FallbackChain.serve, []
    monkeypatch.setattr(FallbackChain, "serve", lambda self, *given: serve(self, *given)._replace(route=GRAPH))
    monkeypatch.setattr(runtime.operators.auto, "note", lambda entry, call: noted.append(entry))
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_SD1), backend="auto")
    backends_of(3, unet)
    # The first is the one that is checked.
    assert len(noted) == 2


@pytest.mark.skipif(LACK is not None, reason=LACK or "")
def test_where_inductor_cannot_compile_it_is_done_without(
    tuning_cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(auto_choice.WORTH_LOOKING_MS, "cpu", 0.0)

    def broken(region: CompiledRegion, shapes: Any, path: Path, digest: str | None = None) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(runtime.operators.inductor, "why_not", lambda device: None)
    monkeypatch.setattr(CompiledRegion, "compile", broken)
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_SD1), backend="auto")
    assert set(backends_of(ENOUGH_CALLS + 4, unet)) == {EAGER}
    assert "No space left on device" in lib_onediff.status()["auto"]


@pytest.mark.parametrize(
    "nonsense", [None, 7, "inductor", {}, {"backend": INDUCTOR}, {"backend": "x", "times": {INDUCTOR: 1, EAGER: 2}},
                 {"backend": INDUCTOR, "times": {INDUCTOR: "1", EAGER: 2}}, {"backend": INDUCTOR, "times": [1, 2]}],
)
def test_a_store_that_anybody_may_have_written(nonsense: Any) -> None:
    tuning_cache = TuningCache()
    tuning_cache.set(name_for(CPU), nonsense)
    auto = AutoBackend(tuning_cache)
    unet = diffusers_unet(**SMALL_SD1)
    assert auto.candidates(PLAIN, a_call(unet)) == PLAIN
    assert auto.sentence() == "" and not auto.is_inductor(CPU)
