"""On a real GPU: the switches of precision do what we say of them, and no decode ends in a black picture."""
from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

pytest.importorskip("diffusers")

from lib_onediff.bench.models import random_vae
from lib_onediff.core.precision import HALF_SUMS, SWITCHES, TF32_CONVOLUTION, TF32_MATMUL, Flags, applied
from lib_onediff.core.settings import Settings
from lib_onediff.hosts.diffusers import vae as diffusers_decoder
from lib_onediff.runtime.runtime import runtime
from lib_onediff.ui.effects import why_no_effect

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
STEP = 1 / 255


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    before = runtime.settings
    states = {name: switch.state() for name, switch in SWITCHES.items() if switch.read() is not None}
    runtime.purge()
    runtime.tuning_cache.clear()
    yield
    runtime.configure(before)
    runtime.purge()
    runtime.tuning_cache.clear()
    assert {name: SWITCHES[name].state() for name in states} == states, "a switch was left as we had set it"


def has(switch: str) -> None:
    if SWITCHES[switch].read() is None:
        pytest.skip(f"this PyTorch has no switch for {switch}")


def since(major: int, minor: int) -> None:
    if torch.cuda.get_device_capability() < (major, minor):
        pytest.skip(f"needs compute capability {major}.{minor}")


def error(work: Callable[[], Tensor], exact: Tensor, flags: Flags) -> float:
    with applied(flags):
        found = work()
    return float((found.double() - exact).norm() / exact.norm())


# --- what the switches do ---------------------------------------------------------------------------------------------


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda a, b: a @ b.t(),
    "linear": functional.linear,
    "baddbmm": lambda a, b: torch.baddbmm(a.new_zeros(1, len(a), len(b)), a[None], b.t()[None])[0],
}


@pytest.mark.parametrize("operator", PRODUCTS)
def test_half_sums_are_sums_of_half(operator: str) -> None:
    has(HALF_SUMS)
    since(7, 0)
    work = PRODUCTS[operator]
    a, b = (torch.rand(512, 8192, device=GPU).half() for _ in range(2))
    exact = a.double() @ b.double().t()
    on, off = (error(lambda: work(a, b), exact, ((HALF_SUMS, value),)) for value in (True, False))
    print(f"{operator}: relative error {on:.1e} with half sums, {off:.1e} without, {torch.cuda.get_device_name()}")
    assert off < 5e-4, "float32 sums, rounded once"
    assert on > 1.5 * off, "cuBLAS took no notice: then why_no_effect must say so of this GPU"
    assert why_no_effect("matmul_accumulation", "half") is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_convolutions_sum_in_float32_whatever_is_set(layout: torch.memory_format) -> None:
    """Which is why the choice for them is said to have no effect."""
    image, weight = torch.rand(1, 512, 32, 32, device=GPU).half(), torch.rand(64, 512, 3, 3, device=GPU).half()
    image, weight = (tensor.contiguous(memory_format=layout) for tensor in (image, weight))
    exact = functional.conv2d(image.double(), weight.double(), padding=1)
    switches = [HALF_SUMS] if SWITCHES[HALF_SUMS].read() is not None else []
    for value in (True, False):
        work = lambda: functional.conv2d(image, weight, padding=1)  # noqa: E731
        assert error(work, exact, tuple((switch, value) for switch in switches)) < 5e-4
    assert why_no_effect("convolution_accumulation", "half") is not None


@pytest.mark.parametrize(("switch", "work"), [
    (TF32_MATMUL, lambda a, b: a @ b.t()),
    (TF32_CONVOLUTION, lambda a, b: functional.conv2d(a.view(1, 256, 32, 32), b.view(256, 256, 3, 3))),
])
def test_tf32(switch: str, work: Any) -> None:
    since(8, 0)
    size = {TF32_MATMUL: ((512, 1024), (512, 1024)), TF32_CONVOLUTION: ((256, 1024), (256, 2304))}[switch]
    a, b = (torch.randn(*shape, device=GPU) for shape in size)
    exact = work(a.double(), b.double())
    on, off = (error(lambda: work(a, b), exact, ((switch, value),)) for value in (True, False))
    assert on > 20 * off and off < 1e-5, (on, off)


# --- the VAE ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def vae() -> Iterator[Any]:
    vae = random_vae(False, GPU).half()
    yield vae
    diffusers_decoder.detach(vae.decoder)


def make_it_overflow(decoder: nn.Module, latent: Tensor, share: float) -> None:
    """Its activations reach a share of float16's limit; norms make its picture what it was."""
    peaks: list[Tensor] = []
    wide = copy.deepcopy(decoder).float()
    hooks = [
        module.register_forward_hook(lambda module, given, output: peaks.append(output.abs().max()))
        for module in wide.modules() if type(module).__name__ in ("Conv2d", "ResnetBlock2D")
    ]
    with torch.no_grad():
        wide(latent.float())
        for hook in hooks:
            hook.remove()
        largest = float(torch.stack(peaks).max())
        decoder.conv_in.weight *= share * torch.finfo(torch.float16).max / largest
        decoder.conv_in.bias *= share * torch.finfo(torch.float16).max / largest
    assert all(bool(parameter.isfinite().all()) for parameter in decoder.parameters())


def shown(picture: Tensor) -> Tensor:
    return (picture.float() / 2 + 0.5).clamp(0, 1)


def test_a_vae_that_overflows(vae: Any, caplog: pytest.LogCaptureFixture) -> None:
    latent = torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0)).to(GPU).half()
    make_it_overflow(vae.decoder, latent, 4)
    with torch.no_grad():
        expected = copy.deepcopy(vae.decoder).float()(latent.float())
        assert not type(vae.decoder).forward(vae.decoder, latent).isfinite().all()
    diffusers_decoder.attach(vae.decoder, Settings())
    with caplog.at_level(logging.WARNING, "onediff"), torch.no_grad():
        pictures = [vae.decoder(latent) for _ in range(2)]
    for picture in pictures:
        assert picture.dtype == torch.float16 and (shown(picture) - shown(expected)).abs().max() <= STEP
    assert len(caplog.messages) == 1 and "overflows in float16" in caplog.messages[0]
    assert runtime.vae.status()["reason"] == "decoded in float32, because this VAE overflows in float16"
    assert {parameter.dtype for parameter in vae.parameters()} == {torch.float16}
