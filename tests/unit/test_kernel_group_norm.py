"""The group norm kernels against float64 ("exact"). The kernels are compiled on a GPU; without one, Triton's
interpreter runs them."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_operators import group_norm as exact_group_norm
from exact_operators import worst_error
from grid import ends, grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.devices.cuda.kernels import images
from lib_onediff.devices.cuda.kernels.images import (
    JOINED_NUMBERS,
    group_norm,
    join_block,
)
from lib_onediff.devices.cuda.kernels.launch_config import APPLICATION, STATISTICS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Values of group_norm's at_once: the single kernel, the three kernels, and the choice between them.
WAYS = [True, False, None]
Way = bool | None
# Launch configs of the kernels for large images, as arguments of group_norm.
CUTS = [
    *({"statistics_config": config} for config in ends(STATISTICS.candidates)),
    *({"application_config": config} for config in ends(APPLICATION.candidates)),
]
# The allowed error of a sum over thousands of values and a square root, in units of float32's rounding error at 1.
CLOSE = 40
# The allowed error of rounding to the nearest, in units of a half type's last digit. Triton's interpreter truncates to
# bfloat16 instead.
NEAREST = {torch.float16: 0.51, torch.bfloat16: 0.51 if DEVICE.type == "cuda" else 1.01}


def random_image(*shape: int, mean: float = 0.0, deviation: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """An image (batch, channels, height, width) of normally distributed random numbers in channels-last memory."""
    values = torch.randn(shape) * deviation + mean
    return values.to(DEVICE, dtype).to(memory_format=torch.channels_last)


def random_affine(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A random (weight, bias) of a norm, each (channels,), with weights around 1."""
    return 1 + 0.3 * torch.randn(channels).to(DEVICE, dtype), torch.randn(channels).to(DEVICE, dtype)


def error(
    at_once: Way, first: Tensor, second: Tensor | None, groups: int, eps: float = 1e-5, **others: Any
) -> float:
    """The error of the kernels against float64, in units of rounding errors, for one image or two concatenated ones.
    others: silu, shift, and launch configs."""
    image = first if second is None else torch.cat([first, second], dim=1)
    weight, bias = random_affine(image.shape[1], first.dtype)
    silu = others.pop("silu", False)
    shift = others.pop("shift", None)
    output = group_norm(first, second, weight, bias, groups, eps, silu, shift, at_once=at_once, **others)
    assert output.dtype == first.dtype and output.is_contiguous(memory_format=torch.channels_last)
    return worst_error(output, exact_group_norm(image, weight, bias, groups, eps, silu, shift))


@grid(
    sizes=[
        (1, 32, 32, 3, 3),  # a channel to a group
        (1, 33, 11, 4, 9), (1, 48, 6, 9, 5), (1, 72, 8, 2, 40), (3, 80, 5, 6, 6), (1, 96, 4, 11, 9),
        (1, 130, 2, 3, 5),  # groups wider than a block of channels
        (1, 320, 16, 4, 4), (1, 1280, 8, 2, 3), (1, 2560, 8, 3, 5),
        (2, 64, 8, 1, 1), (1, 32, 4, 1, 67), (1, 32, 4, 131, 1),
    ],
    at_once=WAYS,
)
def test_group_norm_is_close_to_exact_for_every_number_of_channels_and_pixels(
    sizes: tuple[int, int, int, int, int], at_once: Way
) -> None:
    """Each size is tested with SiLU and a shift, and without both. The shift is a slice of a wider tensor, as a block's
    shift is a slice of all blocks' shifts. sizes: (batch, channels, groups, height, width). at_once: see WAYS."""
    batch, channels, groups, height, width = sizes
    image = random_image(batch, channels, height, width)
    shift = torch.randn(batch, 3 + channels + 9, device=DEVICE).split([3, channels, 9], dim=1)[1]
    assert error(at_once, image, None, groups, silu=True, shift=shift) < CLOSE
    assert error(at_once, image, None, groups) < CLOSE


@pytest.mark.parametrize("config", CUTS, ids=str)
def test_group_norm_is_close_to_exact_with_every_launch_config(config: dict[str, tuple[int, int]]) -> None:
    assert error(False, random_image(1, 72, 5, 11, mean=1.0), None, 4, silu=True, **config) < CLOSE


@grid(channels=[(64, 32, 4), (32, 64, 4), (80, 48, 4), (16, 128, 6), (7, 65, 4)], at_once=WAYS)
def test_group_norm_of_two_images_is_close_to_exact_if_a_group_has_channels_of_both(
    channels: tuple[int, int, int], at_once: Way
) -> None:
    """The kernel reads both images instead of their concatenation, and the group must have one mean over both.
    channels: (of the first image, of the second, number of groups)."""
    first, second, groups = channels
    assert first % ((first + second) // groups), "the border must not be between two groups"
    images = random_image(2, first, 4, 9), random_image(2, second, 4, 9, mean=3.0)
    assert error(at_once, *images, groups, silu=True) < CLOSE
    shift = torch.randn(2, first + second, device=DEVICE)
    assert error(at_once, *images, groups, shift=shift) < CLOSE


@grid(eps=[1e-6, 1e-2, 1.0], at_once=WAYS)
def test_eps_is_added_to_the_variance_of_images_that_hardly_vary(eps: float, at_once: Way) -> None:
    """The images have a standard deviation of 0.01, so that eps changes the result much."""
    assert error(at_once, random_image(1, 32, 6, 7, deviation=1e-2), None, 4, eps=eps) < CLOSE


# The allowed error, as CLOSE, if the mean is a thousand deviations. The result is then the sum of two numbers of about
# 1000 (value * scale + offset), whose rounding remains.
FAR_FROM_ZERO = 4000


@grid(mean=[100.0, -100.0], at_once=WAYS)
def test_a_mean_of_a_thousand_deviations_adds_no_error_but_its_own_rounding(mean: float, at_once: Way) -> None:
    """A variance computed as a difference of mean squares would lose all digits. The mean is that of one image, of two
    concatenated ones, or of the shift."""
    image = random_image(1, 32, 20, 33, mean=mean, deviation=0.1)
    assert error(at_once, image, None, 2) < FAR_FROM_ZERO
    assert error(at_once, image, random_image(1, 16, 20, 33, mean=mean, deviation=0.1), 2) < FAR_FROM_ZERO
    shift = torch.full((1, 32), mean, device=DEVICE)
    assert error(at_once, random_image(1, 32, 20, 33, deviation=0.1), None, 2, shift=shift) < FAR_FROM_ZERO


@grid(size=[(45, 60), (32, 65), (41, 50)], mean=[0.0, 100.0])  # 84.4, 65 and 64.1 strips
def test_group_norm_is_close_to_exact_with_more_strips_than_are_joined_at_once(
    size: tuple[int, int], mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first kernel sums each strip of 32 pixels; the joining kernel reads JOINED_NUMBERS of these sums at once, and
    has to do so several times for images of these sizes."""
    rows = 32
    height, width = size
    monkeypatch.setattr(images, "wanted_strips", lambda *ignored: 10**6)
    assert height * width > JOINED_NUMBERS // join_block(16) * rows
    image = random_image(1, 32, height, width, mean=mean, deviation=0.1 if mean else 1.0)
    image[:, :, height // 2:] += 0.05 * mean + 2.0  # strips that differ
    close = FAR_FROM_ZERO if mean else CLOSE
    assert error(False, image, None, 2, statistics_config=(rows, 4)) < close


@grid(dtype=list(NEAREST), at_once=WAYS)
def test_in_half_precision_only_the_output_is_rounded(dtype: torch.dtype, at_once: Way) -> None:
    """The error against float64 is at most that of rounding to the nearest once. See NEAREST."""
    image = random_image(2, 48, 5, 7, mean=4.0, dtype=dtype)
    shift = torch.randn(2, 48).to(DEVICE, dtype)
    assert error(at_once, image, None, 4, shift=shift, silu=True) <= NEAREST[dtype]
