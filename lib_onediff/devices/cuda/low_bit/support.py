"""Which GPUs and models have products in eight bits."""
from __future__ import annotations

from typing import NamedTuple

import torch

from ....core.affine import QuantizedWeight
from ....core.operators import QuantizedTokens
from ....weights.low_bit import FP8, INT8, Kind
from ..requirements import LAST_TRITON_FOR_TURING, TURING, oldest_int8_capability, release, triton_here, written
from . import scaled_mm

FP8_CAPABILITY = (8, 9)
# Older ones answer with a pair.
OLDEST_TORCH = (2, 5)
PROBE_ROWS = 64
# Between two sums of the same rounded factors, relative to their norm.
WORST_PROBE_ERROR = 1e-2


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
    if device.type == "cuda" and not torch.version.hip:
        capability, card = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
        return too_old(kind, capability, card, triton_here())
    return None


def too_old(kind: Kind, capability: tuple[int, int], card: str, triton: str | None) -> str | None:
    """Why a GPU has no products of a kind, by a release of Triton; None if it has."""
    oldest = oldest_int8_capability(triton) if kind is INT8 else FP8_CAPABILITY
    if capability >= oldest:
        return None
    example = ", such as RTX 40 and H100" if kind is FP8 else ""
    needed = f"{kind.name.upper()} needs a GPU of compute capability {written(oldest)} or higher{example}"
    if kind is INT8 and capability >= TURING:
        needed += f" with Triton {triton} ({written(TURING)} with {written(LAST_TRITON_FOR_TURING)})"
    return f"{needed}, and the {card} has {written(capability)}"


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
        torch.randn((count, PROBE_ROWS), generator=generator, device=device) for count in (PROBE_ROWS, 2 * PROBE_ROWS)
    )
    bias = torch.ones(2 * PROBE_ROWS, device=device)
    values, scales = scaled_mm.rounded_rows(rows, FP8)
    one_scale = scaled_mm.one_scale_of(columns, FP8)
    weight = QuantizedWeight(*scaled_mm.rounded_rows(columns, FP8, one_scale))
    sums = values.float() @ weight.values.float().t() * one_scale
    done = scaled_mm.product(QuantizedTokens(values, one_scale, (PROBE_ROWS,)), weight, bias, result)
    left, _ = scaled_mm.update(QuantizedTokens(values, scales, (PROBE_ROWS,), torch.ones_like(one_scale)), weight)
    pairs = (done, sums * one_scale + bias), (left, sums)
    return max(float((output.float() - expected).norm() / expected.norm()) for output, expected in pairs)
