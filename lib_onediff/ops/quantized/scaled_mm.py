"""Matrix products in float8 (e4m3) with a scale for every row and every column, and whether this machine has them.

Lossy: three bits of every factor are kept after the point. The type is that of Micikevicius et al. 2022 (FP8 Formats
for Deep Learning); the scales are taken from the tensor itself at every call.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...model.low_bit import FP8, Kind
from ...model.operators import QuantizedTokens
from ...model.weights import QuantizedWeight
from ..requirements import release, written

# A row of zeros has this for its largest value.
SMALLEST_MAXIMUM = 1e-12
OLDEST_CAPABILITY = (8, 9)
# Older ones have no scales of rows, and answer with a pair.
OLDEST_TORCH = (2, 5)
# The two factors lie as multiples of 16 bytes, or no library multiplies them.
ALIGNED = 16
PROBE_ROWS = 64
# Between two sums of the same rounded factors, relative to their norm.
WORST_PROBE_ERROR = 1e-2


class Float8Support(NamedTuple):
    """result: the type in which products come out; None where there are none, and reason says why in one sentence."""

    result: torch.dtype | None
    reason: str | None


def product(tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype) -> Tensor:
    """(rows, in) times (out, in), plus bias (out,): (rows, out) in the result's dtype, summed in float32.

    Raises RuntimeError where this torch or this device cannot.
    """
    return torch._scaled_mm(
        tokens.values, weight.values.t(), scale_a=tokens.scales, scale_b=weight.scales,
        bias=None if bias is None else bias.to(result), out_dtype=result, use_fast_accum=True,
    )


def rounded_rows(rows: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(rows, width) as values of the same shape in eight bits, and the scales (rows, 1) in float32 that give it back.
    """
    wide = rows.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min(SMALLEST_MAXIMUM) / kind.largest
    ratio = wide / scales
    return (ratio if kind.dtype.is_floating_point else (ratio + 0.5).floor()).to(kind.dtype), scales


def support(device: torch.device, dtype: torch.dtype) -> Float8Support:
    """Whether float8 products can be used for a model of this dtype: a small one is tried. Ask once for a device."""
    reason = why_no_float8_gpu(device, dtype)
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
    return Float8Support(None, f"PyTorch {torch.__version__} cannot multiply FP8 row by row here: {reason}")


def why_no_float8_gpu(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why float8 products are not for this device and this dtype, in one sentence."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return f"FP8 is for models in float16 or bfloat16, and this one is in {name}"
    if release(torch.__version__) < OLDEST_TORCH:
        return f"FP8 needs torch {written(OLDEST_TORCH)} or newer, and this is torch {torch.__version__}"
    if device.type == "cuda" and not torch.version.hip:
        return too_old(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    return None


def too_old(capability: tuple[int, int], name: str) -> str | None:
    """Why a GPU has no float8 products; None if it has."""
    if capability >= OLDEST_CAPABILITY:
        return None
    return (
        f"FP8 needs a GPU of compute capability {written(OLDEST_CAPABILITY)} or higher, such as RTX 40 and H100, and "
        f"the {name} has {written(capability)}"
    )


def probe_error(device: torch.device, result: torch.dtype) -> float:
    """The relative error of a small product against the same in float32. Raises what torch raises where it has none."""
    generator = torch.Generator(device).manual_seed(0)
    rows, columns = (
        torch.randn((count, PROBE_ROWS), generator=generator, device=device) for count in (PROBE_ROWS, 2 * PROBE_ROWS)
    )
    bias = torch.ones(2 * PROBE_ROWS, device=device)
    (values, scales), (weight, weight_scales) = rounded_rows(rows, FP8), rounded_rows(columns, FP8)
    expected = (values.float() * scales) @ (weight.float() * weight_scales).t() + bias
    rounded = QuantizedWeight(weight, weight_scales.t().contiguous())
    output = product(QuantizedTokens(values, scales, (PROBE_ROWS,)), rounded, bias, result)
    return float((output.float() - expected).norm() / expected.norm())
