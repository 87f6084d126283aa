"""Later calls of a sampling on two GPUs are replayed by plans (runtime/plan.py), which earlier calls have made, and
never with old weights or inputs. Two devices of the CPU stand for the GPUs (two_cpus.py).

traits: whether the host passes the prompt in new tensors at every call, as WebUIs do, or in the same ones.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, diffusers_unet
from graph_builders import PretendedGraphs
from ladder_builders import EAGER, NATIVE
from samplings import EVERY_THIRD, STEPS, WEBUI, evenly_spaced, few_steps_suffice  # noqa: F401
from torch import Tensor
from two_cpus import SECOND, OnTwoGpus, TwoCpus, change_by_data, change_in_place, change_one_layer, close, host_output

from lib_onediff.core.call import Call
from lib_onediff.core.fields import signature_function
from lib_onediff.core.settings import Settings
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.card_route import OneCard
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.two_gpus import Pair
from lib_onediff.weights.scan import HostTraits

HOSTS = pytest.mark.parametrize("traits", [WEBUI, HostTraits()], ids=["new tensors at every call", "the same tensors"])


@pytest.fixture
def rows_without_plan(monkeypatch: pytest.MonkeyPatch, pretended: PretendedGraphs) -> list[int]:
    """The number of rows of each part of a call that a GPU computed without a plan."""
    parts: list[int] = []
    serve_without_plan = OneCard.serve_without_plan

    def counting(self: OneCard, call: UNetCall, host: Any) -> Any:
        parts.append(call.latent.shape[0])
        return serve_without_plan(self, call, host)

    monkeypatch.setattr(OneCard, "serve_without_plan", counting)
    return parts


@pytest.fixture
def signatures_differ_by_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs on the second GPU have another signature, as on real GPUs."""
    on_second: list[Tensor] = []
    rows_of_pair = Pair.rows

    def rows(self: Pair, call: Call, rows: slice) -> Call:
        moved = rows_of_pair(self, call, rows)
        on_second.append(moved.latent)
        return moved

    def with_card(kind: Any) -> Callable[[Call], Any]:
        of_kind = signature_function(kind)
        return lambda call: (of_kind(call), any(call.latent is one for one in on_second))

    monkeypatch.setattr(Pair, "rows", rows)
    for module in ("core.call", "runtime.plan"):
        monkeypatch.setattr(f"lib_onediff.{module}.signature_function", with_card)


@pytest.fixture
def on_two_gpus(monkeypatch: pytest.MonkeyPatch, signatures_differ_by_gpu: None) -> Callable[..., OnTwoGpus]:
    """A function that makes a small SDXL UNet served on two GPUs with pretended graphs, and begins a sampling."""

    def make(traits: HostTraits = WEBUI, **options: Any) -> OnTwoGpus:
        cards = TwoCpus()
        unet = diffusers_unet(**SMALL_XL)
        monkeypatch.setattr(runtime.two_gpus, "cards", cards)
        runtime.adopt(unet, Settings(**{"backend": NATIVE, "second_gpu": "auto", **options}), traits)
        served = OnTwoGpus(runtime, unet, cards)
        served.begin()
        return served

    return make


def calls_of(served: OnTwoGpus, traits: HostTraits, count: int, start: int = 0) -> list[UNetCall]:
    """The calls of `count` steps with one prompt. start: the first step."""
    first = served.call(STEPS[0])
    calls = [served.call(STEPS[step]) for step in range(start, start + count)]
    if traits is WEBUI:
        return calls
    return [replace(call, context=first.context, y=first.y) for call in calls]


def ready(served: OnTwoGpus, traits: HostTraits) -> list[UNetCall]:
    """Eight calls, of which four were made, so that both GPUs have plans for the others."""
    calls = calls_of(served, traits, 8)
    for call in calls[:4]:
        assert close(served.run(call), host_output(served, call))
    assert served.runtime.status()["route"] == "graph", served.runtime.status()["reason"]
    return calls


@HOSTS
def test_later_calls_are_replayed_by_plans_on_both_gpus_and_the_second_gpu_starts_first(
    traits: HostTraits, rows_without_plan: list[int], on_two_gpus: Callable[..., OnTwoGpus], pretended: PretendedGraphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No part of these calls is computed without a plan. The second GPU starts first, so that both compute at the same
    time. Outputs are compared with diffusers' own."""
    served = on_two_gpus(traits)
    calls = ready(served, traits)
    rows_without_plan.clear()
    order: list[str] = []
    monkeypatch.setattr(pretended, "before_replay", lambda: order.append(str(len(served.cards.launched))))
    for call in calls[4:]:
        order.clear()
        served.cards.launched.clear()
        assert close(served.run(call), host_output(served, call))
        # The second GPU's replay comes inside of its own device context, the first one's after it.
        assert order == ["1", "1"] and served.cards.launched == [SECOND]
    assert rows_without_plan == []
    assert served.second["split"] == "cpu + cpu:1, 1+1 rows" and served.runtime.call_stats.last_call.route == "graph"


def change_by_loading(unet: Any) -> None:
    unet.load_state_dict(diffusers_unet(7, **SMALL_XL).state_dict())


@HOSTS
@pytest.mark.parametrize("begins", [True, False], ids=["between samplings", "within a sampling"])
def test_no_replay_has_old_weights_or_an_old_prompt(
    begins: bool, traits: HostTraits, rows_without_plan: list[int], on_two_gpus: Callable[..., OnTwoGpus]
) -> None:
    """Outputs after each of four changes of the weights, and with another prompt, are compared with diffusers' own.
    Some changes are visible in torch's counts of edits, others only in values or addresses. begins: a sampling begins
    after each change."""
    served = on_two_gpus(traits)
    calls = ready(served, traits)
    changes = change_in_place, change_one_layer, change_by_data, change_by_loading
    for number, (call, change) in enumerate(zip(calls[4:], changes, strict=True)):
        with torch.no_grad():
            change(served.unet)
        if begins:
            served.begin()
        other = replace(call, context=call.context.flip(1).roll(number, 2))
        for one in (call, other, call):
            assert close(served.run(one), host_output(served, one)) and served.second["split"]


@HOSTS
def test_switching_the_second_gpu_off_or_on_takes_effect_at_the_next_call(
    traits: HostTraits, rows_without_plan: list[int], on_two_gpus: Callable[..., OnTwoGpus]
) -> None:
    """The second GPU's copy of the weights is freed when it is switched off, and made again when it is switched on."""
    served = on_two_gpus(traits)
    calls = ready(served, traits)
    known = served.runtime.services.networks[served.unet]
    on = known.settings
    off = replace(known.settings, second_gpu="off")
    for settings, split in ((off, False), (on, True), (off, False)):
        known.settings = settings
        for call in calls[4:]:
            assert close(served.run(call), host_output(served, call))
            assert bool(served.second["split"]) is split
        assert bool(served.copies) is split and bool(served.second["bytes"]) is split


def test_full_and_cached_passes_of_deepcache_are_replayed_on_both_gpus(
    rows_without_plan: list[int], on_two_gpus: Callable[..., OnTwoGpus]
) -> None:
    """Outputs are compared with those of DeepCache on one GPU, without graphs."""
    served = on_two_gpus(**EVERY_THIRD)
    one = OnTwoGpus.of(SMALL_XL, second_gpu="off", backend=EAGER, **EVERY_THIRD)
    for _ in range(2):
        served.begin()
        one.begin()
        for time in STEPS:
            call = served.call(time)
            assert close(served.run(call), one.run(call))
            assert served.second["split"]
    assert served.runtime.status()["route"] == "graph"


def test_after_an_edit_of_the_weights_deepcache_computes_a_full_pass_on_both_gpus(
    rows_without_plan: list[int], on_two_gpus: Callable[..., OnTwoGpus]
) -> None:
    """Without the edit, the eighth step would be a cached pass, which has features of the old weights. The output is
    compared with diffusers' own with the new weights."""
    served = on_two_gpus(**EVERY_THIRD)
    calls = calls_of(served, WEBUI, 8)
    for call in calls[:7]:
        served.run(call)
    with torch.no_grad():
        change_in_place(served.unet)
    assert close(served.run(calls[7]), host_output(served, calls[7])) and served.second["split"]
