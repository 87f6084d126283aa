"""The image kernels against torch: on a GPU compiled, without one under Triton's interpreter."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as functional
from exact_operators import worst_error
from grid import ends, grid, name_of
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.ops.triton.images import add, resize
from lib_onediff.ops.triton.launch_config import ADDITION, MEASURED_ADDITION, LaunchConfig
from lib_onediff.ops.triton.partial_statistics import add_and_measure

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# In units of a half type's rounding: to the nearest. Triton's interpreter cuts bfloat16 off instead.
NEAREST = {torch.float16: 0.51, torch.bfloat16: 0.51 if DEVICE.type == "cuda" else 1.01}
SHAPES = [(2, 48, 5, 7), (1, 320, 3, 3), (3, 33, 1, 1), (1, 64, 13, 10), (1, 130, 8, 8)]


def random_image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype).to(memory_format=torch.channels_last)


KERNELS = {add: ADDITION, add_and_measure: MEASURED_ADDITION}


def sum_of(
    added: Callable[..., object], image: Tensor, update: Tensor, bias: Tensor | None, *config: LaunchConfig
) -> Tensor:
    output = torch.full_like(update, torch.nan)
    added(image, update, bias, output, *config)
    return output


@grid(shape=SHAPES, biased=[True, False], added=list(KERNELS))
def test_additions(shape: tuple[int, ...], biased: bool, added: Callable[..., object]) -> None:
    image, update = random_image(*shape), random_image(*shape)
    bias = torch.randn(shape[1], device=DEVICE) if biased else None
    before = image.clone(), update.clone()
    output = sum_of(added, image, update, bias)
    assert torch.equal(image, before[0]) and torch.equal(update, before[1]), "an input is not written to"
    exact = image.double() + update.double() + (0 if bias is None else bias.double()[:, None, None])
    assert worst_error(output, exact) < 2


@grid(shape=SHAPES, added=list(KERNELS))
def test_a_bias_is_added_in_place(shape: tuple[int, ...], added: Callable[..., object]) -> None:
    image, bias = random_image(*shape), torch.randn(shape[1], device=DEVICE)
    expected = image + bias[:, None, None]
    added(None, image, bias, image)
    assert torch.equal(image, expected)


@pytest.mark.parametrize(
    ("added", "config"),
    [(added, config) for added, kernel in KERNELS.items() for config in ends(kernel.candidates)], ids=name_of,
)
def test_every_cut_of_an_addition_gives_the_same(added: Callable[..., object], config: LaunchConfig) -> None:
    image, update, bias = random_image(1, 72, 5, 27), random_image(1, 72, 5, 27), torch.randn(72, device=DEVICE)
    assert torch.equal(sum_of(added, image, update, bias, config), sum_of(add, image, update, bias))
    expected = image + bias[:, None, None]
    added(None, image, bias, image, config)
    assert torch.equal(image, expected)


@grid(dtype=list(NEAREST), added=list(KERNELS))
def test_additions_in_half_precision_are_rounded_once(dtype: torch.dtype, added: Callable[..., object]) -> None:
    image, update = random_image(2, 48, 5, 7, dtype=dtype), random_image(2, 48, 5, 7, dtype=dtype)
    bias = torch.randn(48).to(DEVICE, dtype)
    exact = image.double() + update.double() + bias.double()[:, None, None]
    assert worst_error(sum_of(added, image, update, bias), exact) <= NEAREST[dtype]


@pytest.mark.parametrize(
    ("old", "new"),
    [((5, 7), (10, 14)), ((23, 30), (45, 60)), ((9, 11), (17, 22)), ((10, 12), (9, 11)), ((4, 4), (9, 3)),
     ((1, 1), (3, 2)), ((8, 8), (8, 8))],
    ids=str,
)
def test_resize_is_torchs_nearest(old: tuple[int, int], new: tuple[int, int]) -> None:
    image = random_image(2, 33, *old)
    output = resize(image, *new)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(output, functional.interpolate(image, size=new, mode="nearest"))


def rounds_otherwise(old: int, new: int) -> bool:
    """Whether float32 and whole numbers find another old pixel for some new one."""
    scale = torch.tensor(old / new, dtype=torch.float32)
    places = torch.arange(new)
    return bool(((places * scale).long() != places * old // new).any())


def test_resize_rounds_as_torch_does_where_that_is_not_exact() -> None:
    sizes = [(old, new) for old in (6, 12, 24) for new in range(60, 160) if rounds_otherwise(old, new)]
    assert len(sizes) > 10, sizes
    for old, new in sizes:
        image = random_image(1, 1, 1, old)
        expected = functional.interpolate(image, size=(1, new), mode="nearest")
        assert torch.equal(resize(image, 1, new), expected), (old, new)


@pytest.mark.parametrize("dtype", NEAREST, ids=str)
def test_resize_copies_values_of_any_precision(dtype: torch.dtype) -> None:
    image = random_image(1, 33, 3, 5, dtype=dtype)
    expected = functional.interpolate(image.float(), size=(5, 9), mode="nearest").to(dtype)
    assert torch.equal(resize(image, 5, 9), expected)
