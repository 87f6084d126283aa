"""Matrix products in float8 (e4m3), and the requirements of 8-bit products.

A factor keeps three bits of mantissa. The format is that of Micikevicius et al. 2022 (FP8 Formats for Deep Learning).
Because it is a floating-point format, one scale is enough for most factors. With a scale for every row and column,
libraries are slower, or have no product (compute capability 8.9).
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....core.layer_weights import QuantizedWeight
from ....core.operators import QuantizedTokens
from ....core.version import release, written
from ....weights.low_bit import FP8, INT8, Kind

# The oldest compute capability with products in each format.
OLDEST_CAPABILITY = {FP8: (8, 9), INT8: (7, 5)}
# The oldest torch for FP8: in older versions, torch._scaled_mm returns a pair.
OLDEST_TORCH = (2, 5)
# The numbers of rows and of columns of the small product that is tried.
PROBE_ROWS = 64
# The largest accepted error of a product, relative to the same product of the rounded factors in float32.
WORST_PROBE_ERROR = 1e-2


def product(tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype) -> Tensor:
    """tokens (rows, in) times weight (out, in), plus bias (out,): (rows, out) in the dtype `result`, summed in float32.
    bias may be None.

    tokens has one scale; weight has one, or one for each row. Raises RuntimeError if torch or the device has no such
    product.
    """
    if weight.scales.numel() > 1:
        # In bfloat16, because unscaled sums may overflow in float16.
        sums = scaled_sums(tokens, weight.values, torch.ones_like(tokens.scales), None, torch.bfloat16)
        sums = sums.mul_(weight.scales)
        return (sums if bias is None else sums.add_(bias)).to(result)
    return scaled_sums(tokens, weight.values, weight.scales, bias, result)


def scaled_sums(
    tokens: QuantizedTokens, weight: Tensor, scale: Tensor, bias: Tensor | None, result: torch.dtype
) -> Tensor:
    """torch's product of tokens (rows, in) and a weight (out, in), plus bias, which may be None: (rows, out) in the
    dtype `result`. scale: the weight's single scale (1, 1). The tokens have a single scale too."""
    return torch._scaled_mm(
        tokens.values, weight.t(), scale_a=tokens.scales, scale_b=scale,
        bias=None if bias is None else bias.to(result), out_dtype=result, use_fast_accum=True,
    )


def update(tokens: QuantizedTokens, weight: QuantizedWeight) -> tuple[Tensor, Tensor | None]:
    """(the product of tokens and a weight in bfloat16, (rows, out); scales of its rows, float32 (rows, 1)). The
    operator that reads the product must multiply it by the scales. They are None if the tokens have a single scale
    (tokens.unit is None): then the product is scaled already.

    The product is in bfloat16, because unscaled sums may overflow in float16.
    """
    if tokens.unit is None:
        return product(tokens, weight, None, torch.bfloat16), None
    return product(tokens._replace(scales=tokens.unit), weight, None, torch.bfloat16), tokens.scales


class Float8Support(NamedTuple):
    """Whether float8 products work for a model of one dtype. One of result and reason is None.

    result: the dtype of the products' outputs: the model's dtype or bfloat16; None if there are no products.
    reason: why there are none, in one sentence for the user.
    """

    result: torch.dtype | None
    reason: str | None


def unmet_requirement(kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device cannot compute products of this 8-bit format, FP8 or INT8, for a model of this dtype, in one
    sentence for the user; None if it meets all known requirements. For a device that is no GPU, these are a
    half-precision dtype and, for FP8, the version of torch. Computes nothing on the device; float8_support also tries a
    product."""
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
        example = ", such as RTX 40 and H100" if kind is FP8 else ", such as GTX 16 and RTX 20"
        if kind is INT8 and dtype == torch.bfloat16 and capability < (8, 0):
            return f"INT8 is for models in float16 on the {card}, and this one is in bfloat16"
        if capability < oldest:
            needed = f"{name} needs a GPU of compute capability {written(oldest)} or higher{example}"
            return f"{needed}, and the {card} has {written(capability)}"
    return None


def float8_support(device: torch.device, dtype: torch.dtype) -> Float8Support:
    """Whether float8 products work on this device for a model of this dtype: computes small products there and checks
    them, if the known requirements are met. That takes a while, so the caller keeps the result for each device and
    dtype. Raises torch.cuda.OutOfMemoryError."""
    reason = unmet_requirement(FP8, device, dtype)
    if reason is not None:
        return Float8Support(None, reason)
    # Older libraries only support bfloat16 outputs.
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
        reason = f"its products have a relative error of {error:.1e}"
    return Float8Support(None, f"PyTorch {torch.__version__} cannot multiply FP8 here: {reason}")


def probe_error(device: torch.device, result: torch.dtype) -> float:
    """The larger of the relative errors of two small products on a device, against the same products in float32: one by
    product(), with all scales applied, in the dtype `result`; and one by update(), whose rows are left unscaled. Raises
    what torch raises if it has no such product."""
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
