"""Weights as a file stores them, in 4 or 8 bits, with what decodes them.

A host keeps such a weight as numbers of few bits and scales. A reader of that host hands both in without a copy, as a
StoredWeight; operands.Decoded makes of it what a kernel takes.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .low_bit import Kind

# (values, scales, dtype) -> the weight, in the shape of its layer.
Decode = Callable[[Tensor, Sequence[Tensor], torch.dtype], Tensor]


@dataclass(frozen=True)
class Format:
    """How a weight is stored.

    name: for users, such as "INT8 (ConvRot)". facts: plain data that tells it from others, such as a group's width; two
    formats with equal names and facts decode alike. kind: the eight-bit type in which the host multiplies it, its
    inputs rounded; None where the host decodes it first. rotation: see QuantizedWeight. is_by_rows: each row of the
    weight is a row of the values, so that layers over the same input may lie in one tensor.
    """

    name: str
    facts: tuple[object, ...]
    kind: Kind | None = None
    rotation: int = 0
    is_by_rows: bool = False


def are_multiplied_alike(formats: Iterable[Format | None]) -> bool:
    """Whether a host multiplies all weights of these formats in eight bits, in one type and rotation. None: of a plain
    weight."""
    ways = {None if one is None or one.kind is None else (one.kind, one.rotation) for one in formats}
    return len(ways) == 1 and None not in ways


class StoredWeight(NamedTuple):
    """A weight in few bits.

    shape: of the decoded weight, (out, ...). values: as stored. scales: in the order in which decode takes them.
    decode: the host's own function for this format. values and scales are plain tensors, over the host's own memory.
    holder: the host's tensor with that memory: what is put in the place of its data stands in the host, too. It is
    values itself, but for a host whose parameter is of a subclass.
    """

    format: Format
    shape: tuple[int, ...]
    values: Tensor
    scales: tuple[Tensor, ...]
    decode: Decode
    holder: Tensor


class StoredReader(Protocol):
    """Reads the weights that one host stores in few bits."""

    def weight(self, layer: nn.Module, path: str) -> StoredWeight | None:
        """The weight of a layer; None where it is a plain tensor. path: the layer's, in its network. Raises Refusal for
        a format that is not known, or lacks something."""

    def tensors(self, layers: Sequence[nn.Module]) -> list[Tensor]:
        """All tensors that these layers compute with, plain ones, in the order of the layers. This runs at every call
        of a network, in a tenth of a millisecond for 500 layers."""

    def facts(self, layers: Sequence[nn.Module]) -> list[object]:
        """What decides, beside tensors, how the weights of these layers are decoded and multiplied: plain data, equal
        as long as each weight's Format and shape are. This runs at every call, too."""
