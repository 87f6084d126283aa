"""Calls on two GPUs: how the rows of a batch are split, computed and joined; when and why one GPU computes; and how the
second GPU's copy of the weights is updated. Two devices of the CPU stand for the GPUs (two_cpus.py)."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import diffusers_unet
from samplings import STEPS, WEBUI, evenly_spaced, few_steps_suffice  # noqa: F401
from torch import nn
from two_cpus import FIRST, SECOND, OnTwoGpus, TwoCpus, change_in_place, close, host_output

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
def test_rows_computed_on_two_gpus_are_joined_in_the_order_of_the_batch(names: Any, rows: str) -> None:
    """names: the prompts of the batch's rows. rows: how many rows each GPU computes. Every output is compared with
    diffusers' own on one GPU; the weights are copied once."""
    served = OnTwoGpus.of()
    served.begin()
    first = served.call(names=names)
    for time in (901.0, 501.0, 101.0):
        call = replace(served.call(time, names), context=first.context, y=first.y)
        output = served.run(call)
        assert output.shape == call.latent.shape and close(output, host_output(served, call))
        assert served.second["split"] == f"cpu + cpu:1, {rows} rows"
    assert served.second["calls"] == 3 and served.second["reason"] == ""
    assert SECOND in served.cards.launched and len(served.copies) == 1
    assert served.runtime.call_stats.total == 3 and served.runtime.guard.faults == []


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("unchecked")
def test_the_residuals_of_a_controlnet_are_split_like_the_rows_of_the_batch(rows: int) -> None:
    """rows: the number of rows of the residual; a single row is added to every row of the batch. The output is compared
    with ours on one GPU, and differs from the one without the residual."""
    one = OnTwoGpus.of(second_gpu="off")
    two = OnTwoGpus.of()
    call = two.call()
    controlled = replace(call, control=Control(middle=(torch.randn(rows, 32, 4, 4),)))
    for served in (one, two):
        served.begin()
    output = two.run(controlled)
    assert two.second["split"] and close(output, one.run(controlled)) and not close(output, host_output(two, call))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_first_output_on_two_gpus_is_compared_with_that_of_the_host_in_every_row(row: int) -> None:
    """An error of ours in one row is simulated by a host that gives another output in that row. The rows are then not
    split."""
    served = OnTwoGpus.of()
    served.begin()
    call = served.call(names=("cat", "dog", "ugly"))
    wrong = host_output(served, call)
    wrong[row] += 1
    served.run(call, lambda: wrong)
    assert "differs too much from the one without OneDiff" in served.second["reason"] and served.second["calls"] == 0


def test_calls_of_two_threads_get_their_own_outputs() -> None:
    """Two threads make twenty calls, each with its own timestep. Each output is compared with diffusers' own for that
    timestep."""
    served = OnTwoGpus.of()
    served.begin()
    calls = [served.call(time) for time in STEPS]
    expected = [host_output(served, call) for call in calls]
    with ThreadPoolExecutor(2) as threads:
        assert all(map(close, threads.map(served.run, calls), expected))
    assert served.second["calls"] == len(calls) and served.runtime.guard.faults == []


# --- one GPU computes -------------------------------------------------------------------------------------------


def test_in_steps_without_the_negative_prompt_one_gpu_computes_the_only_row() -> None:
    """With skip_negative_after=50, the second half of the steps leaves the negative prompt out."""
    served = OnTwoGpus.of(skip_negative_after=50)
    served.begin()
    splits = []
    for time in STEPS:
        call = served.call(time)
        half = PromptRows(half_of(2, True), lambda call=call: host_output(served, take_rows(call, half_of(2, True))))
        call = replace(call, latent=call.latent[:1].repeat(2, 1, 1, 1))
        served.run(call, guidance=lambda half=half: half)
        splits.append(bool(served.second["split"]))
    assert splits == [True] * 10 + [False] * 10 and served.second["reason"] == two_gpus.ONE_ROW


@pytest.mark.parametrize(("more", "reason"), [
    ({"patches": PatchPoints()}, "other extensions compute inside the model"),
    (
        {"latent": torch.zeros(1, 4, 8, 8), "timestep": torch.zeros(1), "context": torch.zeros(1, 77, 48)},
        two_gpus.ONE_ROW,
    ),
])
def test_a_call_that_cannot_be_split_by_rows_runs_on_one_gpu(more: dict[str, Any], reason: str) -> None:
    """more: the call has functions of other extensions, which need all rows together, or a batch of one. The number of
    calls on two GPUs stays at 1, that of the usual call before. reason: a part of the reason in the status."""
    served = OnTwoGpus.of()
    served.begin()
    served.run(served.call())
    assert served.second["calls"] == 1
    call = replace(served.call(), **more)
    served.run(call)
    assert served.second["calls"] == 1 and reason in served.second["reason"]


def test_after_a_fault_on_the_second_gpu_the_first_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking the rows for a GPU raises. The fault is recorded once, the copy of the weights is freed, and OneDiff is
    not suspended. Outputs are close to diffusers' own."""
    def fails(*given: Any) -> None:
        raise RuntimeError("peer access is broken")

    served = OnTwoGpus.of()
    served.begin()
    served.run(served.call())
    monkeypatch.setattr(two_gpus.Pair, "rows", fails)
    for _ in range(3):
        served.begin()
        call = served.call()
        assert close(served.run(call), host_output(served, call))
        assert "peer access is broken" in served.second["reason"] and served.second["bytes"] == 0
    assert len(served.runtime.guard.faults) == 1 and not served.runtime.guard.suspended


@pytest.mark.parametrize(("cards", "reason"), [
    (TwoCpus([FIRST]), NO_SECOND), (Card(), "this UNet is on the CPU, not on a GPU"),
])
def test_where_there_is_no_second_gpu_each_call_is_computed_once(cards: TwoCpus, reason: str) -> None:
    """cards: a machine with one GPU, or without a GPU. The entry of the shape counts one use for each of four calls,
    each with both rows."""
    served = OnTwoGpus.of(cards=cards)
    served.begin()
    for time in STEPS[:4]:
        served.run(served.call(time))
    assert served.second["reason"] == reason
    (entry,) = served.runtime.table.entries()
    assert entry.key.batch == 2 and entry.uses == 4


THREE = [torch.device("cuda", index) for index in range(3)]


@pytest.mark.parametrize(("first", "free_gib", "expected"), [
    (0, (9, 9, 9), 1), (1, (9, 9, 9), 0), (0, (9, 1, 9), 2),
    (0, (9, 1, -2), "the weights take 4.0 GiB, cuda:1 has room for 1.0 GiB, cuda:2 has room for 0.0 GiB"),
    (0, (9, 3.97, 1), "the weights take 4.0 GiB, cuda:1 has room for 3.9 GiB, cuda:2 has room for 1.0 GiB"),
])
def test_the_second_gpu_is_the_next_one_with_enough_free_memory_for_the_weights(
    first: int, free_gib: tuple[float, ...], expected: int | str
) -> None:
    """The weights take 4 GiB. first: the index of the GPU with the UNet. free_gib: GiB free on each of three GPUs;
    negative: too few already. expected: the index of the chosen GPU, or why there is none."""
    class Machine(TwoCpus):
        def room(self, device: torch.device) -> int:
            return int(free_gib[device.index] * 2**30)

    try:
        assert second_card(THREE[first], 4 << 30, Machine(THREE)) == THREE[expected]  # type: ignore[index]
    except Refusal as refusal:
        assert str(refusal) == expected


def test_the_setting_names_no_size_of_weights_if_no_other_gpu_has_free_memory() -> None:
    """The settings tab asks without weights, so a size of 0 would mean nothing to the user."""
    class Full(TwoCpus):
        def room(self, device: torch.device) -> int:
            return -1

    with pytest.raises(Refusal, match="^no other GPU has free memory$"):
        second_card(THREE[0], 0, Full(THREE))


# --- the copy of the weights ------------------------------------------------------------------------------------


def test_the_copy_of_the_weights_is_made_once_and_its_bytes_are_in_the_status() -> None:
    """After three samplings, torch has counted one write (_version) for each parameter of the copy. The copy shares no
    memory with the UNet."""
    served = OnTwoGpus.of()
    weights = sum(parameter.nbytes for parameter in served.unet.parameters())
    for _ in range(3):
        served.begin()
        served.run(served.call())
    (copy,) = served.copies
    assert served.second["bytes"] == weights
    assert {parameter._version for parameter in copy.parameters()} == {1}
    originals = {tensor.untyped_storage().data_ptr() for tensor in served.unet.parameters()}
    assert all(tensor.untyped_storage().data_ptr() not in originals for tensor in copy.parameters())


def test_each_checkpoint_has_its_own_copy_on_the_second_gpu_until_it_is_freed() -> None:
    """The status counts the bytes of both copies; once both UNets are freed, there are none."""
    served = OnTwoGpus.of()
    served.begin()
    served.run(served.call())
    other = diffusers_unet(seed=3)
    served.runtime.adopt(other, host_traits=WEBUI)
    second = replace(served, unet=other)
    second.begin()
    assert close(second.run(call := second.call()), host_output(second, call))
    assert served.second["bytes"] == 2 * sum(parameter.nbytes for parameter in other.parameters())
    del served
    second.runtime.release(other)
    assert second.second["bytes"] == 0


def test_switching_the_second_gpu_off_frees_the_copy_of_the_weights_at_once() -> None:
    served = OnTwoGpus.of()
    served.begin()
    served.run(served.call())
    served.runtime.configure(Settings())
    assert not served.copies and served.second == {"calls": 1, "split": "", "reason": "", "bytes": 0}


def test_after_out_of_memory_the_second_gpu_is_tried_again_once_the_weights_have_changed() -> None:
    """It is not tried at every sampling: each try would fail again, and take time."""
    served = OnTwoGpus.of()
    served.cards.full = True
    served.begin()
    call = served.call()
    assert close(served.run(call), host_output(served, call))
    assert "out of memory on cpu:1" in served.second["reason"] and served.second["split"] == ""
    assert served.second["bytes"] == 0 and not served.copies
    served.cards.full = False
    for _ in range(2):
        served.begin()
        served.run(call)
        assert "out of memory on cpu:1" in served.second["reason"]
    with torch.no_grad():
        change_in_place(served.unet)
    served.begin()
    served.run(call)
    # The call that notices the change is computed on one GPU.
    served.run(call)
    assert served.second["split"] == "cpu + cpu:1, 1+1 rows"


def test_weights_made_in_inference_mode_are_copied_to_the_second_gpu_at_every_sampling() -> None:
    """torch counts no edits of such tensors, so that an edit cannot be noticed. Each output of three samplings is that
    of the edited weights, and each parameter of the copy was written three times (_version)."""
    served = OnTwoGpus.of()
    with torch.inference_mode():
        unet = diffusers_unet(seed=5)
    served.runtime.adopt(unet, host_traits=WEBUI)
    served = replace(served, unet=unet)
    for _ in range(3):
        served.begin()
        for time in (901.0, 501.0):
            call = served.call(time)
            assert close(served.run(call), host_output(served, call)) and served.second["split"]
        with torch.inference_mode():
            change_in_place(unet)
    (copy,) = served.copies
    assert {parameter._version for parameter in copy.parameters()} == {3}


def test_tiling_is_switched_on_and_off_on_both_gpus() -> None:
    """For tiling, A1111 sets the padding mode of the convolutions. The copy on the second GPU gets it too, and is not
    made anew."""
    served = OnTwoGpus.of()
    call = served.call()
    outputs = []
    for mode in ("zeros", "circular", "zeros"):
        for module in served.unet.modules():
            if isinstance(module, nn.Conv2d):
                module.padding_mode = mode
        served.begin()
        outputs.append(served.run(call))
        assert served.second["split"] and close(outputs[-1], host_output(served, call)) and len(served.copies) == 1
    assert not close(outputs[0], outputs[1]) and close(outputs[0], outputs[2])
