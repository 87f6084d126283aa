"""Measures the fastest launch config of each kernel on this GPU, at the shapes of a network.

A Trial (kernels/launch_config.py) is one such measurement. trials() has those that can be made before a network's first
call. The tune_ functions measure what depends on the sizes of a call.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ...core.device import TimeMs
from ...core.layer_weights import QuantizedWeight
from ...core.leaves import GATED, PLAIN_INPUT, CrossAttention, GroupNorm, LayerNorm, SwiGLU
from ...core.operators import Activation, QuantizedImage, QuantizedTokens, Residual
from ...weights import low_bit
from ...weights.low_bit import FP8, INT8, KERNEL, Kind, Product
from ..torch.attention import Shape, inputs_of
from .kernels import images, products, rounding
from .kernels import launch_config as configs
from .kernels import tokens as native_tokens
from .kernels.launch_config import LaunchConfig, Launches, Trial, attention_kernel, random_on, row_class, tuned
from .low_bit import float8

# The number of groups of the group norms, and the eps of the norms, that are measured or loaded.
GROUPS = 32
EPS = 1e-5
# The standard deviation of random int8 numbers.
SPREAD = 32.0
# Networks whose tokens are wider than this are taken for single-stream transformers: see is_single_stream.
WIDEST_USUAL = 2048
# The sizes that are measured, for each class those that take the most time in a network: batch; side of a feature map
# in pixels; rows of tokens; queries and keys of a cross-attention.
BATCH = 2
SIDES = {configs.SMALL: 32, configs.LARGE: 64}
ROWS = 4096
QUERIES = 1024
KEYS = 77


def tune_kernels(
    launches: Launches, users: Iterable[Any], dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> int:
    """Measure every kernel and class of shapes of a network that was not measured on this GPU model before, and store
    the choices of launch configs. Returns how many were measured. Takes seconds, once on a machine, because several
    variants of each kernel are loaded.

    users: the layout's kernel_users: descriptions of layers (core.leaves) with their sizes. dtype: the network's.
    Raises what a launch raises.
    """
    return sum(tuned(launches, trial, dtype, time_ms) for trial in trials(list(users), random_on(device, dtype)))


def trials(users: list[Any], make: Callable[..., Tensor]) -> Iterator[Trial]:
    """The trials for a network with these layers (users), one after the other; the caller measures each. For group
    norms, the widest one is measured; for layer norms, one of each row class. make: make(*shape) returns a tensor of
    random numbers in the network's dtype."""
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
    for width in (norm.width for norm in one_per_row_class(users, LayerNorm)):
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


def one_per_row_class(users: Iterable[Any], layer_class: Any) -> Iterable[Any]:
    """The layers of this class among the users, but only one for each row_class of their width: all layers of a row
    class have the same kernels."""
    return {row_class(leaf.width): leaf for leaf in users if isinstance(leaf, layer_class)}.values()


def cross_attentions(users: Iterable[Any], dtype: torch.dtype) -> list[tuple[Shape, Shape]]:
    """(shape of the queries, shape of the keys) of cross-attentions, as (batch, heads, tokens, head width), one for
    each head width in the network that our attention kernel supports. Empty if the kernel does not support the dtype or
    any of the widths. Batch and tokens are those of a usual call (BATCH, QUERIES, KEYS)."""
    heads = {user.head_width: user.heads for user in users if isinstance(user, CrossAttention)}
    widths = native_tokens.ATTENTION_WIDTHS if dtype in native_tokens.ATTENTION_DTYPES else ()
    return [
        ((BATCH, heads[width], QUERIES, width), (BATCH, heads[width], KEYS, width))
        for width in widths if width in heads
    ]


def attend(query: Tensor, key: Tensor, value: Tensor, config: LaunchConfig) -> Tensor:
    """Softmax attention over (batch, heads, tokens, head width): by our kernel with this launch config, or by torch if
    config is configs.LIBRARY."""
    if config == configs.LIBRARY:
        return functional.scaled_dot_product_attention(query, key, value)
    return native_tokens.attention(query, key, value, config)


# --- products in eight bits -------------------------------------------------------------------------------------------


def product_trial(
    product: Product, make: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, kind: Kind,
    result: torch.dtype,
) -> Trial | None:
    """The trial of the launch configs of the kernel that an 8-bit product depends on; None if that is a library's
    product, which has no launch configs.

    For a convolution or an INT8 product, this is the product's own kernel. For an FP8 product whose input comes from a
    GEGLU (GATED), it is the kernel of the feed-forward's first product, which writes this input in float8. For any
    other FP8 product, and for FP8 in a single-stream transformer, None.

    make: make(*shape) returns a tensor of random numbers, because a GPU multiplies zeros faster. dtype: the model's.
    kind: the 8-bit format. result: the dtype of the library's float8 products; see float8.product.
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
    if product.source != GATED or is_single_stream(out):
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


def is_single_stream(width: int) -> bool:
    """Whether tokens of this width are taken for those of a single-stream transformer, with RMS norms and SwiGLU: of
    the served networks, only these have tokens wider than WIDEST_USUAL. Decides only what is measured."""
    return width > WIDEST_USUAL


def tune_stored(
    launches: Launches, product: tuple[int, int, int, torch.dtype], device: torch.device, time_ms: TimeMs
) -> bool:
    """Measure the launch config of a product with a weight stored in INT8 and store the choice; return True. If there
    is a choice for this GPU model, do nothing and return False. product: an item of Launches.stored_products."""
    rows, out, width, dtype = product
    if launches.chosen(configs.INT8_PRODUCT, products.product_class(rows, out, width), dtype) is not None:
        return False
    given = Product(rows, width, out, PLAIN_INPUT)
    trial = product_trial(given, random_on(device, dtype), device, dtype, INT8, dtype)
    return trial is not None and tuned(launches, trial, dtype, time_ms)


def tune_down(
    launches: Launches, product: tuple[int, int, int, torch.dtype], device: torch.device, time_ms: TimeMs
) -> bool:
    """As tune_stored, for a product with the down matrices of LoRAs. product: an item of Launches.down_products."""
    rows, ranks, width, dtype = product
    if launches.chosen(configs.DOWN_PRODUCT, products.product_class(rows, ranks, width), dtype) is not None:
        return False
    return tuned(launches, down_trial(random_on(device, dtype), rows, ranks, width), dtype, time_ms)


def down_trial(make: Callable[..., Tensor], rows: int, ranks: int, width: int) -> Trial:
    """The trial of tune_down. make: make(*shape) returns a tensor of the product's dtype."""
    run = partial(products.down_product, make(rows, width), make(ranks, width))
    return Trial(configs.DOWN_PRODUCT, products.product_class(rows, ranks, width), run)


# --- a feed-forward's first product, exact ----------------------------------------------------------------------------


def tune_gated(launches: Launches, rows: int, width: int, dtype: torch.dtype, device: torch.device, time_ms: TimeMs
) -> bool:
    """Measure whether the product of tokens (rows, width) with a weight (8 width, width) is faster with its GEGLU in
    the same kernel, and in which launch config; store the choice and return True. If there is a choice for this GPU
    model, do nothing and return False."""
    make = random_on(device, dtype)
    shape_class = products.product_class(rows, 2 * configs.FEED_FORWARD * width, width)
    if launches.chosen(configs.EXACT_GATED_PRODUCT, shape_class, dtype) is not None:
        return False
    return tuned(launches, gated_trial(make, rows, width, device, shape_class), dtype, time_ms)


def gated_trial(
    make: Callable[..., Tensor], rows: int, width: int, device: torch.device, shape_class: str = ""
) -> Trial:
    """The trial of tune_gated. make: make(*shape) returns a tensor of the network's dtype. shape_class: see
    Launches.of; "" if the trial only serves to launch its kernels, and nothing is stored."""
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
    """Measure whether a float16 convolution is faster with float16 sums, and store the choice; return True. If there is
    a choice for this GPU model, do nothing and return False. size: an item of Launches.convolutions."""
    kernel = configs.CONVOLUTIONS[torch.float16]
    shape_class = "x".join(map(str, size))
    if launches.chosen(kernel, shape_class, torch.float16) is not None:
        return False
    return tuned(launches, half_sums_trial(random_on(device, torch.float16), size, device), torch.float16, time_ms)


def half_sums_trial(make: Callable[..., Tensor], size: Sequence[int], device: torch.device) -> Trial:
    """The trial of tune_half_sums. size: an item of Launches.convolutions. A candidate agrees if its error against
    torch's convolution is below float8.WORST_PROBE_ERROR. make: make(*shape) returns a tensor in float16."""
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
