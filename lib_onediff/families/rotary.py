"""Rotary position embeddings over several axes, which transformers of images share: the angles of tokens by their
positions."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.operators import Rotary


@dataclass(frozen=True)
class RotaryAxes:
    """The axes over which the heads of queries and keys are rotated, such as time, height and width.

    widths: of each axis, how much of a head's width it rotates. thetas: the base of its frequencies. interleaved: see
    core.operators.Rotary. exponents, frequencies, angles: the types in which the host has these, which it may have
    rounded; the frequencies are computed in theirs.
    """

    widths: tuple[int, ...]
    thetas: tuple[float, ...]
    interleaved: bool
    exponents: torch.dtype = torch.float64
    frequencies: torch.dtype = torch.float64
    angles: torch.dtype = torch.float32


def rotary_of(axes: RotaryAxes, positions: Tensor) -> Rotary:
    """The rotary embedding of tokens. positions: integers, (tokens, axes), or (batch, tokens, axes) where those of the
    rows differ."""
    wide = at_least_float32(axes.frequencies)
    angles = []
    for axis, (width, theta) in enumerate(zip(axes.widths, axes.thetas, strict=True)):
        frequencies = frequencies_of(axes, width, theta, positions.device)
        angles.append(positions[..., axis, None].to(wide) * frequencies.to(wide))
    together = torch.cat(angles, dim=-1).to(axes.angles)
    return Rotary(together.cos().float(), together.sin().float(), axes.interleaved)


def frequencies_of(axes: RotaryAxes, width: int, theta: float, device: torch.device) -> Tensor:
    """The frequencies of one axis, (width / 2,)."""
    wide = at_least_float32(axes.exponents)
    exponents = (torch.arange(0, width, 2, dtype=wide, device=device) / width).to(axes.exponents)
    frequencies: Tensor = 1.0 / theta ** exponents.to(axes.frequencies)
    return frequencies


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def image_positions(rows: int, columns: int, device: torch.device, first: int = 0) -> Tensor:
    """The positions of an image's patches, (rows * columns, 3), row by row: first, then the row, then the column."""
    down = torch.arange(rows, dtype=torch.int64, device=device)[:, None].expand(rows, columns)
    across = torch.arange(columns, dtype=torch.int64, device=device)[None].expand(rows, columns)
    return torch.stack([torch.full_like(down, first), down, across], dim=-1).flatten(0, 1)
