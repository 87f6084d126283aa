"""Low-bit without a GPU, and without Triton's interpreter, which rounds float8 incorrectly: every kernel of the native
backend, also those that quantize rows, is replaced by torch's operators."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import exact_operators
import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_unet
from ladder_builders import NATIVE
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.card import TuningCache
from lib_onediff.core.key import Lossy
from lib_onediff.core.layer_weights import LayerWeights, QuantizedWeight
from lib_onediff.core.leaves import GroupNorm, LayerNorm
from lib_onediff.core.operators import Activation, QuantizedTokens, Residual
from lib_onediff.core.settings import MOST_LOW_BIT_ERROR
from lib_onediff.core.table import Entry
from lib_onediff.devices.cuda.kernels import images, products, rounding, tokens
from lib_onediff.devices.cuda.kernels.launch_config import Launches
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.cuda.kernels.rounding import Rule
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import low_bit
from lib_onediff.weights.low_bit import FP8, KINDS, Kind

# The backend that served_by() returns: exact, with 8-bit products, and with weights in 8 bits alone.
EXACT, EIGHT, ONLY = "native", "native, 8-bit", "native, 8-bit only"


def half_unet() -> nn.Module:
    return diffusers_unet(**{**SMALL_XL, "norm_num_groups": 2}).half()


def half_call(unet: nn.Module, seed: int = 0, timestep: float = 981.25) -> UNetCall:
    call = a_call(unet, 4, 4, 1, 5, seed)
    parts: dict[str, Any] = {name: getattr(call, name).half() for name in ("latent", "context", "y")}
    return replace(call, **parts, timestep=torch.full_like(call.timestep, timestep))


def compiled(unet: nn.Module, low_bit: str) -> Any:
    """A UNet that OneDiff serves with Low-bit and no error budget, because small layers have large errors."""
    return lib_onediff.compile_unet(unet, low_bit=low_bit, low_bit_budget=MOST_LOW_BIT_ERROR)


def served_by() -> tuple[str, str]:
    """(backend with its lossy products, route) of the last call. route: "graph" for a replay, "plain" for our forward
    without one, "host" for the host's own forward."""
    status = lib_onediff.status()
    return ", ".join(filter(None, (status["backend"], status["lossy"]))), status["route"]


def entry_of(low_bit: str) -> Entry:
    """The entry of the runtime's table for the native backend with this setting of Low-bit."""
    lossy = Lossy(low_bit)
    [entry] = [entry for entry in runtime.table.entries() if entry.key.lossy == lossy and entry.key.backend == NATIVE]
    return entry


def kinds_kept(unet: nn.Module) -> set[Kind]:
    """The formats of the 8-bit weights that OneDiff keeps for a UNet now."""
    low_bit = runtime.services.networks.get(unet).low_bit
    return set() if low_bit is None else low_bit.kinds()


def rounded(tokens: Tensor, kind: Kind, one_scale: Tensor | None = None, rule: Rule = Rule.OURS) -> QuantizedTokens:
    values, scales = exact_operators.rounded_rows(tokens.flatten(0, -2), kind, one_scale)
    unit = torch.ones(1, 1, device=tokens.device) if kind is FP8 and one_scale is None else None
    return QuantizedTokens(values, scales, tuple(tokens.shape[:-1]), unit)


def norm_scale(weight: Tensor, bias: Tensor | None) -> Tensor:
    """One float8 scale, (1, 1), for any output of a layer norm: the smallest power of two with which the largest
    possible value fits into float8."""
    largest = (len(weight) - 1) ** 0.5 * weight.float().abs()
    largest = largest if bias is None else largest + bias.float().abs()
    _, exponent = torch.frexp(largest.amax() / FP8.largest)
    return torch.exp2(exponent.float()).view(1, 1)


def layer_norm(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, kind: Kind, config: Any, rule: Rule,
    is_plain_too: bool,
) -> tuple[Residual, QuantizedTokens]:
    tokens = materialize(residual)
    normed = torch.nn.functional.layer_norm(tokens, (tokens.shape[-1],), weight, bias, eps)
    return Residual(tokens), rounded(normed, kind, norm_scale(weight, bias) if kind is FP8 else None)


def rounded_rows(rows: Tensor, values: Tensor, scales: Tensor) -> None:
    kind = next(kind for kind in KINDS if kind.dtype == values.dtype)
    one_scale = exact_operators.one_scale_of(rows, kind) if scales.numel() < len(rows) else None
    found, largest = exact_operators.rounded_rows(rows, kind, one_scale)
    values.copy_(found)
    scales.copy_(largest.view(scales.shape))


def int8_product(
    tokens: QuantizedTokens, weight: QuantizedWeight, bias: Tensor | None, result: torch.dtype, *others: Any
) -> Tensor:
    sums = tokens.values.float() @ weight.values.float().t() * tokens.scales * weight.scales
    return (sums if bias is None else sums + bias.float()).to(result)


# The results of our exact kernels, by torch: sums in float32, rounded once.
def exact_group_norm(
    first: Tensor, second: Tensor | None, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool,
    shift: Tensor | None, *configs: Any,
) -> Tensor:
    image = first if second is None else torch.cat([first, second], 1)
    norm = GroupNorm("norm", image.shape[1], groups, eps)
    return torch_ops.WideNorms().group_norm(image, LayerWeights(weight, bias), norm, silu, shift)


def materialize(residual: Residual, config: Any = None) -> Tensor:
    return torch_ops.materialize(residual._replace(tokens=residual.tokens.float())).to(residual.tokens.dtype)


def exact_layer_norm(
    residual: Residual, weight: Tensor, bias: Tensor | None, eps: float, config: Any
) -> tuple[Residual, Tensor]:
    whole = Residual(materialize(residual))
    norm = LayerNorm("norm", len(weight), eps)
    return torch_ops.residual_norm(whole, LayerWeights(weight, bias), norm, LayerWeights(weight, None))


def add_and_measure(image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor, *others: Any) -> None:
    total = update.float() if image is None else update.float() + image
    output.copy_(total if bias is None else total + bias[:, None, None])


def gated(numbers: Tensor, gates: Tensor, activation: Activation, config: Any = None) -> Tensor:
    return numbers * torch_ops.activated(gates, activation)


def use_low_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this machine have 8-bit products, for networks of any size, and for every product."""
    monkeypatch.setattr(images, "group_norm", exact_group_norm)
    monkeypatch.setattr(images, "add_and_measure", add_and_measure)
    monkeypatch.setattr(images, "resize", torch_ops.resize)
    monkeypatch.setattr(tokens, "layer_norm", exact_layer_norm)
    monkeypatch.setattr(tokens, "materialize", materialize)
    monkeypatch.setattr(tokens, "gated", gated)
    monkeypatch.setattr(tokens, "attention", lambda *given: torch_ops.attention(*given[:3], False))
    monkeypatch.setattr(rounding, "layer_norm", layer_norm)
    monkeypatch.setattr(
        rounding, "gated",
        lambda numbers, gates, activation, kind, *others: rounded(gated(numbers, gates, activation), kind),
    )
    monkeypatch.setattr(rounding, "rounded", rounded)
    monkeypatch.setattr(rounding, "rounded_rows", rounded_rows)
    monkeypatch.setattr(products, "int8_product", int8_product)
    monkeypatch.setattr(low_bit, "FEWEST_WEIGHTS", 0)
    ours = runtime.devices.lossy.low_bit
    # Nothing is measured.
    monkeypatch.setattr(ours, "tune", lambda *given: False)
    monkeypatch.setattr(ours, "_best", lambda product, dtype, kinds: min(kinds, key=KINDS.index, default=None))
    ours.forget()
    launches = Launches(TuningCache())
    operators = NativeOperators(launches, torch_ops.attention, lambda device, dtype: torch.float16, ours.best)
    monkeypatch.setattr(runtime.devices.named(NATIVE), "_operators", operators)
