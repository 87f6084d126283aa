"""Calls on two GPUs: how rows are split, computed and joined; when and why one GPU computes; and how the second GPU's
copy of the weights is updated."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import diffusers_unet
from samplings import STEPS, WEBUI, equal_distances, few_steps_suffice  # noqa: F401
from torch import nn
from two_cpus import FIRST, SECOND, Image, TwoCpus, change_in_place, exact, near

from lib_onediff.core.call import PromptRows, half_of
from lib_onediff.core.device_memory import Card
from lib_onediff.core.inputs import take_rows
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.settings import Settings
from lib_onediff.families.unet.call import Control
from lib_onediff.families.unet.patch_points import PatchPoints
from lib_onediff.runtime import two_gpus
from lib_onediff.runtime.two_gpus import NO_SECOND, second_card


@pytest.mark.parametrize(("names", "rows"), [
    (("cat", "ugly"), "1+1"), (("cat", "dog", "ugly"), "2+1"), (("a", "b", "c", "d", "e", "f"), "3+3"),
])
def test_each_card_computes_its_rows_and_they_come_back_in_their_places(names: Any, rows: str) -> None:
    image = Image.of()
    image.begin()
    first = image.call(names=names)
    for time in (901.0, 501.0, 101.0):
        call = replace(image.call(time, names), context=first.context, y=first.y)
        output = image.run(call)
        assert output.shape == call.latent.shape and near(output, exact(image, call))
        assert image.second["split"] == f"cpu + cpu:1, {rows} rows"
    assert image.second["calls"] == 3 and image.second["reason"] == ""
    assert SECOND in image.cards.launched and len(image.copies) == 1
    assert image.runtime.call_stats.total == 3 and image.runtime.guard.faults == []


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("unchecked")
def test_residuals_of_a_controlnet_are_cut(rows: int) -> None:
    one = Image.of(second_gpu="off")
    two = Image.of()
    call = two.call()
    controlled = replace(call, control=Control(middle=(torch.randn(rows, 32, 4, 4),)))
    for image in (one, two):
        image.begin()
    output = two.run(controlled)
    assert two.second["split"] and near(output, one.run(controlled)) and not near(output, exact(two, call))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_first_use_is_checked_in_every_row(row: int) -> None:
    """An error of ours in one row is simulated by a host that gives another output in that row."""
    image = Image.of()
    image.begin()
    call = image.call(names=("cat", "dog", "ugly"))
    wrong = exact(image, call)
    wrong[row] += 1
    image.run(call, lambda: wrong)
    assert "differs from the model's own forward" in image.second["reason"] and image.second["calls"] == 0


def test_two_threads_get_their_own_rows() -> None:
    image = Image.of()
    image.begin()
    calls = [image.call(time) for time in STEPS]
    expected = [exact(image, call) for call in calls]
    with ThreadPoolExecutor(2) as threads:
        assert all(map(near, threads.map(image.run, calls), expected))
    assert image.second["calls"] == len(calls) and image.runtime.guard.faults == []


# --- one GPU computes -------------------------------------------------------------------------------------------


def test_where_the_guidance_ends_one_card_computes_the_prompt_s_row() -> None:
    image = Image.of(skip_negative_after=50)
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
    ({"patches": PatchPoints()}, "other extensions compute within the network"),
    (
        {"latent": torch.zeros(1, 4, 8, 8), "timestep": torch.zeros(1), "context": torch.zeros(1, 77, 48)},
        two_gpus.ONE_ROW,
    ),
])
def test_calls_that_cannot_be_split_by_rows_run_on_one_card(more: dict[str, Any], reason: str) -> None:
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


@pytest.mark.parametrize(("cards", "reason"), [
    (TwoCpus([FIRST]), NO_SECOND), (Card(), "this UNet is on the CPU, not on a GPU"),
])
def test_a_refused_card_costs_no_second_computation(cards: TwoCpus, reason: str) -> None:
    image = Image.of(cards=cards)
    image.begin()
    for time in STEPS[:4]:
        image.run(image.call(time))
    assert image.second["reason"] == reason
    (entry,) = image.runtime.table.entries()
    assert entry.key.batch == 2 and entry.uses == 4


THREE = [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(("first", "rooms", "expected"), [
    (0, (9, 9, 9), 1), (1, (9, 9, 9), 0), (0, (9, 1, 9), 2),
    (0, (9, 1, -2), "the weights take 4.0 GiB, cuda:1 has room for 1.0 GiB, cuda:2 has room for 0.0 GiB"),
])
def test_the_second_card_is_the_next_with_room(first: int, rooms: tuple[int, ...], expected: int | str) -> None:
    class Machine(TwoCpus):
        def room(self, device: torch.device) -> int:
            return rooms[device.index] << 30

    try:
        assert second_card(THREE[first], 4 << 30, Machine(THREE)) == THREE[expected]  # type: ignore[index]
    except Refusal as refusal:
        assert str(refusal) == expected


# --- the copy of the weights ------------------------------------------------------------------------------------


def test_the_copy_of_the_weights_is_made_once_and_counted() -> None:
    image = Image.of()
    weights = sum(parameter.nbytes for parameter in image.unet.parameters())
    for _ in range(3):
        image.begin()
        image.run(image.call())
    (copy,) = image.copies
    assert image.second["bytes"] == weights
    assert {parameter._version for parameter in copy.parameters()} == {1}
    theirs = {tensor.untyped_storage().data_ptr() for tensor in image.unet.parameters()}
    assert all(tensor.untyped_storage().data_ptr() not in theirs for tensor in copy.parameters())


def test_each_checkpoint_has_its_own_copy_on_the_second_card_until_it_is_freed() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    other = diffusers_unet(seed=3)
    image.runtime.adopt(other, host_traits=WEBUI)
    second = replace(image, unet=other)
    second.begin()
    assert near(second.run(call := second.call()), exact(second, call))
    assert image.second["bytes"] == 2 * sum(parameter.nbytes for parameter in other.parameters())
    del image
    second.runtime.release(other)
    assert second.second["bytes"] == 0


def test_switched_off_the_second_card_is_given_back_at_once() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    image.runtime.configure(Settings())
    assert not image.copies and image.second == {"calls": 1, "split": "", "reason": "", "bytes": 0}


def test_out_of_memory_on_the_second_card_leaves_one_until_something_changes() -> None:
    image = Image.of()
    image.cards.full = True
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert "out of memory on cpu:1" in image.second["reason"] and image.second["split"] == ""
    assert image.second["bytes"] == 0 and not image.copies
    image.cards.full = False
    for _ in range(2):
        image.begin()
        image.run(call)
        assert "out of memory on cpu:1" in image.second["reason"]
    with torch.no_grad():
        change_in_place(image.unet)
    image.begin()
    image.run(call)
    # The call that notices the change is computed on one GPU.
    image.run(call)
    assert image.second["split"] == "cpu + cpu:1, 1+1 rows"


def test_weights_whose_edits_nobody_counts_are_copied_at_every_sampling() -> None:
    image = Image.of()
    with torch.inference_mode():
        unet = diffusers_unet(seed=5)
    image.runtime.adopt(unet, host_traits=WEBUI)
    image = replace(image, unet=unet)
    for _ in range(3):
        image.begin()
        for time in (901.0, 501.0):
            call = image.call(time)
            assert near(image.run(call), exact(image, call)) and image.second["split"]
        with torch.inference_mode():
            change_in_place(unet)
    (copy,) = image.copies
    assert {parameter._version for parameter in copy.parameters()} == {3}


def test_tiling_goes_to_both_cards_and_back() -> None:
    image = Image.of()
    call = image.call()
    outputs = []
    for mode in ("zeros", "circular", "zeros"):
        for module in image.unet.modules():
            if isinstance(module, nn.Conv2d):
                module.padding_mode = mode
        image.begin()
        outputs.append(image.run(call))
        assert image.second["split"] and near(outputs[-1], exact(image, call)) and len(image.copies) == 1
    assert not near(outputs[0], outputs[1]) and near(outputs[0], outputs[2])
