"""Functions over the fields of a Call (tensors, rows, copies, signature, key): they need no other code for a field that
a model family adds in its own subclass."""
from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from lib_onediff.core.call import Call, half_of
from lib_onediff.core.fields import LEFT_OUT, tensors_of
from lib_onediff.core.inputs import cloned_inputs, copy_inputs, take_rows
from lib_onediff.core.key import ShapeKey


@dataclass(frozen=True)
class Reference:
    """A reference image, and its strength."""

    latents: tuple[Tensor | None, ...]
    strength: float = 1.0
    name: str = field(default="", metadata=LEFT_OUT)


@dataclass(frozen=True)
class ReferenceCall(Call):
    context: Tensor
    reference: Reference | None = None
    mask: Tensor | None = None


def a_call() -> ReferenceCall:
    rows = lambda *shape: torch.randn(4, *shape)  # noqa: E731
    return ReferenceCall(
        rows(4, 8, 8), torch.full((4,), 500), rows(77, 48), reference=Reference((None, rows(4, 6, 6))), mask=rows(77),
    )


def key_of(call: Call) -> ShapeKey:
    return ShapeKey.of("architecture", torch.float32, call)


def test_fields_that_a_family_adds_are_split_by_rows_and_copied_like_other_inputs() -> None:
    """ReferenceCall adds a nested dataclass and a mask. half_of(4, False) is the second half of a batch of four."""
    call = a_call()
    assert call.reference is not None
    assert [tuple(one.shape) for one in tensors_of(call)] == [
        (4, 4, 8, 8), (4,), (4, 77, 48), (4, 4, 6, 6), (4, 77),
    ]
    rows = half_of(4, False)
    taken = take_rows(call, rows)
    assert taken.reference is not None
    assert torch.equal(taken.reference.latents[1], call.reference.latents[1][rows])
    assert torch.equal(taken.mask, call.mask[rows])
    own = cloned_inputs(call)
    copy_inputs(a_call(), own)
    assert own.reference is not None and own.mask is not None
    assert not torch.equal(own.mask, call.mask) and own.signature == call.signature


@pytest.mark.parametrize("changes", [
    {"mask": None}, {"mask": torch.ones(4, 78)}, {"reference": None},
    {"reference": Reference((torch.ones(4, 4, 6, 6),))},
    {"reference": Reference((None, torch.ones(4, 4, 6, 6)), strength=0.5)},
], ids=["no mask", "longer mask", "no reference", "other slot", "strength"])
def test_calls_that_differ_in_an_added_field_differ_in_signature_and_key(changes: dict[str, object]) -> None:
    """A graph is chosen by signature, and an entry of the table of shapes by key. changes: the fields that differ."""
    call = a_call()
    other = replace(call, **changes)
    assert other.signature != call.signature and key_of(other) != key_of(call)


def test_values_of_tensors_and_fields_that_are_left_out_change_neither_signature_nor_key() -> None:
    """The two calls have other random values, and another Reference.name, a field that is marked LEFT_OUT."""
    call = a_call()
    assert call.reference is not None
    other = replace(a_call(), reference=replace(call.reference, name="another"))
    assert other.signature == call.signature and key_of(other) == key_of(call)
    assert key_of(call).inputs == key_of(replace(call, timestep=call.timestep.double())).inputs


def test_a_tensors_dtype_is_part_of_the_signature_except_that_of_the_timestep() -> None:
    call = a_call()
    assert replace(call, timestep=call.timestep.double()).signature == call.signature
    other = replace(call, mask=call.mask.half())
    assert other.signature != call.signature
    assert key_of(other).inputs == ("mask in float16 on cpu",)
