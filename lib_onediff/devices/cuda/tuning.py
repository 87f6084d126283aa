"""Measures and loads the kernels that a network launches.

Measured are, at the network's shapes, the fastest launch configs on this GPU, and which products are faster in eight
bits. A kernel is loaded by a launch on small inputs, before the network's first call.
"""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.card import on_card
from ...core.device import TimeMs
from ...core.layer_weights import LayerWeights, QuantizedWeight
from ...core.leaves import (
    GATED,
    NORMED,
    PLAIN_INPUT,
    AdaptiveNorm,
    Convolution,
    CrossAttention,
    GroupNorm,
    LayerNorm,
    NormedHeads,
    RMSNorm,
    SigmoidGate,
    SwiGLU,
)
from ...core.operators import (
    GEGLU,
    SWIGLU,
    Activation,
    Heads,
    Modulation,
    Operators,
    QuantizedImage,
    QuantizedTokens,
    Residual,
    Rotary,
)
from ...weights import low_bit
from ...weights.low_bit import FP8, INT8, KERNEL, Kind, Product
from ..torch.attention import Shape, inputs_of
from .kernels import images, products, rounding
from .kernels import launch_config as configs
from .kernels import tokens as native_tokens
from .kernels.launch_config import LaunchConfig, Launches, Trial, attention_kernel, random_on, row_class, tuned
from .kernels.operators import NativeOperators
from .kernels.rounding import Rule
from .low_bit import float8

GROUPS = 32
EPS = 1e-5
# The standard deviation of random int8 numbers.
SPREAD = 32.0
# Networks with wider tokens are taken for single-stream transformers: see is_of_stream.
WIDEST_USUAL = 2048
# The sizes that are measured, for each class those that take the most time in a network: sides of a feature map, rows
# of tokens, queries and keys of a cross-attention.
BATCH = 2
SIDES = {configs.SMALL: 32, configs.LARGE: 64}
ROWS = 4096
QUERIES = 1024
KEYS = 77
# The sizes of the inputs with which kernels are loaded: rows of tokens; and sides of a feature map, one for the kernel
# for small ones and one for each class.
FEW = 4
LOADED_SIDES = FEW, 32, 48


def tune_kernels(
    launches: Launches, users: Iterable[Any], dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> int:
    """Measure every kernel and class of shapes of a network that was not measured on this GPU before. Returns their
    number.

    users: the layout's kernel_users. Takes seconds, once on a machine, because several variants of each kernel are
    loaded. Raises what a launch raises.
    """
    return sum(tuned(launches, trial, dtype, time_ms) for trial in trials(list(users), random_on(device, dtype)))


def trials(users: list[Any], make: Callable[..., Tensor]) -> Iterator[Trial]:
    """The measurements for a network with these layers. make: make(*shape) returns a tensor of the network's dtype."""
    widest = max((leaf.channels for leaf in users if isinstance(leaf, GroupNorm)), default=0)
    vector = make(widest)
    for shape_class, side in SIDES.items() if widest else ():
        image = make(BATCH, widest, side, side).to(memory_format=torch.channels_last)
        given = image, None, vector, vector, GROUPS, EPS, True, None, (None, None)
        yield Trial(configs.STATISTICS, shape_class, partial(images.group_norm, *given))
        measured = partial(images.group_norm, *given, configs.STATISTICS.candidates[0])
        yield Trial(configs.APPLICATION, shape_class, measured)
        added = image, image, vector, torch.empty_like(image)
        yield Trial(configs.ADDITION, shape_class, partial(images.add_and_measure, *added))
    for width in (norm.width for norm in norms_of(users, LayerNorm)):
        tokens = make(ROWS, width)
        hidden = make(ROWS, 2 * configs.FEED_FORWARD * width)
        vector = make(width)
        normed = partial(native_tokens.layer_norm, Residual(tokens, None, vector), vector, vector, EPS)
        yield Trial(configs.LAYER_NORM, row_class(width), normed)
        yield Trial(configs.GEGLU, row_class(configs.FEED_FORWARD * width), partial(native_tokens.geglu, hidden))
    for one in users:
        if isinstance(one, SwiGLU):
            gates, numbers = make(ROWS, 2 * one.width).chunk(2, dim=-1)
            run = partial(native_tokens.gated, numbers, gates, Activation.SILU)
            yield Trial(configs.GEGLU, row_class(one.width), run)
    for query_shape, key_shape in cross_attentions(users, vector.dtype):
        width = query_shape[3]
        attended = inputs_of(make, query_shape, key_shape)
        yield Trial(attention_kernel(width), str(width), partial(attend, *attended))


def launches_of(
    users: list[Any], dtype: torch.dtype, device: torch.device, launches: Launches
) -> list[Callable[[], object]]:
    """For each kernel, a function that launches it once on small inputs, and so loads it. Kernels are compiled for
    block sizes, not for sizes of images or layers."""
    make = partial(torch.zeros, dtype=dtype, device=device)
    ops = NativeOperators(launches)

    def of_image(norm: GroupNorm, side: int) -> None:
        image = make(1, norm.channels, side, side).to(memory_format=torch.channels_last)
        vector = make(norm.channels)
        ops.group_norm(image, LayerWeights(vector, vector), norm, False)
        ops.resize(ops.residual_add(image, image, vector), side, side)

    def of_tokens(norm: LayerNorm) -> None:
        vector = make(norm.width)
        layer = LayerWeights(vector, vector)
        residual, _ = ops.residual_norm(Residual(make(FEW, norm.width), None, vector), layer, norm, layer)
        ops.materialize(residual)
        ops.gated(make(FEW, 2 * configs.FEED_FORWARD * norm.width), GEGLU, layer)

    def of_blocks(norm: AdaptiveNorm | RMSNorm) -> None:
        consumer = LayerWeights(make(FEW, norm.width), None)
        for weight in weights_of(norm, make):
            residual, modulation = residual_of(make, norm, FEW, weight)
            ops.residual_norm(residual, weight, norm, consumer, modulation)
            if weight is not None:
                ops.materialize(residual_of(make, norm, FEW, weight)[0])

    def of_heads(one: NormedHeads) -> None:
        angles = torch.zeros((FEW, one.width // 2), dtype=torch.float32, device=device)
        for kind in vector_types(dtype) if one.interleaved else (dtype,):
            norm = LayerWeights(make(one.width).to(kind), None), RMSNorm("", one.width, EPS)
            for rotary in (Rotary(angles, angles, one.interleaved), None):
                projected = make(BATCH, FEW, one.heads * one.width)
                ops.split_heads(projected, (Heads(one.heads, norm, rotary),))

    def of_gates(one: SwiGLU | SigmoidGate) -> None:
        consumer = LayerWeights(make(FEW, one.width), None)
        if isinstance(one, SwiGLU):
            ops.gated(make(FEW, 2 * one.width), SWIGLU, consumer)
        else:
            ops.sigmoid_gated(make(FEW, one.width), make(FEW, one.width), consumer)

    norms = {leaf.channels // leaf.groups: leaf for leaf in users if isinstance(leaf, GroupNorm)}
    return [
        *(partial(of_blocks, norm) for norm in norms_in_one_pass(users)),
        *(partial(native_tokens.gelu, make(FEW, width)) for width in gelu_widths(users)),
        *(partial(of_heads, one) for one in users if isinstance(one, NormedHeads)),
        *(partial(of_gates, one) for one in users if isinstance(one, SwiGLU | SigmoidGate)),
        *(partial(of_image, norm, side) for norm in norms.values() for side in LOADED_SIDES),
        *(partial(of_tokens, norm) for norm in norms_of(users, LayerNorm)),
        *(partial(ops.attention, *inputs_of(make, *one), False) for one in cross_attentions(users, dtype)),
    ]


def cross_attentions(users: Iterable[Any], dtype: torch.dtype) -> list[tuple[Shape, Shape]]:
    """The shapes of queries and keys of cross-attentions, for every head width that has a kernel."""
    heads = {user.head_width: user.heads for user in users if isinstance(user, CrossAttention)}
    widths = native_tokens.ATTENTION_WIDTHS if dtype in native_tokens.ATTENTION_DTYPES else ()
    return [
        ((BATCH, heads[width], QUERIES, width), (BATCH, heads[width], KEYS, width))
        for width in widths if width in heads
    ]


def norms_of(users: Iterable[Any], kind: Any) -> Iterable[Any]:
    """The layers of this kind, one for each class of rows."""
    return {row_class(leaf.width): leaf for leaf in users if isinstance(leaf, kind)}.values()


def norms_in_one_pass(users: Iterable[Any]) -> list[AdaptiveNorm | RMSNorm]:
    """The norms of residuals, one for each class of rows, that one kernel computes with their update, gate and
    modulation."""
    return [*norms_of(users, AdaptiveNorm), *norms_of(users, RMSNorm)]


def gelu_widths(users: Sequence[Any]) -> list[int]:
    """The widths of the outputs of GELUs: the feed-forward layers of networks with adaptive norms have one, unless they
    have a SwiGLU."""
    if any(isinstance(user, SwiGLU) for user in users):
        return []
    return [configs.FEED_FORWARD * norm.width for norm in norms_of(users, AdaptiveNorm)]


def weights_of(norm: AdaptiveNorm | RMSNorm, make: Callable[..., Tensor]) -> list[LayerWeights | None]:
    """A weight for this norm in each dtype that it may have; [None] for a norm without weights."""
    if isinstance(norm, AdaptiveNorm):
        return [None]
    weight = make(norm.width)
    return [LayerWeights(weight.to(kind), None) for kind in vector_types(weight.dtype)]


def vector_types(dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes of an RMS norm's weight in a network of this dtype."""
    return list(dict.fromkeys((dtype, torch.float32)))


def residual_of(
    make: Callable[..., Tensor], norm: AdaptiveNorm | RMSNorm, rows: int, weight: LayerWeights | None,
    of: torch.dtype | None = None,
) -> tuple[Residual, Modulation]:
    """The inputs of a norm: a residual and a modulation. weight: that of the norm, and of the norm after the layer that
    has computed the residual's update. of: the dtype of that update, if it is not that of
    make's tensors."""
    update = make(BATCH, rows // BATCH, norm.width)
    shift, factor, gate = make(BATCH, 3 * norm.width).chunk(3, dim=1)
    tokens = update.float() if update.dtype == torch.float16 else torch.empty_like(update)
    behind = (weight, norm) if weight is not None and isinstance(norm, RMSNorm) else None
    residual = Residual(tokens, update=update if of is None else update.to(of), gate=gate, norm=behind)
    return residual, Modulation(factor, shift)


def attend(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig) -> Tensor:
    """Attention by our kernel with this launch config; by torch for configs.LIBRARY."""
    if config == configs.LIBRARY:
        return functional.scaled_dot_product_attention(query, key, value)
    return native_tokens.attention(query, key, value, config)


# --- products in eight bits -------------------------------------------------------------------------------------------


def trial_of(
    product: Product, make: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, kind: Kind,
    result: torch.dtype,
) -> Trial | None:
    """The measurement of a product's launch configs; None if a library computes it, so that there are none.

    make: make(*shape) returns a tensor of random numbers, because a GPU multiplies zeros faster. result: see
    float8.product.
    """
    rows, width, out = product[:3]
    one = torch.ones((1, 1), dtype=torch.float32, device=device)
    columns = one.expand(1, out).contiguous()

    def values(*shape: int) -> Tensor:
        return (make(*shape) * SPREAD if kind is INT8 else make(*shape)).clamp(-127, 127).to(kind.dtype)

    if product.size is not None:
        height, across = product.size
        batch = rows // (height * across)
        scales = one.expand(batch, 1).contiguous()
        image = QuantizedImage(values(batch, height, across, width // KERNEL**2), scales)
        weight = QuantizedWeight(values(out, width), columns if kind is INT8 else one)
        run = partial(products.convolution, image, weight, dtype)
        shape_class = products.convolution_class(image.values, out)
        return Trial(products.of_card(configs.CONVOLUTIONS[kind.dtype], device), shape_class, run)
    if kind is INT8:
        tokens = QuantizedTokens(values(rows, width), one.expand(rows, 1).contiguous(), (rows,))
        weight = QuantizedWeight(values(out, width), columns)
        shape_class = products.product_class(rows, out, width)
        run = partial(products.int8_product, tokens, weight, None, dtype)
        return Trial(configs.INT8_PRODUCT, shape_class, run)
    if product.source != GATED or is_of_stream(out):
        return None
    # The input of a feed-forward's second product is made in float8 by its first product and the GEGLU.
    tokens = QuantizedTokens(values(rows, out), one, (rows,))
    weight = QuantizedWeight(values(2 * width, out), one)
    bias = make(2 * width)

    def gate(config: LaunchConfig) -> object:
        if config == configs.LIBRARY:
            return rounding.geglu(float8.product(tokens, weight, bias, result), FP8)
        return products.gated_product(tokens, weight, bias, one, config)

    return Trial(products.of_card(configs.GATED_PRODUCT, device), products.product_class(rows, 2 * width, out), gate)


def way_of(
    product: Product, dtype: torch.dtype, device: torch.device, kind: Kind
) -> Callable[[Operators], object]:
    """A function of operators that computes a product together with the operators before and after it that depend on
    its format, to measure what the format gains. The weights also exist in this format.

    A product after a norm comes with this norm; a convolution with its group norm; a feed-forward's second product with
    the whole feed-forward, from norm to norm; any other with the norm after it.
    """
    random = random_on(device, dtype)
    if product.size is not None:
        return way_of_convolution(product, product.size, random, kind)
    weight = random(product.out, product.width)
    layer = LayerWeights(weight, None, (rounding.rounded_weight(weight, kind),))
    if is_of_stream(product.width if product.source == NORMED else product.out):
        return way_of_stream(product, layer, random, kind)
    if product.source == NORMED:
        tokens = random(product.rows, product.width)
        parameters = LayerWeights(random(product.width), None)
        norm = LayerNorm("norm", product.width, EPS)
        return lambda ops: ops.linear(ops.residual_norm(Residual(tokens), parameters, norm, layer)[1], layer)
    residual = Residual(random(product.rows, product.out))
    vector = random(product.out)
    if product.source == GATED:
        # From norm to norm, because the first product may produce the second one's input in eight bits.
        parameters = LayerWeights(vector, None)
        norm = LayerNorm("norm", product.out, EPS)
        matrix = random(2 * product.width, product.out)
        bias = random(2 * product.width)
        rounded = rounding.rounded_weight(matrix, kind)
        scale = low_bit.gated_scale(matrix, bias, parameters).view(1, 1)
        into = LayerWeights(matrix, bias, (rounded,), gated_scale=scale)

        def fed_forward(ops: Operators) -> object:
            now, normed = ops.residual_norm(residual, parameters, norm, into)
            return rounding.layer_norm(
                ops.add_linear(now, ops.gated_linear(normed, into, GEGLU, layer), layer), vector, None, EPS, kind
            )

        return fed_forward
    hidden = random(product.rows, product.width)
    return lambda ops: rounding.layer_norm(ops.add_linear(residual, hidden, layer), vector, None, EPS, kind)


def is_of_stream(width: int) -> bool:
    """Whether tokens of this width are those of a single-stream transformer, with root mean square norms and SwiGLU:
    other networks have narrower ones."""
    return width > WIDEST_USUAL


def way_of_stream(
    product: Product, layer: LayerWeights, random: Callable[..., Tensor], kind: Kind
) -> Callable[[Operators], object]:
    """As way_of, with the norms and gates of a single-stream transformer."""
    dtype = layer.weight.dtype

    def norm_of(width: int) -> tuple[LayerWeights, RMSNorm, Modulation]:
        return LayerWeights(random(width), None), RMSNorm("norm", width, EPS), Modulation(random(1, width))

    def residual_of_width(width: int) -> Residual:
        tokens = random(1, product.rows, width)
        return Residual(tokens.float() if dtype == torch.float16 else tokens)

    if product.source == NORMED:
        residual = residual_of_width(product.width)
        parameters, norm, modulation = norm_of(product.width)
        return lambda ops: ops.linear(ops.residual_norm(residual, parameters, norm, layer, modulation)[1], layer)
    residual = residual_of_width(product.out)
    parameters, norm, modulation = norm_of(product.out)
    gate = modulation.scale

    def added(ops: Operators, rows: Any) -> object:
        now = ops.add_linear(residual, rows, layer, gate)
        return rounding.residual_norm(now, parameters, norm, modulation, dtype, kind)

    if product.source == GATED:
        # From norm to norm: its first product makes what this one reads.
        matrix = random(2 * product.width, product.out)
        into = LayerWeights(matrix, None, (rounding.rounded_weight(matrix, kind),))

        def fed_forward(ops: Operators) -> object:
            _, normed = ops.residual_norm(residual, parameters, norm, into, modulation)
            return added(ops, ops.gated_linear(normed, into, SWIGLU, layer))

        return fed_forward
    hidden = random(1, product.rows, product.width)
    return lambda ops: added(ops, hidden)


def way_of_convolution(
    product: Product, size: tuple[int, int], random: Callable[..., Tensor], kind: Kind
) -> Callable[[Operators], object]:
    """way_of() for a convolution. size: (height, width) of its feature map."""
    channels = product.width // KERNEL**2
    batch = product.rows // (size[0] * size[1])
    image = random(batch, channels, *size).to(memory_format=torch.channels_last)
    weight = random(product.out, channels, KERNEL, KERNEL).to(memory_format=torch.channels_last)
    parameters = LayerWeights(random(channels), random(channels))
    layer = LayerWeights(weight, None, (rounding.rounded_weight(low_bit.as_rows(weight), kind),))
    norm = GroupNorm("norm", channels, GROUPS, EPS)
    shape = Convolution("convolution", channels, product.out, KERNEL, low_bit.STRIDE, low_bit.PADDING)
    return lambda ops: ops.convolution(ops.group_norm(image, parameters, norm, True, None, layer), layer, shape)


def low_bit_launches(
    users: list[Any], dtype: torch.dtype, device: torch.device, launches: Launches, kind: Kind
) -> list[Callable[[], object]]:
    """launches_of() for the kernels that produce 8-bit tokens and feature maps in this format."""
    make = partial(torch.zeros, dtype=dtype, device=device)

    def tokens_of(width: int) -> None:
        tokens = make(FEW, width)
        weight = make(width)
        config = launches.of(configs.LAYER_NORM, row_class(width), dtype)
        for update in (make(FEW, width), tokens.to(torch.bfloat16)):
            rounding.layer_norm(Residual(tokens, None, weight, update), weight, weight, EPS, kind, config)
        hidden = make(FEW, 2 * configs.FEED_FORWARD * width)
        rounding.geglu(hidden, kind)
        for features in (configs.FEED_FORWARD * width, width):
            rounding.rounded(hidden[:, :features], kind)
            if kind is FP8:
                rows = make(FEW, features)
                one_scale = torch.empty((1, 1), dtype=torch.float32, device=device)
                rounding.rounded_rows(rows, torch.empty_like(rows, dtype=kind.dtype), one_scale)

    def norm(channels: int, groups: int) -> None:
        image = make(1, channels, FEW, FEW).to(memory_format=torch.channels_last)
        vector = make(channels)
        for size in SIDES:
            adding, measuring, applying = (
                launches.of(kernel, size, dtype)
                for kernel in (configs.ADDITION, configs.STATISTICS, configs.APPLICATION)
            )
            images.measure(image, adding, bounded=True)
            images.group_norm(
                image, None, vector, vector, groups, EPS, True, None, (None, None), measuring, applying, kind, False
            )

    def blocks_of(norm: AdaptiveNorm | RMSNorm) -> None:
        for weight in weights_of(norm, make):
            for of in {dtype, torch.bfloat16}:
                residual, modulation = residual_of(make, norm, FEW, weight, of)
                rounding.residual_norm(residual, weight, norm, modulation, dtype, kind)
            if kind is FP8:
                # The norm between a layer in float8 and one that is not.
                residual, modulation = residual_of(make, norm, FEW, weight, torch.bfloat16)
                rounding.residual_norm(residual, weight, norm, modulation, dtype, None)
                if weight is not None:
                    rounding.add_update(residual, dtype)
        rounding.rounded(make(FEW, norm.width), kind)

    def gates_of(one: SwiGLU | SigmoidGate) -> None:
        rows = make(FEW, one.width)
        rounding.gated(rows, rows, Activation.SILU if isinstance(one, SwiGLU) else Activation.SIGMOID, kind)

    norms = {images.join_block(one.channels // one.groups): one for one in users if isinstance(one, GroupNorm)}
    return [
        *(partial(blocks_of, norm) for norm in norms_in_one_pass(users)),
        *(partial(gates_of, one) for one in users if isinstance(one, SwiGLU | SigmoidGate)),
        *(partial(rounding.rounded, make(FEW, width), kind, gelu=True) for width in gelu_widths(users)),
        *(partial(tokens_of, norm.width) for norm in norms_of(users, LayerNorm)),
        *(partial(norm, one.channels, one.groups) for one in norms.values()),
    ]


def stored_launches(
    users: list[Any], dtype: torch.dtype, device: torch.device, rule: Rule
) -> list[Callable[[], object]]:
    """launches_of() for layers whose weights are stored in INT8: the kernels that quantize their input by this rule,
    and the product."""
    make = partial(torch.zeros, dtype=dtype, device=device)

    def fits(width: int) -> bool:
        """Whether rows of this width can be rotated by the rule."""
        return rule == Rule.HOSTS or width % rounding.GROUP == 0

    def tokens_of(width: int) -> None:
        tokens = make(FEW, width)
        weight = make(width)
        hidden = configs.FEED_FORWARD * width
        for both in (False, True):
            for update in (make(FEW, width), tokens.to(torch.bfloat16)):
                if fits(width):
                    residual = Residual(tokens, None, weight, update)
                    rounding.layer_norm(residual, weight, weight, EPS, INT8, rule=rule, is_plain_too=both)
            if fits(hidden):
                rounding.geglu(make(FEW, 2 * hidden), INT8, rule, both)
        plain_rows(width)
        plain_rows(hidden, gelu=True)

    def blocks_of(norm: AdaptiveNorm | RMSNorm) -> None:
        for weight in weights_of(norm, make) if fits(norm.width) else ():
            for of in {dtype, torch.bfloat16}:
                for both in (False, True):
                    residual, modulation = residual_of(make, norm, FEW, weight, of)
                    rounding.residual_norm(residual, weight, norm, modulation, dtype, INT8, rule, both)
        plain_rows(norm.width)

    def of_gelu(width: int) -> None:
        plain_rows(width, gelu=True)
        if fits(width):
            rounding.gelu_and_rounded(make(FEW, width), rule)

    def gates_of(one: SwiGLU | SigmoidGate) -> None:
        rows = make(FEW, one.width)
        activation = Activation.SILU if isinstance(one, SwiGLU) else Activation.SIGMOID
        for both in (False, True) if fits(one.width) else ():
            rounding.gated(rows, rows, activation, INT8, rule, both)

    def plain_rows(width: int, gelu: bool = False) -> None:
        if fits(width):
            rounding.rounded(make(FEW, width), INT8, gelu=gelu, rule=rule)

    def product() -> None:
        aligned = low_bit.ALIGNED
        one = torch.ones((1, 1), dtype=torch.float32, device=device)
        values = torch.zeros((aligned, aligned), dtype=INT8.dtype, device=device)
        tokens = QuantizedTokens(values, one.expand(aligned, 1).contiguous(), (aligned,))
        products.int8_product(tokens, QuantizedWeight(values, one), None, dtype)

    return [
        *(partial(blocks_of, norm) for norm in norms_in_one_pass(users)),
        *(partial(gates_of, one) for one in users if isinstance(one, SwiGLU | SigmoidGate)),
        *(partial(of_gelu, width) for width in gelu_widths(users)),
        *(partial(tokens_of, norm.width) for norm in norms_of(users, LayerNorm)),
        product,
    ]


def tune_stored(
    launches: Launches, product: tuple[int, int, int, torch.dtype], device: torch.device, time_ms: TimeMs
) -> bool:
    """Measure the launch config of a product with a weight stored in INT8, if it is unknown on this GPU. Returns
    whether it was measured. product: (rows, out, width, dtype)."""
    rows, out, width, dtype = product
    if launches.chosen(configs.INT8_PRODUCT, products.product_class(rows, out, width), dtype) is not None:
        return False
    given = Product(rows, width, out, PLAIN_INPUT)
    trial = trial_of(given, random_on(device, dtype), device, dtype, INT8, dtype)
    return trial is not None and tuned(launches, trial, dtype, time_ms)


def tune_down(
    launches: Launches, product: tuple[int, int, int, torch.dtype], device: torch.device, time_ms: TimeMs
) -> bool:
    """tune_stored() for the product with the LoRAs' down matrices. product: (rows, ranks, width, dtype)."""
    rows, ranks, width, dtype = product
    if launches.chosen(configs.DOWN_PRODUCT, products.product_class(rows, ranks, width), dtype) is not None:
        return False
    return tuned(launches, down_trial(random_on(device, dtype), rows, ranks, width), dtype, time_ms)


def down_trial(make: Callable[..., Tensor], rows: int, ranks: int, width: int) -> Trial:
    """The measurement of tune_down."""
    run = partial(products.down_product, make(rows, width), make(ranks, width))
    return Trial(configs.DOWN_PRODUCT, products.product_class(rows, ranks, width), run)


# --- a feed-forward's first product, exact ----------------------------------------------------------------------------


def tune_gated(launches: Launches, rows: int, width: int, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> bool:
    """Measure whether the product of tokens (rows, width) with a weight (8 width, width) is faster with its GEGLU in
    the same kernel, if that is unknown on this GPU. Returns whether it was measured."""
    make = random_on(device, dtype)
    shape_class = products.product_class(rows, 2 * configs.FEED_FORWARD * width, width)
    if launches.chosen(configs.EXACT_GATED_PRODUCT, shape_class, dtype) is not None:
        return False
    return tuned(launches, gated_trial(make, rows, width, device, shape_class), dtype, time_ms)


def gated_trial(
    make: Callable[..., Tensor], rows: int, width: int, device: torch.device, shape_class: str = ""
) -> Trial:
    """The measurement of tune_gated."""
    tokens = make(rows, width)
    weight = make(2 * configs.FEED_FORWARD * width, width)
    bias = make(8 * width)

    def run(config: LaunchConfig) -> object:
        if config == configs.LIBRARY:
            return native_tokens.geglu(functional.linear(tokens, weight, bias))
        return products.exact_gated_product(tokens, weight, bias, config)

    return Trial(products.of_card(configs.EXACT_GATED_PRODUCT, device), shape_class, run)


# --- a convolution with float16 sums ----------------------------------------------------------------------------------


def tune_half_sums(launches: Launches, size: Sequence[int], device: torch.device, time_ms: TimeMs) -> bool:
    """Measure whether a convolution is faster with float16 sums, if that is unknown on this GPU. Returns whether it was
    measured. size: (batch, height, width, input channels, output channels)."""
    kernel = configs.CONVOLUTIONS[torch.float16]
    shape_class = "x".join(map(str, size))
    if launches.chosen(kernel, shape_class, torch.float16) is not None:
        return False
    return tuned(launches, half_sums_trial(random_on(device, torch.float16), size, device), torch.float16, time_ms)


def half_sums_trial(make: Callable[..., Tensor], size: Sequence[int], device: torch.device) -> Trial:
    """The measurement of tune_half_sums."""
    batch, height, width, channels, out = size
    image, weight = (
        make(*shape).to(memory_format=torch.channels_last)
        for shape in ((batch, channels, height, width), (out, channels, KERNEL, KERNEL))
    )

    def run(config: LaunchConfig) -> Tensor:
        if config == configs.LIBRARY:
            return functional.conv2d(image, weight, padding=low_bit.PADDING)
        return products.half_sums_convolution(image, weight, config)

    def agrees(output: Tensor) -> bool:
        exact = run(configs.LIBRARY).float()
        return float((output.float() - exact).norm() / exact.norm()) < float8.WORST_PROBE_ERROR

    kernel = products.of_card(configs.CONVOLUTIONS[torch.float16], device)
    return Trial(kernel, products.convolution_class(image.permute(0, 2, 3, 1), out), run, agrees)


# --- loading ----------------------------------------------------------------------------------------------------------


def load_kernels(
    users: Sequence[Any], dtype: torch.dtype, device: torch.device, launches: Launches, kinds: Collection[Kind] = (),
    rules: Collection[Rule] = (),
) -> None:
    """Load every kernel that a network needs, by launching it once on small inputs.

    users: the layout's kernel_users. kinds: 8-bit formats in use. rules: those of weights stored in INT8. Raises what a
    launch raises.
    """
    works = launches_of(list(users), dtype, device, launches)
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
    """Load the kernel variants that will be measured, so that no call waits for the driver to compile them. Raises what
    a launch raises."""
    with on_card(device), torch.inference_mode(False), torch.no_grad():
        trial = gated_trial(partial(torch.zeros, dtype=dtype, device=device), FEW, low_bit.ALIGNED, device)
        for config in trial.kernel.candidates:
            trial.run(config)
