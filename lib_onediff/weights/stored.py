"""Weights "in few bits": those that a model's file stores in 4 or 8 bits, with their scales and the host's function
that decodes them. (The weights that the option Low-bit quantizes are in low_bit.py.)

Each host with such weights has a StoredReader, which returns them as a StoredWeight, without a copy. operands.Decoded
makes the operands of kernels from it.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .low_bit import Kind

# (values, scales, dtype) -> a new tensor: the decoded weight in this dtype, in the shape of its layer.
Decode = Callable[[Tensor, Sequence[Tensor], torch.dtype], Tensor]


@dataclass(frozen=True)
class Format:
    """The format of a stored weight.

    name: for users, such as "INT8 (ConvRot)".
    facts: plain data, such as the width of a group. Formats with equal names and facts are decoded in the same way.
    kind: the eight-bit type in which the host multiplies the weight, after it has rounded the input to it; None if the
        host decodes the weight first.
    rotation: see QuantizedWeight.
    is_by_rows: whether each row of the weight is a row of the values, so that layers over the same input may share one
        tensor.
    """

    name: str
    facts: tuple[object, ...]
    kind: Kind | None = None
    rotation: int = 0
    is_by_rows: bool = False


def are_multiplied_alike(formats: Iterable[Format | None]) -> bool:
    """Whether a host multiplies all weights of these formats in eight bits, in the same type and rotation, so that one
    product can compute them. formats: of the weights; None: of a plain weight, which is not multiplied in eight
    bits."""
    ways = {None if one is None or one.kind is None else (one.kind, one.rotation) for one in formats}
    return len(ways) == 1 and None not in ways


class StoredWeight(NamedTuple):
    """A weight in few bits. values and scales are plain tensors (no subclass of Tensor) over the host's own memory.

    shape: of the decoded weight, (out, ...).
    values: the numbers as they are stored.
    scales: in the order in which decode takes them.
    decode: the host's own function for this format.
    holder: the host's tensor over the memory of values. Assigning to its data changes the host's weight. It is values
        itself unless the host's parameter has a subclass of Tensor.
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
        """The weight of a layer; None if it is not in few bits, but an ordinary parameter. path: of the layer in its
        network. Raises Refusal if the format is unknown or incomplete."""

    def tensors(self, layers: Sequence[nn.Module]) -> list[Tensor]:
        """All tensors that these layers compute with, as plain tensors, in the order of the layers: parameters, and the
        values and scales of weights in few bits. This runs at every call of a network, and takes a tenth of a
        millisecond for 500 layers."""

    def facts(self, layers: Sequence[nn.Module]) -> list[object]:
        """Plain data to compare with a later result: it is equal as long as each weight of these layers has the same
        Format and shape. This runs at every call of a network."""
