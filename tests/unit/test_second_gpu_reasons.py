"""Calls on two cards: when one computes, why, which the other is, and where that is said."""
from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from deepcache_builders import STEPS, equal_distances, few_steps_suffice  # noqa: F401
from torch import Tensor
from two_cpus import (
    FIRST,
    Image,
    TwoCpus,
    exact,
    near,
)

from lib_onediff.core.additions import PerturbedAttention
from lib_onediff.core.patch_points import PatchPoints
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.rows import PromptRows, half_of, take_rows
from lib_onediff.runtime import card_pair, two_gpus
from lib_onediff.runtime.cards import NO_SECOND, Cards, second_card, second_share
from lib_onediff.runtime.effects import Machine, why_no_effect
from lib_onediff.ui.status import gpus_sentence
from lib_onediff.weights.scan import HostTraits


def test_where_the_guidance_ends_one_card_computes_the_prompt_s_row() -> None:
    image = Image.of(guidance_end=0.5)
    image.begin()
    splits = []
    for time in STEPS:
        call = image.call(time)
        half = PromptRows(half_of(2, True), lambda call=call: exact(image, take_rows(call, half_of(2, True))))
        call = replace(call, latent=call.latent[:1].repeat(2, 1, 1, 1))
        image.run(call, guidance=lambda half=half: half)
        splits.append(bool(image.second["split"]))
    assert splits == [True] * 10 + [False] * 10 and image.second["reason"] == two_gpus.ONE_ROW


def test_a_forecast_runs_no_card() -> None:
    image = Image.of(forecast_interval=3)
    image.begin(why_no_forecast=lambda: "")
    for time in STEPS:
        image.run(image.call(time))
    assert image.second["calls"] == 10 and image.runtime.status()["forecast"]["calls"] == 10


@pytest.mark.parametrize(("more", "reason"), [
    ({"perturbed": PerturbedAttention(frozenset(), 1)}, "perturbed attention"),
    ({"patches": PatchPoints()}, "other extensions compute within the UNet"),
])
def test_what_tells_rows_apart_or_is_foreign_has_one_card(more: dict[str, Any], reason: str) -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    assert image.second["calls"] == 1
    call = replace(image.call(), **more)
    image.run(call)
    assert image.second["calls"] == 1 and reason in image.second["reason"]


def test_oneflow_has_one_card() -> None:
    image = Image.of(backend="oneflow")
    image.begin()
    image.run(image.call())
    assert image.second["reason"] == "the backend oneflow computes on one GPU"


def test_a_call_of_one_row_has_one_card_and_says_so() -> None:
    image = Image.of()
    image.begin()
    call = image.call(names=("cat",))
    assert near(image.run(call), exact(image, call))
    assert image.second["reason"] == two_gpus.ONE_ROW and image.cards.launched == []


def test_a_fault_on_the_second_card_is_told_once_and_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("peer access is broken")

    image = Image.of()
    image.begin()
    image.run(image.call())
    monkeypatch.setattr(card_pair.Pair, "rows", fails)
    for _ in range(3):
        image.begin()
        call = image.call()
        assert near(image.run(call), exact(image, call))
        assert "peer access is broken" in image.second["reason"] and image.second["bytes"] == 0
    assert len(image.runtime.guard.faults) == 1 and not image.runtime.guard.suspended


def test_what_the_host_raises_in_a_check_is_the_host_s() -> None:
    class Interrupted(Exception):
        pass

    def interrupted() -> Tensor:
        raise Interrupted

    image = Image.of()
    image.begin()
    with pytest.raises(Interrupted):
        image.run(image.call(), interrupted)
    assert image.runtime.guard.faults == []
    call = image.call()
    assert near(image.run(call), exact(image, call)) and image.second["split"]


def test_without_the_option_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*given: Any) -> None:
        raise AssertionError

    image = Image.of(second_gpu="off")
    monkeypatch.setattr(two_gpus.TwoGpusRoute, "serve", asked)
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call)) and image.runtime.guard.faults == []
    assert image.second == {"calls": 0, "split": "", "reason": "", "bytes": 0}


def test_a_refused_card_costs_no_second_computation() -> None:
    image = Image.of(cards=TwoCpus([FIRST]))
    image.begin()
    for time in STEPS[:4]:
        image.run(image.call(time))
    assert image.second["reason"] == NO_SECOND
    (entry,) = image.runtime.table.entries()
    assert entry.key.batch == 2 and entry.uses == 4


def test_the_first_cards_rows_that_cannot_be_computed_leave_the_whole_to_the_host() -> None:
    image = Image.of(traits=HostTraits())
    with torch.no_grad():
        image.unet.mid_block.attentions[0].proj_in.forward = lambda x: x
    call = image.call()
    output = image.run(call, lambda: torch.zeros_like(call.latent))
    assert image.runtime.status()["route"] == "host" and image.second["split"] == "" and not output.any()


def test_the_log_says_once_which_cards_compute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onediff")
    image = Image.of()
    for _ in range(2):
        image.begin()
        image.run(image.call())
    assert caplog.messages.count("two GPUs: cpu + cpu:1, 1+1 rows") == 1


@pytest.mark.parametrize(("batch", "times", "share"), [
    (2, (), 1), (3, (), 1), (5, (), 2), (8, (10.0, 10.0), 4), (2, (10.0, 15.0), 1), (2, (10.0, 25.0), 0),
    (8, (10.0, 30.0), 2), (8, (30.0, 10.0), 6), (2, (25.0, 10.0), 1), (8, (10.0, 10.2), 4), (8, (10.0, 1000.0), 0),
])
def test_shares_are_whole_rows_that_end_together(batch: int, times: tuple[float, ...], share: int) -> None:
    assert second_share(batch, *times) == share


THREE = [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(("option", "first", "rooms", "expected"), [
    ("auto", 0, (9, 9, 9), 1), ("auto", 1, (9, 9, 9), 0), ("auto", 0, (9, 1, 9), 2), ("2", 0, (9, 9, 9), 2),
    ("0", 0, (9, 9, 9), "GPU 0 is the one that computes already"),
    ("5", 0, (9, 9, 9), "there is no GPU 5: PyTorch sees 3, 0 to 2"),
    ("2", 0, (9, 9, 1), "the weights take 4.0 GiB, cuda:2 has room for 1.0 GiB"),
    ("auto", 0, (9, 1, -2), "the weights take 4.0 GiB, cuda:1 has room for 1.0 GiB, cuda:2 has room for 0.0 GiB"),
])
def test_the_second_card_is_the_one_named_or_the_next_with_room(
    option: str, first: int, rooms: tuple[int, ...], expected: int | str
) -> None:
    class Machine(TwoCpus):
        def room(self, device: torch.device) -> int:
            return rooms[device.index] << 30

    try:
        assert second_card(option, THREE[first], 4 << 30, Machine(THREE)) == THREE[expected]  # type: ignore[index]
    except Refusal as refusal:
        assert str(refusal) == expected


def test_on_a_machine_without_gpus_the_option_says_so() -> None:
    image = Image.of()
    image.runtime.two_gpus.cards = Cards()
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert image.second["reason"] == "this UNet is on the CPU"


@pytest.mark.parametrize(("value", "gpus", "reason"), [
    ("off", 0, None), ("auto", 0, "PyTorch sees no GPU here."), ("auto", 1, "PyTorch sees one GPU here."),
    ("1", 2, None), ("2", 2, "PyTorch sees 2 GPUs here, 0 to 1."), ("auto", 2, None),
])
def test_the_settings_say_where_the_option_has_no_effect(value: str, gpus: int, reason: str | None) -> None:
    machine = Machine("2.11.0", "GPU", (9, 0), False, frozenset(), gpus=gpus)
    assert why_no_effect("second_gpu", value, machine) == reason


def test_the_status_line_names_cards_memory_and_reasons() -> None:
    said = gpus_sentence({"calls": 3, "split": "cuda:0 + cuda:1, 1+1 rows", "reason": "", "bytes": 5 << 30})
    assert said == "Two GPUs: cuda:0 + cuda:1, 1+1 rows; 5120 MiB of weights on the second."
    assert gpus_sentence({"calls": 3, "split": "", "reason": "no room", "bytes": 0}) == "One GPU: no room."
    assert gpus_sentence({"calls": 0, "split": "", "reason": "", "bytes": 0}) == gpus_sentence({}) == ""
