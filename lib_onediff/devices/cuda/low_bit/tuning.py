"""The products in eight bits that a network has, on random numbers: measured in their places, for whether they gain and
how they are best cut on this GPU, and compiled."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....core.affine import Affine, QuantizedWeight
from ....core.device import TimeMs
from ....core.leaves import LayerNorm
from ....core.operators import Operators, QuantizedTokens, Stream
from ....weights import low_bit
from ....weights.low_bit import FP8, GATED, INT8, Kind, Product
from ..kernels import launch_config as cuts
from ..kernels.launch_config import LaunchConfig, Launches, Trial, random_on, row_class, tuned
from ..kernels.tuning import widths
from . import float8, kernels, products

Way = Callable[[Operators], object]
EPS = 1e-5
# Of random numbers in int8.
SPREAD = 32.0
# Rows of tokens that are compiled for.
FEW = 4


def tune_product(
    launches: Launches, product: Product, dtype: torch.dtype, device: torch.device, kind: Kind, result: torch.dtype,
    time_ms: TimeMs,
) -> None:
    """Choose how a product is cut, where it is one of our own and that was not measured on this GPU. result: see
    float8.product. Raises what Triton raises."""
    trial = trial_of(product, random_on(device, dtype), device, dtype, kind, result)
    if trial is not None:
        tuned(launches, trial, dtype, time_ms)


def trial_of(
    product: Product, make: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, kind: Kind,
    result: torch.dtype,
) -> Trial | None:
    """How a product can be cut; None where a library cuts it. make: a tensor of a shape; a GPU multiplies zeros faster
    than random numbers."""
    rows, width, out = product[:3]
    one = torch.ones((1, 1), device=device)

    def values(*shape: int) -> Tensor:
        return (make(*shape) * SPREAD if kind is INT8 else make(*shape)).clamp(-127, 127).to(kind.dtype)

    if kind is INT8:
        tokens = QuantizedTokens(values(rows, width), torch.ones((rows, 1), device=device), (rows,))
        weight = QuantizedWeight(values(out, width), torch.ones((1, out), device=device))
        shape_class = products.product_class(rows, out, width)
        run = partial(products.int8_product, tokens, weight, None, dtype)
        return Trial(products.kernel_for(device), shape_class, run)
    if product.source != GATED or not products.copies_tiles(device):
        return None
    # What a feed-forward's second product reads is made in float8, by its first one and a GEGLU.
    tokens, weight = QuantizedTokens(values(rows, out), one, (rows,)), QuantizedWeight(values(2 * width, out), one)
    bias = make(2 * width)

    def gate(config: LaunchConfig) -> object:
        if config == cuts.LIBRARY:
            return kernels.geglu(float8.product(tokens, weight, bias, result), FP8)
        return products.gated_product(tokens, weight, bias, one, config)

    return Trial(cuts.GATED_PRODUCT, products.product_class(rows, 2 * width, out), gate)


def way_of(product: Product, dtype: torch.dtype, device: torch.device, kind: Kind) -> Way:
    """What computes a product by any operators, with what makes its tokens and the norm after it; the weights are there
    in this kind too. Of a GEGLU's reader, what makes its tokens begins at the norm before."""
    random = random_on(device, dtype)
    weight = random(product.out, product.width)
    affine = Affine(weight, None, (kernels.rounded_weight(weight, kind),))
    if product.source == low_bit.NORMED:
        tokens, parameters = random(product.rows, product.width), Affine(random(product.width), None)
        norm = LayerNorm("norm", product.width, EPS)
        return lambda ops: ops.linear(ops.layer_norm(Stream(tokens), parameters, norm, affine)[1], affine)
    stream, vector = Stream(random(product.rows, product.out)), random(product.out)
    if product.source == GATED:
        # A feed-forward from norm to norm: its first product may make what this one reads.
        parameters, norm = Affine(vector, None), LayerNorm("norm", product.out, EPS)
        matrix, bias = random(2 * product.width, product.out), random(2 * product.width)
        rounded = kernels.rounded_weight(matrix, kind)
        into = Affine(matrix, bias, (rounded,), gated_scale=low_bit.gated_scale(matrix, bias, parameters).view(1, 1))

        def fed_forward(ops: Operators) -> object:
            now, normed = ops.layer_norm(stream, parameters, norm, into)
            return kernels.layer_norm(
                ops.add_linear(now, ops.gated_linear(normed, into, affine), affine), vector, None, EPS, kind
            )

        return fed_forward
    hidden = random(product.rows, product.width)
    return lambda ops: kernels.layer_norm(ops.add_linear(stream, hidden, affine), vector, None, EPS, kind)


def low_bit_compilations(
    users: list[Any], dtype: torch.dtype, device: torch.device, launches: Launches, kind: Kind
) -> list[Callable[[], object]]:
    """As kernels.tuning.compilations: for what makes tokens of a kind of eight bits, and for every cut of a product of
    our own, of which the fastest is measured for each shape."""
    make = partial(torch.zeros, dtype=dtype, device=device)
    found: list[Callable[[], object]] = []

    def tokens_of(width: int) -> None:
        tokens, weight = make(FEW, width), make(width)
        config = launches.of(cuts.LAYER_NORM, row_class(width), dtype)
        for update in (make(FEW, width), tokens.to(torch.bfloat16)):
            kernels.layer_norm(Stream(tokens, None, weight, update), weight, weight, EPS, kind, config)
        hidden = make(FEW, 2 * cuts.FEED_FORWARD * width)
        kernels.geglu(hidden, kind)
        for features in (cuts.FEED_FORWARD * width, width):
            kernels.rounded(hidden[:, :features], kind)
            if kind is FP8:
                rows, one_scale = make(FEW, features), torch.empty((1, 1), dtype=torch.float32, device=device)
                kernels.rounded_rows(rows, torch.empty_like(rows, dtype=kind.dtype), one_scale)

    for width in widths(users):
        found.append(partial(tokens_of, width))
    # Sizes are multiples of this in every network: Triton compiles another kernel for others.
    width, wanted = low_bit.ALIGNED, list[Product]()
    if kind is INT8:
        wanted.append(Product(FEW, width, width, low_bit.PLAIN))
    elif products.copies_tiles(device):
        wanted.append(Product(FEW, width, width, GATED))
    for product in wanted:
        trial = trial_of(product, make, device, dtype, kind, torch.bfloat16)
        if trial is not None:
            found += [partial(attempted, trial, config) for config in trial.kernel.candidates if config != cuts.LIBRARY]
    return found


def attempted(trial: Trial, config: LaunchConfig) -> None:
    """Launch; but for the first, a GPU need not have every cut."""
    try:
        trial.run(config)
    except Exception:
        if config == trial.kernel.candidates[0]:
            raise
