"""A call with some rows of the batch: which inputs are selected, stay or are refused, and the output for these rows."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, relative_error, shared_unet

from lib_onediff.core.call import PATCHED, half_of, why_rows_stay_together
from lib_onediff.core.inputs import take_rows
from lib_onediff.families.unet.call import Control, ImagePrompt, UNetCall
from lib_onediff.families.unet.patch_points import PatchPoints


def whole_call() -> UNetCall:
    """A call with a batch of 4, and every input that a UNet's call may have."""
    rows = lambda *shape: torch.randn(4, *shape)  # noqa: E731
    return UNetCall(
        rows(4, 8, 8), torch.full((1,), 500.0).expand(4), rows(77, 48), rows(136), rows(24),
        Control((None, rows(16, 8, 8)), (rows(64, 1, 1),), (torch.ones(1, 16, 8, 8), None)),
        image_prompts=(ImagePrompt(rows(4, 32), {"attn": (0, 32)}),),
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_take_rows_selects_rows_of_batched_inputs_and_keeps_inputs_of_one_row(is_first: bool) -> None:
    """A ControlNet residual with one row for the whole batch stays the same tensor. is_first: whether the first half of
    the batch is selected, or the second."""
    call = whole_call()
    rows = half_of(4, is_first)
    taken = take_rows(call, rows)
    for name in ("latent", "timestep", "context", "y", "timestep_condition"):
        assert torch.equal(getattr(taken, name), getattr(call, name)[rows]), name
    none, first = taken.control.input
    (middle,) = taken.control.middle
    shared, last = taken.control.output
    assert none is last is None and torch.equal(first, call.control.input[1][rows])
    assert torch.equal(middle, call.control.middle[0][rows]) and shared is call.control.output[0]
    (prompt,) = taken.image_prompts
    (before,) = call.image_prompts
    assert torch.equal(prompt.key_values, before.key_values[rows]) and prompt.structure == before.structure


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("layout", ["SD1", "SDXL"])
def test_diffusers_output_for_some_rows_is_close_to_these_rows_of_the_whole_batch(layout: str, is_first: bool) -> None:
    """Policies that compute only the prompt's rows rely on this. is_first: whether these rows are the batch's first
    half, or its second. layout: the layout of the UNet."""
    unet = shared_unet(layout)
    call = a_call(unet, batch=4)
    rows = half_of(4, is_first)
    alone = diffusers_output(unet, take_rows(call, rows))
    assert relative_error(alone, diffusers_output(unet, call)[rows]) < 1e-5


@pytest.mark.parametrize("changes", [
    {"timestep": torch.ones(3)}, {"y": torch.ones(2, 136)}, {"control": Control((torch.ones(2, 16, 8, 8),))},
], ids=lambda changes: "".join(changes))
def test_an_input_with_another_number_of_rows_than_the_batch_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rows in a batch of 4"):
        take_rows(replace(whole_call(), **changes), half_of(4, True))


def test_rows_of_a_call_with_functions_of_extensions_stay_together() -> None:
    """Such a function may depend on the other rows. why_rows_stay_together() returns the reason, or "" without them."""
    call = whole_call()
    assert why_rows_stay_together(call) == ""
    assert why_rows_stay_together(replace(call, patches=PatchPoints())) == PATCHED
