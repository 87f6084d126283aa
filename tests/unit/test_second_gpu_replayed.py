"""Later calls of a sampling on two GPUs are replayed by plans, the second GPU's first, and nothing stale is
replayed."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, diffusers_unet
from graph_builders import PretendedGraphs
from ladder_builders import EAGER, NATIVE
from samplings import EVERY_THIRD, STEPS, WEBUI, equal_distances, few_steps_suffice  # noqa: F401
from torch import Tensor
from two_cpus import SECOND, Image, TwoCpus, change_by_data, change_in_place, change_one_layer, exact, near

from lib_onediff.core.call import Call
from lib_onediff.core.fields import signature_function
from lib_onediff.core.settings import Settings
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.card_route import OneCard
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.two_gpus import Pair
from lib_onediff.weights.scan import HostTraits

HOSTS = pytest.mark.parametrize("traits", [WEBUI, HostTraits()], ids=["new tensors at every call", "the same prompt"])


@pytest.fixture
def found_out(monkeypatch: pytest.MonkeyPatch, pretended: PretendedGraphs) -> list[int]:
    """The rows of every part of a call that had no plan."""
    parts: list[int] = []
    serve_without_plan = OneCard.serve_without_plan

    def counting(self: OneCard, call: UNetCall, host: Any) -> Any:
        parts.append(call.latent.shape[0])
        return serve_without_plan(self, call, host)

    monkeypatch.setattr(OneCard, "serve_without_plan", counting)
    return parts


@pytest.fixture
def cards_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
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
def image_of(monkeypatch: pytest.MonkeyPatch, cards_are_told_apart: None) -> Callable[..., Image]:
    def make(traits: HostTraits = WEBUI, **options: Any) -> Image:
        cards = TwoCpus()
        unet = diffusers_unet(**SMALL_XL)
        monkeypatch.setattr(runtime.two_gpus, "cards", cards)
        runtime.adopt(unet, Settings(**{"backend": NATIVE, "second_gpu": "auto", **options}), traits)
        image = Image(runtime, unet, cards)
        image.begin()
        return image

    return make


def calls_of(image: Image, traits: HostTraits, count: int, start: int = 0) -> list[UNetCall]:
    """The calls of some steps, with one prompt."""
    first = image.call(STEPS[0])
    calls = [image.call(STEPS[step]) for step in range(start, start + count)]
    if traits is WEBUI:
        return calls
    return [replace(call, context=first.context, y=first.y) for call in calls]


def ready(image: Image, traits: HostTraits) -> list[UNetCall]:
    """Calls for which both GPUs have plans."""
    calls = calls_of(image, traits, 8)
    for call in calls[:4]:
        assert near(image.run(call), exact(image, call))
    assert image.runtime.status()["route"] == "graph", image.runtime.status()["reason"]
    return calls


@HOSTS
def test_later_calls_are_looked_up_on_both_cards_the_second_first(
    traits: HostTraits, found_out: list[int], image_of: Callable[..., Image], pretended: PretendedGraphs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = image_of(traits)
    calls = ready(image, traits)
    found_out.clear()
    order: list[str] = []
    monkeypatch.setattr(pretended, "before_replay", lambda: order.append(str(len(image.cards.launched))))
    for call in calls[4:]:
        order.clear()
        image.cards.launched.clear()
        assert near(image.run(call), exact(image, call))
        # The second GPU's replay comes inside of its own device context, the first one's after it.
        assert order == ["1", "1"] and image.cards.launched == [SECOND]
    assert found_out == []
    assert image.second["split"] == "cpu + cpu:1, 1+1 rows" and image.runtime.call_stats.last_call.route == "graph"


def change_by_loading(unet: Any) -> None:
    unet.load_state_dict(diffusers_unet(7, **SMALL_XL).state_dict())


@HOSTS
@pytest.mark.parametrize("begins", [True, False], ids=["between samplings", "within a sampling"])
def test_nothing_stale_is_replayed(
    begins: bool, traits: HostTraits, found_out: list[int], image_of: Callable[..., Image]
) -> None:
    """Neither stale weights nor a stale prompt."""
    image = image_of(traits)
    calls = ready(image, traits)
    changes = change_in_place, change_one_layer, change_by_data, change_by_loading
    for number, (call, change) in enumerate(zip(calls[4:], changes, strict=True)):
        with torch.no_grad():
            change(image.unet)
        if begins:
            image.begin()
        other = replace(call, context=call.context.flip(1).roll(number, 2))
        for one in (call, other, call):
            assert near(image.run(one), exact(image, one)) and image.second["split"]


@HOSTS
def test_switching_the_second_gpu_off_and_on_counts_at_the_next_call(
    traits: HostTraits, found_out: list[int], image_of: Callable[..., Image]
) -> None:
    image = image_of(traits)
    calls = ready(image, traits)
    known = image.runtime.services.networks[image.unet]
    on = known.settings
    off = replace(known.settings, second_gpu="off")
    for settings, split in ((off, False), (on, True), (off, False)):
        known.settings = settings
        for call in calls[4:]:
            assert near(image.run(call), exact(image, call))
            assert bool(image.second["split"]) is split
        assert bool(image.copies) is split and bool(image.second["bytes"]) is split


def test_deepcache_replays_both_passes_on_both_cards(found_out: list[int], image_of: Callable[..., Image]) -> None:
    image = image_of(**EVERY_THIRD)
    one = Image.of(SMALL_XL, second_gpu="off", backend=EAGER, **EVERY_THIRD)
    for _ in range(2):
        image.begin()
        one.begin()
        for time in STEPS:
            call = image.call(time)
            assert near(image.run(call), one.run(call))
            assert image.second["split"]
    assert image.runtime.status()["route"] == "graph"


def test_no_whole_step_of_deepcache_is_stale(found_out: list[int], image_of: Callable[..., Image]) -> None:
    image = image_of(**EVERY_THIRD)
    calls = calls_of(image, WEBUI, 8)
    for call in calls[:7]:
        image.run(call)
    with torch.no_grad():
        change_in_place(image.unet)
    assert near(image.run(calls[7]), exact(image, calls[7])) and image.second["split"]
