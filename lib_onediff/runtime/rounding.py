"""The error that rounding explains: every operator rounds its result, and the network amplifies the difference.

An error up to NO_QUESTION is accepted, and an error above MOST_ERROR is not. In between, the limit is measured for this
network and these inputs: the reference operators compute the forward twice, the second time with noise of the dtype's
precision on each operator's result. In every network that was tried, trained or random, the difference between the
host's output and a correct one of ours was 0.3 to 1.4 times the difference between these two reference outputs, even in
networks that amplify rounding a thousandfold. An error in our code is not amplified rounding, and exceeds the limit.
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

# Relative errors accepted without a measurement of the network's amplification: in float32 five times the usual error,
# in float16 and bfloat16 twice the usual error.
NO_QUESTION = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Relative errors above these are never accepted, however much the network amplifies rounding: the image could change
# visibly.
MOST_ERROR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
# TF32 rounds the inputs of products to ten bits of mantissa, as float16 does.
LIKE_TF32 = torch.float16
# limit_for's limit is the measured spread times this.
MARGIN = 3.0
# The number of noises that spread() tries if the inputs of layers are rounded to eight bits.
DRAWS = 8


def rounds_as(dtype: torch.dtype, device: torch.device, flags: Flags = ()) -> torch.dtype:
    """The dtype whose rounding error is expected of a network of this dtype: float16 (as TF32 rounds) for float32 on a
    GPU if our call or the host uses TF32, otherwise the dtype itself. flags: see rounding_limit."""
    is_float32_on_gpu = dtype == torch.float32 and device.type == "cuda"
    return LIKE_TF32 if is_float32_on_gpu and (tf32_is_on() or any(value for _, value in flags)) else dtype


def rounding_limit(dtype: torch.dtype, device: torch.device, flags: Flags = ()) -> float:
    """The largest relative error of an output in this dtype that is ever accepted, however much the network amplifies
    rounding. The limit is wider if our call sums in half precision, or if our call or the host uses TF32.

    flags: torch's switches for precision in our call (see core.precision.flags_for). The host's are those that are set
    now.
    """
    if (HALF_SUMS, True) in flags:
        return ROUNDING_HALF_SUMS
    return MOST_ERROR[rounds_as(dtype, device, flags)]


def no_question(dtype: torch.dtype, device: torch.device, flags: Flags = ()) -> float:
    """The largest relative error that is accepted without measuring how much the network amplifies rounding. flags: see
    rounding_limit."""
    if (HALF_SUMS, True) in flags:
        return ROUNDING_HALF_SUMS
    return NO_QUESTION[rounds_as(dtype, device, flags)]


def limit_for(error: float, least: float, most: float, spread: Callable[[], float] | None) -> float:
    """The limit with which the caller must compare `error`: the largest relative error that rounding explains, between
    least and most.

    If the error is at most least, the limit is least; if the error is above most, or NaN, the limit is most: these need
    no measurement. In between, the limit is MARGIN times the result of spread(), clipped to [least, most]; it is least
    if spread is None (nothing can be measured) or gives a result that is not finite.
    """
    if error > most or math.isnan(error):
        return most
    if error <= least or spread is None:
        return least
    measured = MARGIN * spread()
    return min(most, max(least, measured)) if math.isfinite(measured) else least


def precision_of(dtype: torch.dtype) -> float:
    """The relative error of one operator's result in a dtype. For float32 it is eps, from the order of summation; for a
    narrower dtype eps / 2, because the sums are in float32 and only the result is rounded."""
    return torch.finfo(dtype).eps * (1.0 if dtype == torch.float32 else 0.5)


# Operators that do not round, or that round exactly as the host does: they get no noise.
EXACT_OPERATIONS = frozenset({
    "sinusoids", "join", "concatenate", "resize", "image_to_tokens", "tokens_to_image", "bias_or_zeros",
    "channels_last",
})


# The relative noise of a product whose input the host rounds to eight bits and the reference does not, by the dtype to
# which it is rounded: float8 (e4m3), and int8 in layers with a LoRA. A row of normally distributed numbers has an error
# of 2**-7 in int8, a row with outliers a larger one.
ROUNDING_OF_INPUTS = {torch.float8_e4m3fn: 2.0**-5, torch.int8: 2.0**-6}


class RoundingNoise:
    """The operators of `ops`, with their results multiplied by 1 + precision * n, where n is normally distributed noise
    of a fixed seed. spread() compares an output of these operators with the output of `ops`.

    If the host rounds a layer's inputs to int8, the reference operators round them too. So noise that moves an input
    across the middle between two integers has the same effect as in the host's network.
    """

    def __init__(self, ops: Operators, precision: float, device: torch.device, seed: int = 0) -> None:
        self._ops = ops
        self._precision = precision
        self._generator = torch.Generator(device).manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        """The operator of this name in `ops`, with noise on its results; without noise if it is one of
        EXACT_OPERATIONS."""
        operator = getattr(self._ops, name)
        if name in EXACT_OPERATIONS:
            return operator
        return lambda *args, **kwargs: self._noisy(operator(*args, **kwargs), self._precision_for(args))

    def split_heads(self, projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
        """The operator split_heads, with noise only on heads that are normed or rotated: all other heads are views of
        the input, and so exact."""
        found = []
        for heads, part in zip(self._ops.split_heads(projected, parts), parts, strict=True):
            is_view = part.norm is None and part.rotary is None
            found.append(heads if is_view else self._noisy(heads, self._precision))
        return found

    def _precision_for(self, arguments: tuple[Any, ...]) -> float:
        """The relative noise for an operator with these arguments: the usual precision; or the value of
        ROUNDING_OF_INPUTS, if that is larger and one argument is a layer whose input the host rounds to eight bits and
        `ops` does not."""
        for one in arguments:
            if isinstance(one, LayerWeights) and one.low_bit:
                dtype = one.low_bit[0].values.dtype
                if one.low_rank is not None or dtype != torch.int8:
                    return max(self._precision, ROUNDING_OF_INPUTS[dtype])
        return self._precision

    def _noisy(self, found: Any, precision: float) -> Any:
        """An operator's result with noise on every tensor. found: a tensor; a tuple or list of results; or a Residual,
        of which only the tokens get noise."""
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
    """How far rounding moves an output: the relative difference between compute(ops) and the same forward with noise on
    each operator's result. Takes two forwards and the memory of one forward.

    compute: compute(operators) returns the output of the forward with these operators. ops: the reference operators.
    dtype: the result of rounds_as(), whose rounding the noise imitates. rounds_inputs: whether inputs of layers are
    rounded to eight bits. In a small network, few inputs are near the middle between two eight-bit values, and most
    noises move none across it; so DRAWS noises are tried, with one forward each, and the largest difference is
    returned.
    """
    exact = compute(ops).float()
    length = exact.norm().clamp_min(torch.finfo(torch.float32).tiny)
    farthest = 0.0
    for seed in range(DRAWS if rounds_inputs else 1):
        noisy: Any = RoundingNoise(ops, precision_of(dtype), device, seed)
        farthest = max(farthest, float((compute(noisy).float() - exact).norm() / length))
    return farthest
