"""Rotary position embeddings (RoPE; Su et al. 2021, arXiv 2104.09864) over several axes, as image transformers use
them: a token's position on each axis, such as its row and column, rotates a part of each head."""
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.operators import Rotary


@dataclass(frozen=True)
class RotaryAxes:
    """The axes of a network's rotary embedding, such as time, height and width, and the dtypes of its angles.

    widths: for each axis, how many numbers of a head it rotates.
    thetas: for each axis, the base of its frequencies: theta ** (-2i / width).
    interleaved: see core.operators.Rotary.
    exponents, frequencies, angles: the dtypes in which the host keeps 2i / width, the frequencies, and position *
        frequency. In a narrow dtype they are rounded, and ours must be rounded alike.
    """

    widths: tuple[int, ...]
    thetas: tuple[float, ...]
    interleaved: bool
    exponents: torch.dtype = torch.float64
    frequencies: torch.dtype = torch.float64
    angles: torch.dtype = torch.float32


def rotary_of(axes: RotaryAxes, positions: Tensor) -> Rotary:
    """The rotary embedding of tokens at given positions, rounded as the host rounds it. Cosines and sines are float32.

    positions: (tokens, axes), or (batch, tokens, axes) if they differ from row to row of the batch; any number type.
    """
    wide = at_least_float32(axes.frequencies)
    angles = []
    for axis, (width, theta) in enumerate(zip(axes.widths, axes.thetas, strict=True)):
        frequencies = frequencies_of(axes, width, theta, positions.device)
        angles.append(positions[..., axis, None].to(wide) * frequencies.to(wide))
    together = torch.cat(angles, dim=-1).to(axes.angles)
    return Rotary(together.cos().float(), together.sin().float(), axes.interleaved)


def frequencies_of(axes: RotaryAxes, width: int, theta: float, device: torch.device) -> Tensor:
    """The frequencies of one axis, (width / 2,) in the dtype axes.frequencies, from 1 down to nearly 1 / theta. width,
    theta: the axis's entries in axes.widths and axes.thetas."""
    wide = at_least_float32(axes.exponents)
    exponents = (torch.arange(0, width, 2, dtype=wide, device=device) / width).to(axes.exponents)
    frequencies: Tensor = 1.0 / theta ** exponents.to(axes.frequencies)
    return frequencies


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to multiply numbers of this dtype: float64 for float64, float32 for all others."""
    return dtype if dtype == torch.float64 else torch.float32


def image_positions(rows: int, columns: int, device: torch.device, first: int = 0) -> Tensor:
    """The positions of an image's patches, int64 (rows * columns, 3), row by row. Each is (first, row, column). first:
    the position on the first axis, which is the same for all patches of one image."""
    down = torch.arange(rows, dtype=torch.int64, device=device)[:, None].expand(rows, columns)
    across = torch.arange(columns, dtype=torch.int64, device=device)[None].expand(rows, columns)
    return torch.stack([torch.full_like(down, first), down, across], dim=-1).flatten(0, 1)
