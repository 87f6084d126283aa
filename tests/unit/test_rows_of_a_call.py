"""Rows of a call: what is taken, what is left as it is, what is refused, and what they compute."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SD1, SDXL, a_call, diffusers_output, diffusers_unet, relative_error

from lib_onediff.core.additions import ImagePrompt, PerturbedAttention
from lib_onediff.core.call import Control, UNetCall
from lib_onediff.core.patch_points import PatchPoints
from lib_onediff.core.rows import (
    PATCHED,
    PERTURBED,
    for_all_rows,
    half_of,
    halves,
    rows_within,
    take_rows,
    why_not_taken,
)

HALVES = [True, False]


def whole_call(batch: int = 4) -> UNetCall:
    rows = lambda *shape: torch.randn(batch, *shape)  # noqa: E731
    return UNetCall(
        rows(4, 8, 8), torch.full((1,), 500.0).expand(batch), rows(77, 48), rows(136), rows(24),
        Control((None, rows(16, 8, 8)), (rows(64, 1, 1),), (torch.ones(1, 16, 8, 8), None)),
        image_prompts=(ImagePrompt(rows(4, 32), {"attn": (0, 32)}, {64: torch.ones(1, 64, 1), 16: rows(16, 1)}),),
    )


@pytest.mark.parametrize("is_first", HALVES)
def test_whatever_has_a_row_for_each_is_cut_and_what_is_for_all_stays(is_first: bool) -> None:
    call = whole_call()
    rows = half_of(4, is_first)
    assert rows == (slice(0, 2) if is_first else slice(2, 4))
    taken = take_rows(call, rows)
    for name in ("latent", "timestep", "context", "y", "timestep_condition"):
        assert torch.equal(getattr(taken, name), getattr(call, name)[rows]), name
    assert taken.timestep.stride(0) == 0
    (none, first), (middle,), (shared, last) = taken.control.input, taken.control.middle, taken.control.output
    assert none is last is None and torch.equal(first, call.control.input[1][rows])
    assert torch.equal(middle, call.control.middle[0][rows]) and shared is call.control.output[0]
    (prompt,), (before,) = taken.image_prompts, call.image_prompts
    assert torch.equal(prompt.key_values, before.key_values[rows]) and prompt.structure == before.structure
    assert prompt.masks[64] is before.masks[64] and torch.equal(prompt.masks[16], before.masks[16][rows])
    mine, other = halves(call, rows)
    assert torch.equal(mine, call.latent[rows]) and torch.equal(other, call.latent[half_of(4, not is_first)])


@pytest.mark.parametrize("is_first", HALVES)
@pytest.mark.parametrize("config", [SD1, SDXL], ids=["SD1", "SDXL"])
def test_rows_alone_compute_what_they_compute_among_others(config: dict[str, Any], is_first: bool) -> None:
    unet = diffusers_unet(**config)
    call = a_call(unet, batch=4)
    rows = half_of(4, is_first)
    alone = diffusers_output(unet, take_rows(call, rows))
    assert relative_error(alone, diffusers_output(unet, call)[rows]) < 1e-5


@pytest.mark.parametrize("changes", [
    {"timestep": torch.ones(3)}, {"y": torch.ones(2, 136)}, {"control": Control((torch.ones(2, 16, 8, 8),))},
], ids=lambda changes: "".join(changes))
def test_an_input_of_another_number_of_rows_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="rows in a batch of 4"):
        take_rows(replace(whole_call(), **changes), half_of(4, True))


def test_what_tells_rows_apart_by_itself_is_refused() -> None:
    call = whole_call()
    assert why_not_taken(call) == ""
    assert why_not_taken(replace(call, patches=PatchPoints())) == PATCHED
    assert why_not_taken(replace(call, perturbed=PerturbedAttention(frozenset(), 2))) == PERTURBED


def test_an_output_is_put_in_the_place_of_both_halves() -> None:
    output = torch.arange(2.0).view(2, 1, 1, 1)
    assert for_all_rows(output, 4).flatten().tolist() == [0.0, 1.0, 0.0, 1.0]
    assert for_all_rows(output, 4).untyped_storage().data_ptr() != output.untyped_storage().data_ptr()


def test_rows_within_what_hosts_hold() -> None:
    rows, tensor, shared = half_of(4, False), torch.arange(4), torch.ones(1, 3)
    found = rows_within({"a": [tensor, None, shared], "b": (tensor,), "c": torch.tensor(7), "d": "text"}, rows, 4)
    assert torch.equal(found["a"][0], tensor[2:]) and found["a"][1] is None and found["a"][2] is shared
    assert isinstance(found["b"], tuple) and torch.equal(found["b"][0], tensor[2:])
    assert found["c"].item() == 7 and found["d"] == "text"
