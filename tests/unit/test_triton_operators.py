"""TritonOperators against torch's: images in any memory format, and two of them side by side."""
from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from builders import relative_error
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.model.layout import Convolution, GroupNorm, LayerNorm
from lib_onediff.model.operators import Stream
from lib_onediff.model.weights import Affine
from lib_onediff.ops import torch_ops
from lib_onediff.ops.attention_tuning import random_inputs
from lib_onediff.ops.triton.operators import TritonOperators, VirtualConcatenation

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
def native() -> TritonOperators:
    return TritonOperators()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def affine(*shape: int, biased: bool = True) -> Affine:
    return Affine(random(*shape), random(shape[0]) if biased else None)


@IN_ANY_FORMAT
def test_an_image_may_lie_in_memory_as_it_likes(native: TritonOperators, form: Callable[[Tensor], Tensor]) -> None:
    image, other, bias = random(2, 24, 5, 6), random(2, 24, 5, 6), random(24)
    norm, given = GroupNorm("norm", 24, 4, 1e-5), form(image)
    parameters = affine(24)
    for silu in (True, False):
        expected = torch_ops.group_norm(image, parameters, norm, silu)
        assert relative_error(native.group_norm(given, parameters, norm, silu), expected) < CLOSE
    assert relative_error(native.residual_add(given, form(other), bias), image + other + bias[:, None, None]) < CLOSE
    assert torch.equal(native.resize(given, 9, 12), torch_ops.resize(image, 9, 12))
    assert torch.equal(native.image_to_tokens(given), torch_ops.image_to_tokens(image))
    assert torch.equal(given, image), "an input is not written to"


@IN_ANY_FORMAT
def test_two_images_side_by_side_are_their_concatenation(
    native: TritonOperators, form: Callable[[Tensor], Tensor]
) -> None:
    image, skip = random(2, 40, 5, 6), random(2, 24, 5, 6)
    beside, together = native.concatenate(form(image), form(skip)), torch.cat([image, skip], dim=1)
    assert isinstance(beside, VirtualConcatenation) and beside.shape == together.shape
    norm, parameters, projection = GroupNorm("norm", 64, 4, 1e-5), affine(64), affine(16, 64, 1, 1)
    expected = torch_ops.group_norm(together, parameters, norm, True)
    assert relative_error(native.group_norm(beside, parameters, norm, True), expected) < CLOSE
    assert relative_error(native.pointwise(beside, projection), torch_ops.pointwise(together, projection)) < CLOSE


@grid(kind=list(product([(1, 32), (1, 20), (2, 32)], [False, True])), form=list(FORMATS), biased=[True, False])
def test_convolution(native: TritonOperators, kind: tuple[tuple[int, int], bool], form: str, biased: bool) -> None:
    (stride, channels), circular = kind
    shape = Convolution("convolution", 12, channels, 3, stride, 1, circular)
    image, weights = random(2, 12, 7, 6), affine(channels, 12, 3, 3, biased=biased)
    expected = torch_ops.convolution(image, weights, shape)
    given = FORMATS[form](image)
    assert relative_error(native.convolution(given, weights, shape), expected) < CLOSE
    arranged = Affine(weights.weight.contiguous(memory_format=torch.channels_last), weights.bias)
    assert relative_error(native.convolution(given, arranged, shape), expected) < CLOSE


def test_tokens_may_be_slices_and_transposed(native: TritonOperators) -> None:
    tokens, hidden = random(24, 14, 2).permute(2, 1, 0)[:, 3:10], random(2, 7, 96)[..., ::2]
    norm, parameters, out = LayerNorm("norm", 24, 1e-5), affine(24), affine(24, 48)
    outputs = []
    for ops in (native, torch_ops):
        stream, first = ops.layer_norm(Stream(tokens.clone()), parameters, norm, out)
        # Two additions between the norms, and one after the last.
        stream = ops.add_linear(ops.add_linear(stream, hidden, out), hidden, out)
        stream, second = ops.layer_norm(stream, parameters, norm, out)
        outputs.append((first, second, ops.materialize(ops.add_linear(stream, hidden, out)), ops.geglu(tokens, out)))
    for ours, expected in zip(*outputs, strict=True):
        assert relative_error(ours, expected) < CLOSE


@pytest.mark.parametrize("channels", [64, 40], ids=str)
def test_a_norm_uses_what_was_measured_when_its_image_was_made(native: TritonOperators, channels: int) -> None:
    """Also where one of two images was measured, and where they were cut into different strips."""
    norm, wide = GroupNorm("norm", channels, 4, 1e-5), GroupNorm("norm", channels + 24, 4, 1e-5)
    image = native.residual_add(random(2, channels, 17, 19) + 3, random(2, channels, 17, 19), random(channels))
    skip = native.convolution(random(2, 8, 17, 19), affine(32, 8, 3, 3), Convolution("c", 8, 32, 3, 1, 1, False))
    skip = skip[:, :24]
    for given in (image, native.concatenate(image, skip), native.concatenate(skip, image)):
        used, together = (norm, image) if given is image else (wide, torch.cat([*given], dim=1))
        parameters = affine(used.channels)
        expected = torch_ops.group_norm(together, parameters, used, True)
        assert relative_error(native.group_norm(given, parameters, used, True), expected) < CLOSE


@pytest.mark.parametrize("keys", [1, 77, 154, 300])
def test_attention_to_few_keys_is_ours_and_exact(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = []

    def others(query: Tensor, key: Tensor, value: Tensor, upcast: bool) -> Tensor:
        library.append(upcast)
        return torch_ops.attention(query, key, value, upcast)

    native = TritonOperators(attention=others)
    given = [part.half() for part in random_inputs((2, 3, 50, 64), (2, 3, keys, 64), torch.float32, DEVICE)]
    for upcast in (False, True):
        exact = torch_ops.attention(*(part.double() for part in given), False)
        assert relative_error(native.attention(*given, upcast).double(), exact) < 1e-3
    assert library == ([True] if keys <= 256 else [False, True])
    native.attention(*(part.float() for part in given), False)
    assert library[-1] is False, "sums of float32 are left to torch"
