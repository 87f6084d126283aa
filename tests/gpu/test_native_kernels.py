"""Our kernels on a real GPU, at the shapes of SDXL and beyond 2**31 elements. tests/unit has the small shapes."""
from __future__ import annotations

import exact_operators as exact
import pytest
import torch
import torch.nn.functional as functional
from exact_operators import relative_error
from torch import Tensor

from lib_onediff.core.operators import Residual
from lib_onediff.devices.cuda.kernels import images as native_images
from lib_onediff.devices.cuda.kernels import tokens as native_tokens

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
# The largest ratio of our error to torch's.
WORST_RATIO = 1.1
# How much larger than torch's own error ours may be in float32, because of the order of sums; half types round a
# thousand times more.
FLOAT32_ROUNDING = 4 * torch.finfo(torch.float32).eps
GIB = 2**30


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda") + mean).to(dtype)


def channels_last(image: Tensor) -> Tensor:
    return image.to(memory_format=torch.channels_last)


def assert_as_good(ours: Tensor, torchs: Tensor, expected: Tensor) -> None:
    """Assert that our error against float64 (expected) is at most WORST_RATIO times torch's, plus FLOAT32_ROUNDING."""
    assert ours.dtype == torchs.dtype
    assert relative_error(ours, expected) <= WORST_RATIO * relative_error(torchs, expected) + FLOAT32_ROUNDING


@DTYPES
@pytest.mark.parametrize(
    ("first", "second", "height", "width"),
    [(1920, 640, 64, 64), (640, 320, 128, 128), (320, 320, 90, 120), (1280, 1280, 8, 8), (1280, 640, 15, 11)], ids=str,
)
def test_group_norm_of_two_concatenated_feature_maps_is_as_accurate_as_in_torch(
    first: int, second: int, height: int, width: int, dtype: torch.dtype
) -> None:
    """With SiLU. Both errors are measured against float64. first, second: the numbers of channels of the two feature
    maps, which our kernel reads without concatenating them."""
    image = random(2, first, height, width, dtype=dtype)
    skip = random(2, second, height, width, dtype=dtype, mean=2.0)
    weight = random(first + second, dtype=dtype, mean=1.0)
    bias = random(first + second, dtype=dtype)
    together = torch.cat([image, skip], dim=1)
    expected = exact.group_norm(together, weight, bias, 32, 1e-5, True)
    torchs = functional.silu(functional.group_norm(together, 32, weight, bias, 1e-5))
    ours = native_images.group_norm(channels_last(image), channels_last(skip), weight, bias, 32, 1e-5, True, None)
    assert_as_good(ours, torchs, expected)


@pytest.fixture
def much_memory() -> None:
    """Skips the test if less than 24 GiB of GPU memory are free."""
    if torch.cuda.mem_get_info()[0] < 24 * GIB:
        pytest.skip("needs 24 GiB of free GPU memory")


def same_in_every_tile(image: Tensor, tile: Tensor) -> bool:
    """Whether an image consists of copies of this tile."""
    height, width = tile.shape[2:]
    repeated = channels_last(tile.repeat(1, 1, 1, image.shape[3] // width))
    return all(torch.equal(image[:, :, row:row + height], repeated) for row in range(0, image.shape[2], height))


@pytest.mark.usefixtures("much_memory")
def test_image_kernels_are_correct_beyond_two_to_the_31_elements() -> None:
    """Indices of 32 bits would overflow. The image repeats one tile, so that each part of the output must equal the
    first one, which is compared with float64."""
    tile = channels_last(random(1, 320, 26, 26, dtype=torch.float16))
    weight = random(320, dtype=torch.float16, mean=1.0)
    bias = random(320, dtype=torch.float16)
    image = channels_last(tile.repeat(1, 1, 100, 100))
    assert image.numel() > 2**31
    output = native_images.group_norm(image, None, weight, bias, 32, 1e-5, True, None)
    # Repeating an image changes neither its mean nor its variance.
    expected = exact.group_norm(tile, weight, bias, 32, 1e-5, True)
    for corner in (output[..., :26, :26], output[..., -26:, -26:]):
        assert relative_error(corner, expected) < 1e-3
    assert same_in_every_tile(output, output[..., :26, :26].contiguous())
    native_images.add_and_measure(image, image, bias, output)
    assert same_in_every_tile(output, tile + tile + bias[:, None, None])
    del output
    native_images.add_and_measure(None, image, bias, image)
    assert same_in_every_tile(image, tile + bias[:, None, None])
    del image
    large = native_images.resize(tile, 2600, 2600)
    assert large.numel() > 2**31
    assert all(torch.equal(large[:, :, row::100, column::100], tile) for row in (0, 99) for column in (0, 57, 99))


@pytest.mark.usefixtures("much_memory")
def test_token_kernels_are_correct_beyond_two_to_the_31_elements() -> None:
    """GEGLU, and layer norm with its residual, on more than 2**31 elements: indices of 32 bits would overflow. The
    tokens repeat a thousand rows, so the last thousand rows of the output must equal the first, and they are close to
    float64."""
    few = random(1000, 1280, dtype=torch.float16)
    weight = random(1280, dtype=torch.float16, mean=1.0)
    bias = random(1280, dtype=torch.float16)
    many = few.repeat(1700, 1)
    assert many.numel() > 2**31
    gated = native_tokens.geglu(many)
    assert torch.equal(gated, native_tokens.geglu(few).repeat(1700, 1))
    assert relative_error(gated[-1000:], exact.geglu(few)) < 1e-3
    del gated
    residual, normed = native_tokens.layer_norm(Residual(many, None, bias), weight, bias, 1e-5)
    assert torch.equal(native_tokens.materialize(residual)[-1000:], few + bias)
    assert relative_error(normed[-1000:], exact.layer_norm(few + bias, weight, bias, 1e-5)) < 1e-3
    assert torch.equal(normed[:1000], normed[-1000:])
