"""Matrix products in float8 (e4m3) with one scale for each factor, and which GPUs and models have products in eight
bits.

Lossy: three bits of every factor are kept after the point. The type is that of Micikevicius et al. 2022 (FP8 Formats
for Deep Learning). It keeps as many bits of what is a thousand times smaller, so one scale serves most factors; with a
scale for every row and column, libraries are slower, or have no product at all (compute capability 8.9).
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....core.layer_weights import QuantizedWeight
from ....core.operators import QuantizedTokens
from ....core.version import release, written
from ....weights.low_bit import FP8, INT8, Kind

OLDEST_CAPABILITY = {FP8: (8, 9), INT8: (7, 5)}
# Older ones answer with a pair.
OLDEST_TORCH = (2, 5)
PROBE_ROWS = 64
# Between two sums of the same rounded factors, relative to their norm.
WORST_PROBE_ERROR = 1e-2


def product(tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype) -> Tensor:
    """(rows, in), which have one scale, times (out, in), plus bias (out,): (rows, out) in the result's dtype, summed in
    float32.

    Raises RuntimeError where this torch or this device cannot.
    """
    if weight.scales.numel() > 1:
        # What was not scaled yet does not overflow in bfloat16.
        sums = scaled_sums(tokens, weight.values, torch.ones_like(tokens.scales), None, torch.bfloat16)
        sums = sums.mul_(weight.scales)
        return (sums if bias is None else sums.add_(bias)).to(result)
    return scaled_sums(tokens, weight.values, weight.scales, bias, result)


def scaled_sums(
    tokens: QuantizedTokens, weight: Tensor, scale: Tensor, bias: Tensor | None, result: torch.dtype
) -> Tensor:
    return torch._scaled_mm(
        tokens.values, weight.t(), scale_a=tokens.scales, scale_b=scale,
        bias=None if bias is None else bias.to(result), out_dtype=result, use_fast_accum=True,
    )


def update(tokens: QuantizedTokens, weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """The product of tokens whose rows may have scales, which are left to who reads it: (rows, out), and those scales,
    (rows, 1). In bfloat16, in which what was not scaled does not overflow."""
    if tokens.unit is None:
        return product(tokens, weight, None, torch.bfloat16), None
    return product(tokens._replace(scales=tokens.unit), weight, None, torch.bfloat16), tokens.scales


class Float8Support(NamedTuple):
    """result: the type in which products come out; None where there are none, and reason says why in one sentence."""

    result: torch.dtype | None
    reason: str | None


def why_not(kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products of a kind are not for this device and this dtype, in one sentence; None if nothing is known to stand
    in the way."""
    name = kind.name.upper()
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{name} is for models in float16 or bfloat16, and this one is in {str(dtype).removeprefix('torch.')}"
    if kind is FP8 and release(torch.__version__) < OLDEST_TORCH:
        return f"FP8 needs torch {written(OLDEST_TORCH)} or newer, and this is torch {torch.__version__}"
    if torch.version.hip:
        return f"{name} has not been tried on AMD GPUs"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        card = torch.cuda.get_device_name(device)
        oldest = OLDEST_CAPABILITY[kind]
        example = ", such as RTX 40 and H100" if kind is FP8 else ""
        if kind is INT8 and dtype == torch.bfloat16 and capability < (8, 0):
            return f"INT8 is for models in float16 on the {card}, and this one is in bfloat16"
        if capability < oldest:
            needed = f"{name} needs a GPU of compute capability {written(oldest)} or higher{example}"
            return f"{needed}, and the {card} has {written(capability)}"
    return None


def float8_support(device: torch.device, dtype: torch.dtype) -> Float8Support:
    """Whether float8 products can be used for a model of this dtype: a small one is tried. Ask once for a device."""
    reason = why_not(FP8, device, dtype)
    if reason is not None:
        return Float8Support(None, reason)
    # Older libraries give bfloat16 alone.
    for result in dict.fromkeys((dtype, torch.bfloat16)):
        try:
            error = probe_error(device, result)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, AttributeError) as failure:
            reason = str(failure).partition("\n")[0]
            continue
        if error <= WORST_PROBE_ERROR:
            return Float8Support(result, None)
        reason = f"they are wrong by {error:.1e}"
    return Float8Support(None, f"PyTorch {torch.__version__} cannot multiply FP8 here: {reason}")


def probe_error(device: torch.device, result: torch.dtype) -> float:
    """The relative error of small products against the same in float32: of one that is done, and of one whose rows are
    scaled afterwards. Raises what torch raises where it has none."""
    generator = torch.Generator(device).manual_seed(0)
    rows, columns = (
        torch.randn((count, PROBE_ROWS), generator=generator, dtype=torch.float32, device=device)
        for count in (PROBE_ROWS, 2 * PROBE_ROWS)
    )
    bias = torch.ones(2 * PROBE_ROWS, dtype=torch.float32, device=device)
    scales = rows.abs().amax(1, keepdim=True) / FP8.largest
    one_scale = columns.abs().amax().view(1, 1) / FP8.largest
    values = (rows / scales).to(FP8.dtype)
    weight = QuantizedWeight((columns / one_scale).to(FP8.dtype), one_scale)
    sums = values.float() @ weight.values.float().t() * one_scale
    done = product(QuantizedTokens(values, one_scale, (PROBE_ROWS,)), weight, bias, result)
    left, _ = update(QuantizedTokens(values, scales, (PROBE_ROWS,), torch.ones_like(one_scale)), weight)
    pairs = (done, sums * one_scale + bias), (left, sums)
    return max(float((output.float() - expected).norm() / expected.norm()) for output, expected in pairs)
