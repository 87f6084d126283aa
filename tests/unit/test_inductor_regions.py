"""What Inductor compiles, uncompiled, against torch's own operators; and how what it takes lies in memory."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from builders import relative_error

from lib_onediff.ops.inductor.operators import InductorOperators, channels_last, image_of, pixels
from lib_onediff.ops.inductor.regions import group_norm, layer_norm


@pytest.mark.parametrize("shape", [(2, 16, 9, 5), (1, 16, 9, 5), (1, 16, 1, 1), (3, 16, 1, 4)])
def test_pixels_lie_as_compiled_code_was_told(shape: tuple[int, ...]) -> None:
    image = torch.randn(shape)
    batch, channels, height, width = shape
    again = pixels(channels_last(image))
    assert again.stride() == (channels * height * width, channels, 1)
    assert torch.equal(image_of(again, image), image)


@pytest.mark.parametrize("width", [320, 1031])
def test_a_layer_norm_with_what_is_owed(width: int) -> None:
    tokens = torch.randn(7, width)
    deferred_bias, weight, bias = (torch.randn(width) for _ in range(3))
    settled, normed = layer_norm(tokens, deferred_bias, weight, bias, 1e-5)
    expected = functional.layer_norm((tokens + deferred_bias).double(), (width,), weight.double(), bias.double(), 1e-5)
    assert torch.equal(settled, tokens + deferred_bias)
    assert relative_error(normed, expected.float()) < 1e-6


@pytest.mark.parametrize("shifted", [False, True])
def test_a_group_norm_by_channels_keeps_its_digits_far_from_zero(shifted: bool) -> None:
    pixel, weight, bias = torch.randn(2, 35, 64) + 1000, torch.randn(64), torch.randn(64)
    shift = torch.randn(2, 64) * 10 * shifted
    image = pixel.double() + shift.double()[:, None]
    expected = functional.group_norm(image.transpose(1, 2), 32, weight.double(), bias.double(), 1e-5).transpose(1, 2)
    normed = group_norm(pixel, shift, weight, bias, 32, 1e-5, False)
    assert relative_error(normed, expected.float()) < 1e-3


@pytest.mark.parametrize(("size", "wanted"), [((3, 5), (6, 10)), ((3, 5), (5, 9)), ((3, 5), (6, 9)), ((1, 4), (2, 8))])
def test_resize(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    image = torch.randn(2, 7, *size)
    assert torch.equal(InductorOperators().resize(image, *wanted), functional.interpolate(image, wanted))
