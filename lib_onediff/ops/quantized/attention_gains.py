"""Which self attentions take their scores from products in int8: those that were measured to gain, once on a machine.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...model.forward import transformer_blocks
from ...model.layout import SelfAttention, TransformerBlock, UNetLayout
from ..attention import FEW_KEYS, WIDEST_HEAD, choice_name
from ..attention_tuning import Shape, relative_error
from ..card import current_card
from ..tuning_cache import TuningCache
from .gains import WORTH_ROUNDING, TimeMs

# As Attention.__call__.
Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
# Whether attentions of a shape (batch, heads, tokens, width) and dtype are in int8.
Choose = Callable[[Shape, torch.dtype], bool]
# Relative to the output's norm, at random inputs. Seen: 1.2e-2; a wrong one is off by about 1.
WORST_ERROR = 0.05


def may_gain(shape: Shape) -> bool:
    """Few keys have a kernel of their own, and no wider head fits into a processor."""
    return shape[2] > FEW_KEYS and shape[3] <= WIDEST_HEAD


class AttentionChoice:
    """Safe on any thread. everywhere: whether all are in int8 that may be, whatever that gains."""

    def __init__(self, tuning_cache: TuningCache, everywhere: Callable[[], bool] = lambda: False) -> None:
        self._tuning_cache = tuning_cache
        self._everywhere = everywhere
        self._known: dict[tuple[int, int, torch.dtype, int], bool] = {}

    def serves(self, shape: Shape, dtype: torch.dtype) -> bool:
        """Whether attentions of this shape and its class are in int8: only where they were measured to gain."""
        if self._everywhere():
            return may_gain(shape)
        key = shape[2], shape[3], dtype, current_card()
        known = self._known.get(key)
        if known is None:
            gains = self.gains(shape, dtype)
            if gains is None:
                return False
            known = self._known[key] = gains > 0
        return known

    def gains(self, shape: Shape, dtype: torch.dtype) -> float | None:
        """The milliseconds that were measured to be gained, 0 where they are too few; None where nothing was."""
        times = self.measured(shape, dtype)
        if times is None:
            return None
        exact, rounded = times
        return exact - rounded if rounded < WORTH_ROUNDING * exact else 0.0

    def measured(self, shape: Shape, dtype: torch.dtype) -> tuple[float, float] | None:
        """Milliseconds of the exact attention and of the one in int8; None where nothing was measured."""
        value = self._tuning_cache.get(name_of(shape, dtype))
        # It may come from a store that anybody has written.
        if not (isinstance(value, list) and len(value) == 2 and all(is_time(ms) for ms in value)):
            return None
        return value[0], value[1]

    def why_none(self, shapes: Iterable[Shape], dtype: torch.dtype) -> str | None:
        """Why a call with attentions of these shapes gains nothing, in one sentence; None where it does, or may."""
        gains = [self.gains(shape, dtype) for shape in set(shapes)]
        if not gains:
            return f"this UNet's self attentions have too few keys to gain by INT8 (up to {FEW_KEYS})"
        if self._everywhere() or None in gains or any(gains):
            return None
        return "at this size attention gains nothing by INT8 on this machine (measured)"

    def measure(
        self, shape: Shape, dtype: torch.dtype, exact: Callable[[], Tensor], rounded: Callable[[], Tensor],
        expected: Tensor, time_ms: TimeMs,
    ) -> None:
        """Measure both ways at one shape. expected: what they compute, exactly.

        Raises RuntimeError where the one in int8 is wrong.
        """
        error = relative_error(rounded(), expected)
        # A NaN is not within the limit either.
        if not error <= WORST_ERROR:
            raise RuntimeError(f"attention in INT8 is wrong by {error:.1e} at {shape}")
        self._tuning_cache.set(name_of(shape, dtype), [time_ms(exact), time_ms(rounded)])
        self.forget()

    def forget(self) -> None:
        """Ask for every choice again."""
        self._known = {}


class AttentionPlan:
    """The self attentions of a call, found once for calls of one size."""

    def __init__(self) -> None:
        self._made_for: tuple[object, ...] = ()
        self._found: dict[str, Shape] = {}

    def shapes(self, layout: UNetLayout, height: int, width: int, batch: int) -> Mapping[str, Shape]:
        """By the names of those that may gain, the shape (batch, heads, tokens, width) of query, key and value. height,
        width: of the latent."""
        made_for = layout, height, width, batch
        if made_for != self._made_for:
            found: dict[str, Shape] = {}
            for block, pixels in transformer_blocks(layout, height, width):
                attention = block.self_attention
                features = attention.query_key_value.out_features // 3
                found[attention_name(attention)] = (batch, attention.heads, pixels, features // attention.heads)
            self._found = {name: shape for name, shape in found.items() if may_gain(shape)}
            self._made_for = made_for
        return self._found


def names(layout: UNetLayout) -> list[str]:
    """Of every self attention."""
    return [attention_name(block.self_attention) for block in layout.layers(TransformerBlock)]


def attention_name(attention: SelfAttention) -> str:
    """Beside the layers' names, one of its own."""
    return f"{attention.query_key_value.name}, attention"


def shape_class(shape: Shape) -> str:
    """The class of shapes of an attention, for which its launch configuration is chosen."""
    return f"{shape[3]}, {1 << (shape[2] - 1).bit_length()} tokens"


def name_of(shape: Shape, dtype: torch.dtype) -> str:
    """Under which the times of a class of shapes are kept."""
    return f"int8 {choice_name(shape, shape, dtype)}"


def is_time(ms: Any) -> bool:
    return isinstance(ms, (int, float)) and math.isfinite(ms) and ms > 0
