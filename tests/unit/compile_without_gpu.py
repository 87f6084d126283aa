"""Compile what a UNet's forward launches, for a GPU that is not there. Run as a program of its own, see main().

Tensors are on the meta device and launches are left out, so the real sizes of the real models cost nothing.
"""
from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from count_compilations import count_compilations
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

from lib_onediff.bench.models import CONFIGURATIONS
from lib_onediff.core.affine import Affine, QuantizedWeight, Weights
from lib_onediff.core.call import Call
from lib_onediff.core.leaves import TransformerBlock, descriptions
from lib_onediff.core.tuning_cache import TuningCache
from lib_onediff.devices.cuda import tuning as triton_warm
from lib_onediff.devices.cuda.kernels.launch_config import INT8_PRODUCT_HOPPER, Launches
from lib_onediff.devices.cuda.kernels.operators import TritonOperators
from lib_onediff.devices.cuda.low_bit import operators, products
from lib_onediff.devices.cuda.low_bit.operators import LowBitOperators
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet.forward import forward
from lib_onediff.families.unet.layout import UNetLayout
from lib_onediff.weights.low_bit import INT8, KINDS, Kind, empty_like, low_bit_layers

META = torch.device("meta")
TOKENS = 77


class AbsentGPU:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_only() -> None:
    """Let every launch end when its kernel is compiled."""
    run = triton.JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    triton.JITFunction.run = compiled
    triton_warm.launch = lambda work, device: work()
    # Every weight here is on the meta device, and not for want of its values.
    operators.dequantized = lambda affine: affine.weight


def weights_of(unet: nn.Module, layout: UNetLayout) -> Weights:
    """As Binding.weights gives them; a binding itself refuses weights that are not loaded."""
    modules = ((leaf.path, unet.get_submodule(leaf.path)) for leaf in layout.leaves())
    weights = {path: Affine(module.weight, module.bias) for path, module in modules}
    for fusion in layout.fusions():
        members = [weights[member.path] for member in fusion.members]
        biases = [member.bias for member in members if member.bias is not None]
        weight = torch.cat([member.weight for member in members])
        weights[fusion.name] = Affine(weight, torch.cat(biases) if biases else None)
    return weights


def room_for(weight: Tensor, kind: Kind) -> QuantizedWeight:
    """As low_bit.empty_like, which looks at numbers for float8: with one scale, as nearly every weight has it."""
    if kind is INT8:
        return empty_like(weight, kind)
    return QuantizedWeight(weight.to(kind.dtype), torch.empty((1, 1), device=META))


def pass_through(
    unet: nn.Module, layout: UNetLayout, width: int, height: int, batch: int, dtype: torch.dtype, kind: Kind | None
) -> Tensor:
    """One forward at a size in pixels. kind: with all products in it that can be."""
    empty = lambda *shape: torch.empty(shape, device=META, dtype=dtype)  # noqa: E731
    call = Call(
        latent=empty(batch, layout.in_channels, height // 8, width // 8), timestep=empty(batch),
        context=empty(batch, TOKENS, layout.context_width),
        y=None if layout.y_width is None else empty(batch, layout.y_width),
    )
    ops, weights = TritonOperators(), weights_of(unet, layout)
    if kind is not None:
        launches = Launches(TuningCache())
        ops = LowBitOperators(launches, torch_ops.attention, lambda device, dtype: dtype, lambda *given: kind)
        for block in descriptions(layout, TransformerBlock):
            for name in (one.name for one in low_bit_layers(block)):
                weights[name] = weights[name]._replace(low_bit=(room_for(weights[name].weight, kind),))
    return forward(layout, weights, ops, call)


def main(name: str, capability: str, dtype_name: str, sizes: str, kind: str = "") -> None:
    """name: in CONFIGURATIONS. capability: 90 for 9.0. sizes: JSON, [[width, height, batch], ...] in pixels. kind:
    "int8" or "fp8" for products in it.

    Prints how many kernels are compiled beforehand, and then by a forward at each size, as JSON.
    """
    from diffusers import UNet2DConditionModel

    triton.runtime.driver.set_active(AbsentGPU(int(capability)))
    compile_only()
    if capability == "90":
        products.kernel_for = lambda device: INT8_PRODUCT_HOPPER
    dtype = getattr(torch, dtype_name)
    with META:
        unet = UNet2DConditionModel(**CONFIGURATIONS[name]).to(dtype)
    layout, counts = FAMILIES.read(unet), {}
    in_eight_bits = next((known for known in KINDS if known.name == kind), None)
    kinds = () if in_eight_bits is None else (in_eight_bits,)
    with torch.no_grad():
        with count_compilations() as counted:
            triton_warm.compile_kernels(layout.kernel_users, dtype, META, None, kinds)
        counts["beforehand"] = counted.count
        for width, height, batch in json.loads(sizes):
            with count_compilations() as counted:
                pass_through(unet, layout, width, height, batch, dtype, in_eight_bits)
            counts[f"{width}x{height}, batch {batch}"] = counted.count
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*sys.argv[1:])
