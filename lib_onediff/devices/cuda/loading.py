"""Loads the kernels that a network needs, by launching each once on small inputs.

Loading takes some 50 ms for each kernel that the driver has never compiled for this GPU, so it is done before the
network's first call. Kernels are compiled for block sizes, not for sizes of images or layers: inputs may be small, and
one layer represents all layers whose block size is the same. .ci/build_kernels.py uses the same launches to find the
variants to compile for the archive.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.card import on_card
from ...core.layer_weights import LayerWeights, QuantizedWeight
from ...core.leaves import AdaptiveNorm, GroupNorm, LayerNorm, NormedHeads, RMSNorm, SigmoidGate, SwiGLU
from ...core.operators import GEGLU, SWIGLU, Activation, Heads, Modulation, QuantizedTokens, Residual, Rotary
from ...weights import low_bit
from ...weights.low_bit import FP8, INT8, Kind
from ..torch.attention import inputs_of
from .kernels import images, products, rounding
from .kernels import launch_config as configs
from .kernels import tokens as native_tokens
from .kernels.launch_config import Launches, row_class
from .kernels.operators import NativeOperators
from .kernels.rounding import Rule
from .tuning import BATCH, EPS, cross_attentions, gated_trial, one_per_row_class

# The sizes of the inputs: rows of tokens; and sides of feature maps in pixels, one for the kernel for small images and
# one for each class (launch_config.SMALL and LARGE).
ROWS = 4
SIDES = ROWS, 32, 48
# A function without arguments that launches one kernel, or a few, once.
Launch = Callable[[], object]


def load_kernels(
    users: Sequence[Any], dtype: torch.dtype, device: torch.device, launches: Launches, kinds: Collection[Kind] = (),
    rules: Collection[Rule] = (),
) -> None:
    """Load every kernel that a network needs, and wait until that is done. Runs on the current GPU, which must be
    `device`.

    users: the layout's kernel_users: descriptions of layers (core.leaves) with their sizes. dtype: the network's.
    launches: the launch configs with which the kernels will run. kinds: the 8-bit formats in which Low-bit or FP8
    weights of the host are computed. rules: the rules by which inputs of layers that the host stores in INT8 are
    rounded; empty without such layers. Raises what a launch raises.
    """
    works = exact_launches(list(users), dtype, device, launches)
    for kind in kinds:
        works += low_bit_launches(list(users), dtype, device, launches, kind)
    for rule in rules:
        works += stored_launches(list(users), dtype, device, rule)
    with torch.inference_mode(False), torch.no_grad():
        # Loading needs a CUDA context, which a thread only has after its first use of the GPU.
        torch.cuda.current_stream().synchronize()
        # One after the other, because the driver compiles PTX in one thread at a time.
        for work in works:
            work()
        torch.cuda.current_stream().synchronize()


def load_candidates(dtype: torch.dtype, device: torch.device) -> None:
    """Load the kernels of all candidates of configs.EXACT_GATED_PRODUCT that can be fast on this device, so that
    Native.tune, which measures them in a user's call, does not wait for the driver to compile them. dtype: float16 or
    bfloat16. Raises what a launch raises."""
    with on_card(device), torch.inference_mode(False), torch.no_grad():
        trial = gated_trial(partial(torch.zeros, dtype=dtype, device=device), ROWS, low_bit.ALIGNED, device)
        for config in trial.kernel.candidates:
            trial.run(config)


def exact_launches(users: list[Any], dtype: torch.dtype, device: torch.device, launches: Launches) -> list[Launch]:
    """Functions that together launch every kernel for a network of this dtype without 8-bit formats. The functions take
    no arguments; nothing is launched before they are called. users, launches: see load_kernels."""
    make = partial(torch.zeros, dtype=dtype, device=device)
    ops = NativeOperators(launches)

    def launch_group_norm(norm: GroupNorm, side: int) -> None:
        image = make(1, norm.channels, side, side).to(memory_format=torch.channels_last)
        vector = make(norm.channels)
        ops.group_norm(image, LayerWeights(vector, vector), norm, False)
        ops.resize(ops.residual_add(image, image, vector), side, side)

    def launch_layer_norm(norm: LayerNorm) -> None:
        vector = make(norm.width)
        layer = LayerWeights(vector, vector)
        residual, _ = ops.residual_norm(Residual(make(ROWS, norm.width), None, vector), layer, norm, layer)
        ops.materialize(residual)
        ops.gated(make(ROWS, 2 * configs.FEED_FORWARD * norm.width), GEGLU, layer)

    def launch_residual_norm(norm: AdaptiveNorm | RMSNorm) -> None:
        consumer = LayerWeights(make(ROWS, norm.width), None)
        for weight in norm_weights(norm, make):
            residual, modulation = norm_inputs(make, norm, weight)
            ops.residual_norm(residual, weight, norm, consumer, modulation)
            if weight is not None:
                ops.materialize(norm_inputs(make, norm, weight)[0])

    def launch_head_norm(one: NormedHeads) -> None:
        angles = torch.zeros((ROWS, one.width // 2), dtype=torch.float32, device=device)
        for norm_dtype in norm_dtypes(dtype) if one.interleaved else (dtype,):
            norm = LayerWeights(make(one.width).to(norm_dtype), None), RMSNorm("", one.width, EPS)
            for rotary in (Rotary(angles, angles, one.interleaved), None):
                projected = make(BATCH, ROWS, one.heads * one.width)
                ops.split_heads(projected, (Heads(one.heads, norm, rotary),))

    def launch_gate(one: SwiGLU | SigmoidGate) -> None:
        consumer = LayerWeights(make(ROWS, one.width), None)
        if isinstance(one, SwiGLU):
            ops.gated(make(ROWS, 2 * one.width), SWIGLU, consumer)
        else:
            ops.sigmoid_gated(make(ROWS, one.width), make(ROWS, one.width), consumer)

    norms = {leaf.channels // leaf.groups: leaf for leaf in users if isinstance(leaf, GroupNorm)}
    return [
        *(partial(launch_residual_norm, norm) for norm in residual_norms(users)),
        *(partial(native_tokens.gelu, make(ROWS, width)) for width in gelu_widths(users)),
        *(partial(launch_head_norm, one) for one in users if isinstance(one, NormedHeads)),
        *(partial(launch_gate, one) for one in users if isinstance(one, SwiGLU | SigmoidGate)),
        *(partial(launch_group_norm, norm, side) for norm in norms.values() for side in SIDES),
        *(partial(launch_layer_norm, norm) for norm in one_per_row_class(users, LayerNorm)),
        *(partial(ops.attention, *inputs_of(make, *one), False) for one in cross_attentions(users, dtype)),
    ]


def low_bit_launches(
    users: list[Any], dtype: torch.dtype, device: torch.device, launches: Launches, kind: Kind
) -> list[Launch]:
    """Functions that together launch every kernel that writes tokens and feature maps in this 8-bit format (kind), for
    weights that Low-bit has quantized or that the host stores in FP8. Nothing is launched before they are called.
    users, launches: see load_kernels."""
    make = partial(torch.zeros, dtype=dtype, device=device)

    def launch_layer_norm(width: int) -> None:
        tokens = make(ROWS, width)
        weight = make(width)
        config = launches.of(configs.LAYER_NORM, row_class(width), dtype)
        for update in (make(ROWS, width), tokens.to(torch.bfloat16)):
            rounding.layer_norm(Residual(tokens, None, weight, update), weight, weight, EPS, kind, config)
        hidden = make(ROWS, 2 * configs.FEED_FORWARD * width)
        rounding.geglu(hidden, kind)
        for features in (configs.FEED_FORWARD * width, width):
            rounding.rounded(hidden[:, :features], kind)
            if kind is FP8:
                rows = make(ROWS, features)
                one_scale = torch.empty((1, 1), dtype=torch.float32, device=device)
                rounding.rounded_rows(rows, torch.empty_like(rows, dtype=kind.dtype), one_scale)

    def launch_group_norm(channels: int, groups: int) -> None:
        image = make(1, channels, ROWS, ROWS).to(memory_format=torch.channels_last)
        vector = make(channels)
        for size in configs.SMALL, configs.LARGE:
            adding, measuring, applying = (
                launches.of(kernel, size, dtype)
                for kernel in (configs.ADDITION, configs.STATISTICS, configs.APPLICATION)
            )
            images.measure(image, adding, bounded=True)
            images.group_norm(
                image, None, vector, vector, groups, EPS, True, None, (None, None), measuring, applying, kind, False
            )

    def launch_residual_norm(norm: AdaptiveNorm | RMSNorm) -> None:
        for weight in norm_weights(norm, make):
            for update_dtype in {dtype, torch.bfloat16}:
                residual, modulation = norm_inputs(make, norm, weight, update_dtype)
                rounding.residual_norm(residual, weight, norm, modulation, dtype, kind)
            if kind is FP8:
                # The norm between a layer in float8 and one that is not.
                residual, modulation = norm_inputs(make, norm, weight, torch.bfloat16)
                rounding.residual_norm(residual, weight, norm, modulation, dtype, None)
                if weight is not None:
                    rounding.add_update(residual, dtype)
        rounding.rounded(make(ROWS, norm.width), kind)

    def launch_gate(one: SwiGLU | SigmoidGate) -> None:
        rows = make(ROWS, one.width)
        rounding.gated(rows, rows, gate_activation(one), kind)

    norms = {images.join_block(one.channels // one.groups): one for one in users if isinstance(one, GroupNorm)}
    return [
        *(partial(launch_residual_norm, norm) for norm in residual_norms(users)),
        *(partial(launch_gate, one) for one in users if isinstance(one, SwiGLU | SigmoidGate)),
        *(partial(rounding.rounded, make(ROWS, width), kind, gelu=True) for width in gelu_widths(users)),
        *(partial(launch_layer_norm, norm.width) for norm in one_per_row_class(users, LayerNorm)),
        *(partial(launch_group_norm, one.channels, one.groups) for one in norms.values()),
    ]


def stored_launches(users: list[Any], dtype: torch.dtype, device: torch.device, rule: Rule) -> list[Launch]:
    """Functions that together launch every kernel for layers that the host stores in INT8: those that quantize the
    layers' input by this rule, and the product. Nothing is launched before they are called. users: see load_kernels."""
    make = partial(torch.zeros, dtype=dtype, device=device)

    def fits(width: int) -> bool:
        """Whether rows of this width can be rotated by the rule."""
        return rule == Rule.HOSTS or width % rounding.GROUP == 0

    def launch_layer_norm(width: int) -> None:
        tokens = make(ROWS, width)
        weight = make(width)
        hidden = configs.FEED_FORWARD * width
        for is_plain_too in (False, True):
            for update in (make(ROWS, width), tokens.to(torch.bfloat16)):
                if fits(width):
                    residual = Residual(tokens, None, weight, update)
                    rounding.layer_norm(residual, weight, weight, EPS, INT8, rule=rule, is_plain_too=is_plain_too)
            if fits(hidden):
                rounding.geglu(make(ROWS, 2 * hidden), INT8, rule, is_plain_too)
        launch_rounding(width)
        launch_rounding(hidden, gelu=True)

    def launch_residual_norm(norm: AdaptiveNorm | RMSNorm) -> None:
        for weight in norm_weights(norm, make) if fits(norm.width) else ():
            for update_dtype in {dtype, torch.bfloat16}:
                for is_plain_too in (False, True):
                    residual, modulation = norm_inputs(make, norm, weight, update_dtype)
                    rounding.residual_norm(residual, weight, norm, modulation, dtype, INT8, rule, is_plain_too)
        launch_rounding(norm.width)

    def launch_gelu(width: int) -> None:
        launch_rounding(width, gelu=True)
        if fits(width):
            rounding.gelu_and_rounded(make(ROWS, width), rule)

    def launch_gate(one: SwiGLU | SigmoidGate) -> None:
        rows = make(ROWS, one.width)
        for is_plain_too in (False, True) if fits(one.width) else ():
            rounding.gated(rows, rows, gate_activation(one), INT8, rule, is_plain_too)

    def launch_rounding(width: int, gelu: bool = False) -> None:
        if fits(width):
            rounding.rounded(make(ROWS, width), INT8, gelu=gelu, rule=rule)

    def launch_product() -> None:
        aligned = low_bit.ALIGNED
        one = torch.ones((1, 1), dtype=torch.float32, device=device)
        values = torch.zeros((aligned, aligned), dtype=INT8.dtype, device=device)
        tokens = QuantizedTokens(values, one.expand(aligned, 1).contiguous(), (aligned,))
        products.int8_product(tokens, QuantizedWeight(values, one), None, dtype)

    return [
        *(partial(launch_residual_norm, norm) for norm in residual_norms(users)),
        *(partial(launch_gate, one) for one in users if isinstance(one, SwiGLU | SigmoidGate)),
        *(partial(launch_gelu, width) for width in gelu_widths(users)),
        *(partial(launch_layer_norm, norm.width) for norm in one_per_row_class(users, LayerNorm)),
        launch_product,
    ]


# --- the layers of a network, and their inputs ------------------------------------------------------------------------


def residual_norms(users: Iterable[Any]) -> list[AdaptiveNorm | RMSNorm]:
    """The adaptive and RMS norms among the users, one for each row class. One kernel computes such a norm together with
    the residual's update, gate and modulation."""
    return [*one_per_row_class(users, AdaptiveNorm), *one_per_row_class(users, RMSNorm)]


def gelu_widths(users: Sequence[Any]) -> list[int]:
    """The widths of the tokens to which a network applies an ungated GELU: those between the two linear layers of a
    feed-forward. Empty for networks without adaptive norms, and for networks with SwiGLU: they have no such
    feed-forwards."""
    if any(isinstance(user, SwiGLU) for user in users):
        return []
    return [configs.FEED_FORWARD * norm.width for norm in one_per_row_class(users, AdaptiveNorm)]


def gate_activation(gate: SwiGLU | SigmoidGate) -> Activation:
    """The activation of a gate: SiLU for a SwiGLU, the sigmoid function for a SigmoidGate."""
    return Activation.SILU if isinstance(gate, SwiGLU) else Activation.SIGMOID


def norm_weights(norm: AdaptiveNorm | RMSNorm, make: Callable[..., Tensor]) -> list[LayerWeights | None]:
    """A weight for this norm in each dtype of norm_dtypes; [None] for an AdaptiveNorm, which has no weight. make: see
    norm_inputs."""
    if isinstance(norm, AdaptiveNorm):
        return [None]
    weight = make(norm.width)
    return [LayerWeights(weight.to(dtype), None) for dtype in norm_dtypes(weight.dtype)]


def norm_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes that the weight of an RMS norm may have in a network of this dtype: this dtype, and float32."""
    return list(dict.fromkeys((dtype, torch.float32)))


def norm_inputs(
    make: Callable[..., Tensor], norm: AdaptiveNorm | RMSNorm, weight: LayerWeights | None,
    update_dtype: torch.dtype | None = None,
) -> tuple[Residual, Modulation]:
    """The inputs of a norm: a residual of ROWS rows with an update and a gate, and a modulation.

    make: make(*shape) returns a tensor of the network's dtype. weight: the norm's; None for an AdaptiveNorm. If norm is
    an RMSNorm, the update has a norm too (Residual.norm), with the same weight. update_dtype: the update's dtype; None:
    the network's.
    """
    update = make(BATCH, ROWS // BATCH, norm.width)
    shift, factor, gate = make(BATCH, 3 * norm.width).chunk(3, dim=1)
    tokens = update.float() if update.dtype == torch.float16 else torch.empty_like(update)
    update_norm = (weight, norm) if weight is not None and isinstance(norm, RMSNorm) else None
    update = update if update_dtype is None else update.to(update_dtype)
    return Residual(tokens, update=update, gate=gate, norm=update_norm), Modulation(factor, shift)
