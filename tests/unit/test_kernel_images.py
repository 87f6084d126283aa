"""Triton kernels for feature maps (addition, resize) and for tokens (layer norm, GEGLU) against float64 and torch. On a
GPU they are compiled; without one, Triton interprets them.

worst_error() is in units of the last digit of the output's dtype.
"""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from exact_operators import geglu as exact_geglu
from exact_operators import layer_norm as exact_layer_norm
from exact_operators import worst_error
from grid import ends, grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from test_kernel_group_norm import DEVICE, NEAREST, random_image

from lib_onediff.core.operators import Residual
from lib_onediff.devices.cuda.kernels.images import add_and_measure, resize
from lib_onediff.devices.cuda.kernels.launch_config import ADDITION, GEGLU, LAYER_NORM, LaunchConfig
from lib_onediff.devices.cuda.kernels.tokens import geglu, layer_norm, materialize

SHAPES = [(2, 48, 5, 7), (1, 320, 3, 3), (3, 33, 1, 1), (1, 64, 13, 10), (1, 130, 8, 8)]


def sum_of(image: Tensor, update: Tensor, bias: Tensor | None, *config: LaunchConfig) -> Tensor:
    """image + update + bias by the kernel, in a new tensor."""
    output = torch.full_like(update, torch.nan)
    add_and_measure(image, update, bias, output, *config)
    return output


@grid(shape=SHAPES, biased=[True, False])
def test_an_addition_is_close_to_float64_and_does_not_write_to_its_inputs(
    shape: tuple[int, ...], biased: bool
) -> None:
    """The kernel adds an image, an update and a bias. With a bias, the image is then also used as the output (in
    place): the result equals torch's."""
    image = random_image(*shape)
    update = random_image(*shape)
    bias = torch.randn(shape[1], device=DEVICE) if biased else None
    before = image.clone(), update.clone()
    output = sum_of(image, update, bias)
    assert torch.equal(image, before[0]) and torch.equal(update, before[1]), "an input is not written to"
    exact = image.double() + update.double() + (0 if bias is None else bias.double()[:, None, None])
    assert worst_error(output, exact) < 2
    if biased:
        expected = image + bias[:, None, None]
        add_and_measure(None, image, bias, image)
        assert torch.equal(image, expected), "in place"


@pytest.mark.parametrize("config", ends(ADDITION.candidates), ids=str)
def test_an_addition_gives_the_same_output_with_every_launch_config(config: LaunchConfig) -> None:
    """The output equals that of the default configuration to the bit, and in place that of torch."""
    image = random_image(1, 72, 5, 27)
    update = random_image(1, 72, 5, 27)
    bias = torch.randn(72, device=DEVICE)
    assert torch.equal(sum_of(image, update, bias, config), sum_of(image, update, bias))
    expected = image + bias[:, None, None]
    add_and_measure(None, image, bias, image, config)
    assert torch.equal(image, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [((5, 7), (10, 14)), ((23, 30), (45, 60)), ((9, 11), (17, 22)), ((10, 12), (9, 11)), ((4, 4), (9, 3)),
     ((1, 1), (3, 2)), ((8, 8), (8, 8))],
    ids=str,
)
def test_resize_equals_nearest_interpolation_of_torch(old: tuple[int, int], new: tuple[int, int]) -> None:
    """old, new: the image's height and width. The output is equal to the bit, and in channels_last layout."""
    image = random_image(2, 33, *old)
    output = resize(image, *new)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(output, functional.interpolate(image, size=new, mode="nearest"))


def rounds_otherwise(old: int, new: int) -> bool:
    """Whether float32 and integer arithmetic choose different source pixels for some pixel of the resized image."""
    scale = torch.tensor(old / new, dtype=torch.float32)
    places = torch.arange(new)
    return bool(((places * scale).long() != places * old // new).any())


def test_resize_picks_the_pixels_of_torch_where_float32_and_integer_arithmetic_differ() -> None:
    """torch chooses the source pixel with float32 arithmetic. The sizes are those at which integers choose another."""
    sizes = [(old, new) for old in (6, 12, 24) for new in range(60, 160) if rounds_otherwise(old, new)]
    assert len(sizes) > 10, sizes
    for old, new in sizes:
        image = random_image(1, 1, 1, old)
        expected = functional.interpolate(image, size=(1, new), mode="nearest")
        assert torch.equal(resize(image, 1, new), expected), (old, new)


# The allowed error in units of float32's rounding error at 1.
CLOSE = 20


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


def residual_with_biases(tokens: Tensor, has_deferred_bias: bool, has_bias: bool) -> tuple[Residual, Tensor]:
    """A residual with these tokens, and with a random deferred_bias and bias if they are wanted; and the float64 sum of
    the three."""
    width = tokens.shape[-1]
    first = random(width) if has_deferred_bias else None
    second = random(width, dtype=tokens.dtype) if has_bias else None
    total = tokens.double() + sum((vector.double() for vector in (first, second) if vector is not None), 0.0)
    return Residual(tokens, first, second), total


@grid(
    shape=[(2, 7, 320), (3, 5, 96), (1, 77, 33), (2, 1280), (1, 1, 1)],
    biases=[(False, False), (False, True), (True, True), (True, False)],
    biased=[True, False],
)
def test_layer_norm_of_a_residual_with_biases_not_added_yet_is_close_to_float64(
    shape: tuple[int, ...], biases: tuple[bool, bool], biased: bool
) -> None:
    """A Residual is tokens and biases that are not added yet. biases: whether it has a deferred_bias and a bias. The
    kernel norms their sum without writing the tokens, and returns a Residual with both biases in one float32
    deferred_bias. biased: whether the norm has a bias."""
    tokens = random(*shape)
    residual, total = residual_with_biases(tokens, *biases)
    weight = 1 + 0.3 * random(shape[-1])
    bias = random(shape[-1]) if biased else None
    before = tokens.clone()
    joined, output = layer_norm(residual, weight, bias, 1e-5)
    assert torch.equal(tokens, before), "an input is not written to"
    assert joined.tokens is tokens and joined.bias is None and joined.deferred_bias.dtype == torch.float32
    assert worst_error(joined.tokens + joined.deferred_bias, total) < CLOSE
    assert worst_error(output, exact_layer_norm(total, weight, bias, 1e-5)) < CLOSE
    assert worst_error(materialize(residual), total) < CLOSE
    # The residual that the norm returns, with another bias.
    further = joined._replace(bias=random(shape[-1]))
    assert worst_error(materialize(further), total + further.bias.double()) < CLOSE


@pytest.mark.parametrize("config", ends(LAYER_NORM.candidates), ids=str)
def test_layer_norm_and_materialize_are_close_to_float64_with_every_launch_config(config: tuple[int, int]) -> None:
    """materialize() adds a residual's biases to its tokens."""
    residual, total = residual_with_biases(random(7, 96), True, True)
    weight = random(96)
    bias = random(96)
    _, output = layer_norm(residual, weight, bias, 1e-5, config)
    assert worst_error(output, exact_layer_norm(total, weight, bias, 1e-5)) < CLOSE
    assert worst_error(materialize(residual, config), total) < CLOSE


@pytest.mark.parametrize("dtype", NEAREST, ids=str)
def test_each_kernel_rounds_its_half_precision_output_once(dtype: torch.dtype) -> None:
    """The kernels are addition, layer norm and GEGLU, against float64, and resize, which must equal torch's. NEAREST:
    the largest error of one rounding in each dtype, in units of its last digit."""
    image = random_image(2, 48, 5, 7, dtype=dtype)
    update = random_image(2, 48, 5, 7, dtype=dtype)
    bias = random(48, dtype=dtype)
    exact = image.double() + update.double() + bias.double()[:, None, None]
    assert worst_error(sum_of(image, update, bias), exact) <= NEAREST[dtype]
    expected = functional.interpolate(image.float(), size=(9, 13), mode="nearest").to(dtype)
    assert torch.equal(resize(image, 9, 13), expected)
    residual, total = residual_with_biases(random(9, 96, dtype=dtype), True, True)
    weight = random(96, dtype=dtype)
    bias = random(96, dtype=dtype)
    _, output = layer_norm(residual, weight, bias, 1e-5)
    assert worst_error(materialize(residual), total) <= NEAREST[dtype]
    assert worst_error(output, exact_layer_norm(total, weight, bias, 1e-5)) <= NEAREST[dtype]
    tokens = 3 * random(4, 192, dtype=dtype)
    assert worst_error(geglu(tokens), exact_geglu(tokens)) <= NEAREST[dtype]


@pytest.mark.parametrize("mean", [50.0, -50.0])
def test_layer_norm_of_rows_with_a_large_mean_errs_only_by_the_rounding_of_the_mean(mean: float) -> None:
    """The mean is hundreds of standard deviations: a variance computed as E[x^2] - E[x]^2 would be lost in rounding.
    Half of the mean is in the deferred bias."""
    tokens = 0.1 * random(5, 320) + 0.5 * mean
    deferred_bias = 0.1 * random(320) + 0.5 * mean
    weight = random(320)
    bias = random(320)
    _, output = layer_norm(Residual(tokens, deferred_bias), weight, bias, 1e-5)
    # The mean itself is rounded: to 2**-19, which is 3e-5 of a deviation.
    assert worst_error(output, exact_layer_norm(tokens + deferred_bias, weight, bias, 1e-5)) < 1000


@pytest.mark.parametrize("shape", [(2, 7, 640), (1, 3, 2560), (5, 96), (2, 10), (1, 2, 2 * 513), (1, 2)], ids=str)
def test_geglu_is_close_to_float64_at_every_width(shape: tuple[int, ...]) -> None:
    tokens = 3 * random(*shape)
    output = geglu(tokens)
    assert output.shape == (*shape[:-1], shape[-1] // 2)
    assert worst_error(output, exact_geglu(tokens)) < CLOSE


@pytest.mark.parametrize("config", ends(GEGLU.candidates), ids=str)
def test_geglu_is_close_to_float64_with_every_launch_config(config: tuple[int, int]) -> None:
    tokens = 3 * random(3, 2 * 1111)
    assert worst_error(geglu(tokens, config), exact_geglu(tokens)) < CLOSE


def test_geglu_with_large_gates_is_finite() -> None:
    """GEGLU is value * GELU(gate). GELU of a gate of 100 is the gate, of -100 it is 0: neither may become NaN by
    infinity times 0."""
    gates = torch.tensor([0.0, 1e-4, -1e-4, 5.0, -5.0, 9.0, -9.0, 100.0, -100.0, 6e4, -6e4], device=DEVICE)
    tokens = torch.cat([torch.full_like(gates, 2.0), gates])[None]
    output = geglu(tokens)
    assert worst_error(output, exact_geglu(tokens)) < CLOSE
    assert output[0, 7:].tolist() == [200.0, 0.0, 120000.0, 0.0]
