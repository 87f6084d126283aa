"""How far two honest outputs of one forward lie apart: each operator rounds, and the network amplifies that.

An error up to NO_QUESTION is accepted, one above MOST_ERROR is not. What lies between is judged by what rounding
explains in this network at these inputs: the reference operators compute the forward twice, once with a noise of the
type's precision on what each of them returns. The two outputs lie as far apart as the host's and ours do: 0.3 to 1.4
times as far in every network that was tried, trained or random, also in those that amplify rounding a thousandfold. A
fault of ours is not amplified rounding, and stands out.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.layer_weights import LayerWeights
from ..core.operators import Heads, Operators, Residual
from ..core.precision import HALF_SUMS, ROUNDING_HALF_SUMS, Flags, tf32_is_on

# Relative errors that need no measurement: five times what is usual in float32, twice what is in the others.
NO_QUESTION = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Whatever a network amplifies: farther from the host, an image may be another one.
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# TF32 keeps ten bits of a product's inputs, as float16 does.
LIKE_TF32 = torch.float16
# How many times the measured distance is accepted.
MARGIN = 3.0
# How many noises are tried where the inputs of layers are rounded to eight bits.
DRAWS = 8


def rounds_as(dtype: torch.dtype, device: torch.device, flags: Flags = ()) -> torch.dtype:
    """The type whose rounding tells how far two outputs of a network of this type may lie apart. flags: see
    rounding_limit."""
    is_float32_on_gpu = dtype == torch.float32 and device.type == "cuda"
    return LIKE_TF32 if is_float32_on_gpu and (tf32_is_on() or any(value for _, value in flags)) else dtype


def rounding_limit(dtype: torch.dtype, device: torch.device, flags: Flags = ()) -> float:
    """The largest error that is ever accepted. flags: with which our output was computed; the host's had those that
    stand now."""
    if (HALF_SUMS, True) in flags:
        return ROUNDING_HALF_SUMS
    return MOST_ERROR[rounds_as(dtype, device, flags)]


def no_question(dtype: torch.dtype, device: torch.device, flags: Flags = ()) -> float:
    """The largest error that is accepted without a measurement. flags: see rounding_limit."""
    if (HALF_SUMS, True) in flags:
        return ROUNDING_HALF_SUMS
    return NO_QUESTION[rounds_as(dtype, device, flags)]


def explained(error: float, least: float, most: float, spread: Callable[[], float] | None) -> float:
    """The limit for this error: the largest that rounding explains.

    Up to least it is least, and above most it is most, which this error is beyond: nothing is measured. Between the two
    it is MARGIN times the measured spread, but not below least and not above most; least where the spread is None (it
    cannot be measured) or not finite. spread: see spread.
    """
    if error > most or math.isnan(error):
        return most
    if error <= least or spread is None:
        return least
    measured = MARGIN * spread()
    return min(most, max(least, measured)) if math.isfinite(measured) else least


def precision_of(dtype: torch.dtype) -> float:
    """The relative noise of one operator's result in a type. In float32 it comes from the order of summation: eps. In a
    narrower type, sums are float32's and the result is rounded once: eps / 2."""
    return torch.finfo(dtype).eps * (1.0 if dtype == torch.float32 else 0.5)


# These round nothing, or round as the host does: to the bit.
EXACT_OPERATIONS = frozenset({
    "sinusoids", "join", "concatenate", "resize", "image_to_tokens", "tokens_to_image", "bias_or_zeros",
    "channels_last",
})


# Of the product of an input that is rounded to eight bits, where the reference does not round it: to float8 (e4m3), and
# to int8 beside a LoRA. A row of normally distributed numbers in int8 has an error of 2**-7, one with outliers more.
ROUNDING_OF_INPUTS = {torch.float8_e4m3fn: 2.0**-5, torch.int8: 2.0**-6}


class RoundingNoise:
    """Operators whose results are multiplied by 1 + precision * noise, normally distributed and the same each time.

    Where a layer's inputs are rounded to int8, the reference rounds them as well: noise that takes one over the edge
    between two integers has the effect that it has in a network.
    """

    def __init__(self, ops: Operators, precision: float, device: torch.device, seed: int = 0) -> None:
        self._ops = ops
        self._precision = precision
        self._generator = torch.Generator(device).manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._ops, name)
        if name in EXACT_OPERATIONS:
            return operator
        return lambda *args, **kwargs: self._noisy(operator(*args, **kwargs), self._precision_for(args))

    def split_heads(self, projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
        """Noise only on heads that are normed or rotated: others are views."""
        found = []
        for heads, part in zip(self._ops.split_heads(projected, parts), parts, strict=True):
            is_view = part.norm is None and part.rotary is None
            found.append(heads if is_view else self._noisy(heads, self._precision))
        return found

    def _precision_for(self, arguments: tuple[Any, ...]) -> float:
        """The noise of an operator with these arguments."""
        for one in arguments:
            if isinstance(one, LayerWeights) and one.low_bit:
                dtype = one.low_bit[0].values.dtype
                if one.low_rank is not None or dtype != torch.int8:
                    return max(self._precision, ROUNDING_OF_INPUTS[dtype])
        return self._precision

    def _noisy(self, found: Any, precision: float) -> Any:
        if isinstance(found, Residual):
            return found._replace(tokens=self._noisy(found.tokens, precision))
        if isinstance(found, (tuple, list)):
            return type(found)(self._noisy(one, precision) for one in found)
        wide = found.float()
        noise = torch.randn(wide.shape, generator=self._generator, dtype=torch.float32, device=wide.device)
        return torch.addcmul(wide, wide, noise, value=precision).to(found.dtype)


def spread(
    compute: Callable[[Operators], Tensor], ops: Operators, dtype: torch.dtype, device: torch.device,
    rounds_inputs: bool = False,
) -> float:
    """How far rounding moves an output, relative to its norm: compute with these operators, the reference, and with
    noise on each of their results. dtype: see rounds_as. Takes two forwards and the memory of one.

    rounds_inputs: the inputs of layers are rounded to eight bits. In a small network few of them lie near an edge, and
    most noises take none over it: DRAWS noises are tried, and the farthest output counts."""
    exact = compute(ops).float()
    length = exact.norm().clamp_min(torch.finfo(torch.float32).tiny)
    farthest = 0.0
    for seed in range(DRAWS if rounds_inputs else 1):
        noisy: Any = RoundingNoise(ops, precision_of(dtype), device, seed)
        farthest = max(farthest, float((compute(noisy).float() - exact).norm() / length))
    return farthest
