"""Rows of a call: a UNet computes each row of its batch by itself, so some of them can be computed alone."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Call, Control

# Why the prompt's rows of a call are not known, in words for the user, whatever the host.
APART = "prompt and negative prompt come in calls of their own, or without the negative one"
OTHER_ROWS = "the call has other rows than those of prompt and negative prompt (tiles?)"
# Why they cannot be computed alone.
PATCHED = "other extensions compute within the UNet"


class PromptRows(NamedTuple):
    """Which rows of a call are the prompt's, half of them; the others are the negative prompt's, in the same order.

    host: the host's own forward of a call of the prompt's rows alone.
    """

    rows: slice
    host: Callable[[], Tensor]


def halves(call: Call, rows: slice) -> tuple[Tensor, Tensor]:
    """The latents of these rows, one half of the batch, and those of the other half."""
    first, second = call.latent.chunk(2)
    return (first, second) if not rows.start else (second, first)


def half_of(batch: int, is_first: bool) -> slice:
    """The first or the second half of a batch."""
    return slice(0, batch // 2) if is_first else slice(batch // 2, batch)


def why_not_taken(call: Call) -> str:
    """Why rows of this call cannot be computed alone, in words for the user; "" where they can."""
    return "" if call.patches is None else PATCHED


def take_rows(call: Call, rows: slice) -> Call:
    """The call of these rows alone. Raises ValueError for an input that has neither the batch's rows nor one for all.
    """
    batch = call.latent.shape[0]

    def take(tensor: Tensor) -> Tensor:
        return rows_of(tensor, rows, batch)

    y, condition = (
        None if tensor is None else take(tensor) for tensor in (call.y, call.timestep_condition)
    )
    return replace(
        call, latent=take(call.latent), timestep=take(call.timestep),
        context=take(call.context), y=y, timestep_condition=condition,
        control=rows_of_control(call.control, rows, batch),
        image_prompts=tuple(prompt.map(take) for prompt in call.image_prompts),
    )


def rows_of(tensor: Tensor, rows: slice, batch: int) -> Tensor:
    """These rows of an input, (batch, ...); one of a single row is for all of them. Raises ValueError for others."""
    if tensor.shape[0] == batch:
        return tensor[rows]
    if tensor.shape[0] != 1:
        raise ValueError(f"an input has {tensor.shape[0]} rows in a batch of {batch}")
    return tensor


def rows_within(value: Any, rows: slice, batch: int) -> Any:
    """As rows_of for what a host holds in lists and dictionaries; what is no tensor, or is for all rows, stays."""
    if isinstance(value, dict):
        return {name: rows_within(inside, rows, batch) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        inside = [rows_within(part, rows, batch) for part in value]
        return inside if isinstance(value, list) else tuple(inside)
    return rows_of(value, rows, batch) if isinstance(value, Tensor) and value.dim() else value


def rows_of_control(control: Control | None, rows: slice, batch: int) -> Control | None:
    if control is None:
        return None
    parts = (
        tuple(None if residual is None else rows_of(residual, rows, batch) for residual in part)
        for part in (control.input, control.middle, control.output)
    )
    return Control(*parts)


def for_all_rows(output: Tensor, batch: int) -> Tensor:
    """What was computed for some rows as the output of a whole batch: the other rows get the same, in the same
    order."""
    return torch.cat([output] * (batch // output.shape[0]))
