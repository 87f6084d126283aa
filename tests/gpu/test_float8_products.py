"""Our own products in float8 on a real GPU, by every cut: a feed-forward's first with its GEGLU, and convolutions."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from exact_operators import one_scale_of, relative_error
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.affine import Affine
from lib_onediff.core.operators import QuantizedImage, QuantizedTokens
from lib_onediff.devices.cuda.kernels.launch_config import CONVOLUTION, GATED_PRODUCT, LIBRARY, LaunchConfig
from lib_onediff.devices.cuda.low_bit import kernels, products
from lib_onediff.weights.low_bit import FP8, as_rows, gated_scale

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
# What three bits after the point make of normal numbers, and how a GPU sums products of float8: in 22 bits, the more of
# them the farther off (2.5e-3 of 11,520).
ROUNDED, SUMMED = 3e-2, 5e-3


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if not products.copies_tiles(GPU):
        pytest.skip("they are used on a GPU of compute capability 9.0")


def rounded(tokens: Tensor) -> tuple[Tensor, Tensor]:
    scale = one_scale_of(tokens.flatten(0, -2), FP8)
    return (tokens / scale).to(FP8.dtype).contiguous(), scale


@pytest.mark.parametrize("config", [config for config in GATED_PRODUCT.candidates if config != LIBRARY], ids=str)
@pytest.mark.parametrize(("rows", "width", "half"), [(2048, 1280, 5120), (4095, 640, 2560), (77, 336, 1360)], ids=str)
def test_a_product_with_its_geglu(config: LaunchConfig, rows: int, width: int, half: int) -> None:
    norm = Affine(torch.rand(width, device=GPU) + 0.5, torch.randn(width, device=GPU))
    tokens = functional.layer_norm(torch.randn(rows, width, device=GPU), (width,), norm.weight, norm.bias)
    weight = torch.randn(2 * half, width, device=GPU, dtype=torch.float16) / width**0.5
    bias = torch.randn(2 * half, device=GPU, dtype=torch.float16)
    values, scale = rounded(tokens)
    low_bit = kernels.rounded_weight(weight, FP8)
    output_scale = gated_scale(weight, bias, norm).view(1, 1)
    found = products.gated_product(QuantizedTokens(values, scale, (rows,)), low_bit, bias, output_scale, config)
    sums = (values.double() * scale) @ (low_bit.values.double() * low_bit.scales.t()).t() + bias
    value, gate = sums.chunk(2, dim=1)
    expected = value * functional.gelu(gate)
    assert relative_error(found.values.double() * found.scales, expected) < ROUNDED


@pytest.mark.parametrize("config", CONVOLUTION.candidates, ids=str)
@pytest.mark.parametrize(("batch", "channels", "out", "size"), [
    (2, 320, 320, (128, 128)), (2, 1280, 1280, (32, 32)), (1, 960, 336, (45, 61)), (3, 48, 80, (33, 40)),
], ids=str)
def test_a_convolution(config: LaunchConfig, batch: int, channels: int, out: int, size: tuple[int, int]) -> None:
    image = torch.randn(batch, *size, channels, device=GPU)
    weight = torch.randn(out, channels, 3, 3, device=GPU, dtype=torch.float16) / channels**0.5
    low_bit = kernels.rounded_weight(as_rows(weight), FP8)
    values, scale = rounded(image)
    found = products.convolution(QuantizedImage(values, scale), low_bit, torch.float32, config)
    back = (low_bit.values.float() * low_bit.scales.t()).view(out, 3, 3, channels).permute(0, 3, 1, 2)
    expected = functional.conv2d((values.float() * scale).permute(0, 3, 1, 2).double(), back.double(), padding=1)
    assert relative_error(found.double(), expected) < SUMMED
