"""Calls on two cards: when one computes, why, which the other is, and where that is said."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepcache_builders import STEPS, equal_distances, few_steps_suffice  # noqa: F401
from two_cpus import (
    FIRST,
    Image,
    TwoCpus,
    exact,
    near,
)

from lib_onediff.core.patch_points import PatchPoints
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.rows import PromptRows, half_of, take_rows
from lib_onediff.runtime import two_gpus
from lib_onediff.runtime.cards import NO_SECOND, Cards, second_card, second_share
from lib_onediff.runtime.effects import Machine, why_no_effect


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


@pytest.mark.parametrize(("more", "reason"), [
    ({"patches": PatchPoints()}, "other extensions compute within the UNet"),
    (
        {"latent": torch.zeros(1, 4, 8, 8), "timestep": torch.zeros(1), "context": torch.zeros(1, 77, 48)},
        two_gpus.ONE_ROW,
    ),
])
def test_what_tells_rows_apart_or_is_foreign_has_one_card(more: dict[str, Any], reason: str) -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    assert image.second["calls"] == 1
    call = replace(image.call(), **more)
    image.run(call)
    assert image.second["calls"] == 1 and reason in image.second["reason"]


def test_a_fault_on_the_second_card_is_told_once_and_the_first_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("peer access is broken")

    image = Image.of()
    image.begin()
    image.run(image.call())
    monkeypatch.setattr(two_gpus.Pair, "rows", fails)
    for _ in range(3):
        image.begin()
        call = image.call()
        assert near(image.run(call), exact(image, call))
        assert "peer access is broken" in image.second["reason"] and image.second["bytes"] == 0
    assert len(image.runtime.guard.faults) == 1 and not image.runtime.guard.suspended


@pytest.mark.parametrize(("cards", "reason"), [(TwoCpus([FIRST]), NO_SECOND), (Cards(), "this UNet is on the CPU")])
def test_a_refused_card_costs_no_second_computation(cards: TwoCpus, reason: str) -> None:
    image = Image.of(cards=cards)
    image.begin()
    for time in STEPS[:4]:
        image.run(image.call(time))
    assert image.second["reason"] == reason
    (entry,) = image.runtime.table.entries()
    assert entry.key.batch == 2 and entry.uses == 4


@pytest.mark.parametrize(("batch", "times", "share"), [
    (2, (), 1), (3, (), 1), (8, (10.0, 10.0), 4), (2, (10.0, 25.0), 0), (8, (10.0, 30.0), 2), (8, (30.0, 10.0), 6),
    (2, (25.0, 10.0), 1), (8, (10.0, 10.2), 4), (8, (10.0, 1000.0), 0),
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


@pytest.mark.parametrize(("value", "gpus", "reason"), [
    ("off", 0, None), ("auto", 0, "PyTorch sees no GPU here."), ("auto", 1, "PyTorch sees one GPU here."),
    ("1", 2, None), ("2", 2, "PyTorch sees 2 GPUs here, 0 to 1."), ("auto", 2, None),
])
def test_the_settings_say_where_the_option_has_no_effect(value: str, gpus: int, reason: str | None) -> None:
    machine = Machine("2.11.0", "GPU", (9, 0), False, frozenset(), gpus=gpus)
    assert why_no_effect("second_gpu", value, machine) == reason
