"""NativeOperators, which use our Triton kernels, against torch's operators, with images in any memory format; and our
kernel for attention over few keys against float64."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from builders import relative_error
from exact_operators import attention as exact_attention
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from grid import ends

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.leaves import AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm
from lib_onediff.core.operators import GEGLU, Activation, Heads, Modulation, Residual, Rotary
from lib_onediff.devices.cuda.kernels import products
from lib_onediff.devices.cuda.kernels.launch_config import (
    ATTENTION,
    EXACT_GATED_PRODUCT,
    LIBRARY,
    WIDE_ATTENTION,
    LaunchConfig,
    Launches,
    random_on,
)
from lib_onediff.devices.cuda.kernels.operators import NativeOperators, VirtualConcatenation
from lib_onediff.devices.cuda.kernels.tokens import attention, heads_lie_beside
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.attention import inputs_of

pytestmark = pytest.mark.usefixtures("exact_products")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = 1e-5
FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "as torch makes it": torch.clone,
    "channels last": lambda image: image.to(memory_format=torch.channels_last),
    "a slice of channels": lambda image: torch.cat([image, image], dim=1)[:, :image.shape[1]],
    "every second pixel": lambda image: image.repeat_interleave(2, dim=3)[..., ::2],
    "transposed": lambda image: image.transpose(2, 3).contiguous().transpose(2, 3),
}
IN_ANY_FORMAT = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


@pytest.fixture
def native() -> NativeOperators:
    return NativeOperators()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def layer(*shape: int, biased: bool = True) -> LayerWeights:
    return LayerWeights(random(*shape), random(shape[0]) if biased else None)


@IN_ANY_FORMAT
def test_operators_on_images_in_any_memory_format_are_close_to_the_torch_operators(
    native: NativeOperators, form: Callable[[Tensor], Tensor]
) -> None:
    """Group norm, addition of a residual, resize, and conversion to tokens; none of them writes to its input. form:
    gives an image this memory format, with equal values."""
    image = random(2, 24, 5, 6)
    other = random(2, 24, 5, 6)
    bias = random(24)
    norm = GroupNorm("norm", 24, 4, 1e-5)
    given = form(image)
    parameters = layer(24)
    for silu in (True, False):
        expected = torch_ops.group_norm(image, parameters, norm, silu)
        assert relative_error(native.group_norm(given, parameters, norm, silu), expected) < CLOSE
    assert relative_error(native.residual_add(given, form(other), bias), image + other + bias[:, None, None]) < CLOSE
    assert torch.equal(native.resize(given, 9, 12), torch_ops.resize(image, 9, 12))
    assert torch.equal(native.image_to_tokens(given), torch_ops.image_to_tokens(image))
    assert torch.equal(given, image), "an input is not written to"


@IN_ANY_FORMAT
def test_operators_on_a_virtual_concatenation_are_close_to_those_on_a_real_one(
    native: NativeOperators, form: Callable[[Tensor], Tensor]
) -> None:
    """concatenate() returns both images without a copy, and the group norm and the pointwise convolution read both. The
    reference is torch's operators on torch.cat()."""
    image = random(2, 40, 5, 6)
    skip = random(2, 24, 5, 6)
    beside = native.concatenate(form(image), form(skip))
    together = torch.cat([image, skip], dim=1)
    assert isinstance(beside, VirtualConcatenation) and beside.shape == together.shape
    norm = GroupNorm("norm", 64, 4, 1e-5)
    parameters = layer(64)
    projection = layer(16, 64, 1, 1)
    expected = torch_ops.group_norm(together, parameters, norm, True)
    assert relative_error(native.group_norm(beside, parameters, norm, True), expected) < CLOSE
    assert relative_error(native.pointwise(beside, projection), torch_ops.pointwise(together, projection)) < CLOSE


@grid(kind=list(product([(1, 32), (1, 20), (2, 32)], [False, True])), form=list(FORMATS), biased=[True, False])
def test_a_convolution_is_close_to_that_of_torch_in_any_memory_format(
    native: NativeOperators, kind: tuple[tuple[int, int], bool], form: str, biased: bool
) -> None:
    """kind: ((stride, output channels), whether the padding is circular). form: the memory format of the image. The
    weight is contiguous and then channels-last."""
    (stride, channels), circular = kind
    shape = Convolution("convolution", 12, channels, 3, stride, 1, circular)
    image = random(2, 12, 7, 6)
    weights = layer(channels, 12, 3, 3, biased=biased)
    expected = torch_ops.convolution(image, weights, shape)
    given = FORMATS[form](image)
    assert relative_error(native.convolution(given, weights, shape), expected) < CLOSE
    arranged = LayerWeights(weights.weight.contiguous(memory_format=torch.channels_last), weights.bias)
    assert relative_error(native.convolution(given, arranged, shape), expected) < CLOSE


def test_operators_on_tokens_that_are_not_contiguous_are_close_to_the_torch_operators(native: NativeOperators) -> None:
    """Layer norm of a residual, additions to the residual, and GEGLU."""
    tokens = random(24, 14, 2).permute(2, 1, 0)[:, 3:10]
    hidden = random(2, 7, 96)[..., ::2]
    norm = LayerNorm("norm", 24, 1e-5)
    parameters = layer(24)
    out = layer(24, 48)
    outputs = []
    for ops in (native, torch_ops):
        residual, first = ops.residual_norm(Residual(tokens.clone()), parameters, norm, out)
        # Two additions between the norms, and one after the last.
        residual = ops.add_linear(ops.add_linear(residual, hidden, out), hidden, out)
        residual, second = ops.residual_norm(residual, parameters, norm, out)
        whole = ops.materialize(ops.add_linear(residual, hidden, out))
        outputs.append((first, second, whole, ops.gated(tokens, GEGLU, out)))
    for ours, expected in zip(*outputs, strict=True):
        assert relative_error(ours, expected) < CLOSE


@pytest.mark.parametrize(("dtype", "kept"), list(product([torch.float32, torch.float16], repeat=2)), ids=str)
def test_the_operators_of_a_transformer_block_are_close_to_torch_operators_in_float32(
    native: NativeOperators, dtype: torch.dtype, kept: torch.dtype
) -> None:
    """Modulated norms, gated additions, GELU, and split heads with norms and rotary embeddings. dtype: the dtype of the
    weights and the other inputs. kept: the dtype of the residual."""
    tokens = random(2, 7, 48).to(kept)
    hidden = random(2, 7, 48).to(dtype)
    gate = random(2, 48).to(dtype)
    image, into, out, parts, head = ([random(*shape).to(dtype) for shape in shapes] for shapes in (
        [(2, 48), (2, 48)], [(96, 48), (96,)], [(48, 96), (48,)], [(144, 48)], [(16,)]
    ))
    rotary = Rotary(random(7, 8), random(7, 8))
    norm = AdaptiveNorm(48, 1e-6)
    of_heads = RMSNorm("norm", 16, 1e-6)

    def outputs(ops: Any, as_kind: Callable[[Tensor], Tensor]) -> list[Tensor]:
        with_image, first, second, three, one = (
            LayerWeights(*map(as_kind, given), *[None] * (2 - len(given))) for given in (image, into, out, parts, head)
        )
        residual = Residual(as_kind(tokens.clone()))
        factors = as_kind(gate)
        modulation = Modulation(with_image.weight, with_image.bias)
        gelu = Activation.GELU
        residual, normed = ops.residual_norm(residual, None, norm, second, modulation)
        residual = ops.add_linear(residual, ops.activated_linear(as_kind(hidden), first, gelu, second), second, factors)
        residual = ops.add_linear(residual, ops.activated_linear(normed, first, gelu, second), second, factors)
        residual, again = ops.residual_norm(residual, None, norm, second, modulation)
        rotated = Heads(3, (one, of_heads), rotary)
        heads = ops.split_heads(ops.linear(again, three), (rotated, rotated, Heads(3)))
        alone = ops.split_heads(again.clone(), (Heads(3, (one, of_heads)),))
        return [ops.materialize(residual), normed, again, *alone, *heads]

    expected = outputs(torch_ops, Tensor.float)
    for ours, exact, kind in zip(outputs(native, torch.clone), expected, [kept, *[dtype] * 6], strict=True):
        close = CLOSE if dtype == kept == torch.float32 else 3e-3
        assert ours.dtype == kind and relative_error(ours.float(), exact) < close


# In a half type, with the weights rounded to it before they are multiplied with the values. The interpreter truncates
# bfloat16.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 6e-3}
SHAPES = {
    "SDXL": ((2, 3, 100, 64), 77), "long prompt": ((1, 2, 65, 64), 154), "SD1": ((2, 2, 70, 40), 77),
    "wider": ((1, 2, 33, 80), 77), "widest": ((1, 1, 64, 160), 77), "one key": ((1, 2, 5, 64), 1),
    "one query": ((2, 1, 1, 64), 77), "as many keys": ((1, 2, 130, 16), 130),
}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_attention_over_few_keys_is_close_to_float64(kind: str, dtype: torch.dtype) -> None:
    """kind: a key of SHAPES, which has the shape of the query and the number of keys. The bound allows the softmax's
    weights to be rounded once to the half type. The kernel needs the heads of a token side by side in memory, which
    heads_lie_beside() finds out."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 by its bits")
    query, keys = SHAPES[kind]
    inputs = inputs_of(random_on(DEVICE, dtype), query, (*query[:2], keys, query[3]))
    assert all(map(heads_lie_beside, inputs))
    output = attention(*inputs)
    assert output.shape == query and output.transpose(1, 2).is_contiguous(), "heads can be joined without a copy"
    assert relative_error(output.double(), exact_attention(*inputs)) < ROUNDING[dtype]
    assert not heads_lie_beside(torch.zeros(2, 3, 10, 64, device=DEVICE)), "those are not taken"


@pytest.mark.parametrize(
    ("width", "config"),
    [(width, config) for width, kernel in ((64, ATTENTION), (80, WIDE_ATTENTION))
     for config in ends([config for config in kernel.candidates if config != LIBRARY])], ids=str,
)
def test_attention_is_close_to_float64_with_every_launch_config(width: int, config: LaunchConfig) -> None:
    """width: the width of a head; 64 and 80 have different kernels. On a CPU, only the first and the last config of
    each are tested."""
    inputs = inputs_of(random_on(DEVICE, torch.float16), (1, 2, 70, width), (1, 2, 154, width))
    assert relative_error(attention(*inputs, config).double(), exact_attention(*inputs)) < ROUNDING[torch.float16]


def test_attention_does_not_overflow_with_large_scores() -> None:
    """The scores are in the thousands, and float16 overflows for their exponentials. The reference is in float64."""
    query, key, value = inputs_of(random_on(DEVICE, torch.float16), (1, 1, 20, 64), (1, 1, 77, 64))
    inputs = 60 * query, 60 * key, value
    assert relative_error(attention(*inputs).double(), exact_attention(*inputs)) < 2e-3


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gated_product_is_not_used_for_a_weight_that_is_not_contiguous(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gated product is a kernel that reads contiguous rows of a weight. An extension may replace the weight by a
    view whose rows are not contiguous (transposed). In both cases, the output must be close to the one in float64."""
    used: list[bool] = []
    product = products.exact_gated_product
    monkeypatch.setattr(products, "exact_gated_product", lambda *given: used.append(True) or product(*given))
    launches = Launches(TuningCache())
    tokens = torch.randn(3, 32, dtype=torch.float16, device=DEVICE)
    bias = torch.randn(64, device=DEVICE).half()
    weight = torch.randn(32, 64, device=DEVICE).half().t() if transposed else torch.randn(64, 32, device=DEVICE).half()
    config = next(one for one in EXACT_GATED_PRODUCT.candidates[1:] if not one[0])
    launches.choose(EXACT_GATED_PRODUCT, products.product_class(3, 64, 32), torch.float16, config)
    into = LayerWeights(weight, bias)
    found = NativeOperators(launches).gated_linear(tokens, into, GEGLU, into)
    expected = torch_ops.gated(functional.linear(tokens.double(), weight.double(), bias.double()), GEGLU)
    assert bool(used) is not transposed and relative_error(found.double(), expected) < 2e-3
