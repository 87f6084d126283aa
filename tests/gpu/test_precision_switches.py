"""The switches for precision have the documented effects on a real GPU."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from lib_onediff.core.precision import HALF_SUMS, SWITCHES, TF32_CONVOLUTION, TF32_MATMUL, Flags, applied
from lib_onediff.ui.effects import why_no_effect

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Check after each test that all switches are as before."""
    states = {name: switch.state() for name, switch in SWITCHES.items() if switch.read() is not None}
    yield
    assert {name: SWITCHES[name].state() for name in states} == states, "a switch was not restored"


def has(switch: str) -> None:
    """Skip the test if this PyTorch does not have the switch."""
    if SWITCHES[switch].read() is None:
        pytest.skip(f"this PyTorch has no switch for {switch}")


def since(major: int, minor: int) -> None:
    """Skip the test on a GPU with an older compute capability."""
    if torch.cuda.get_device_capability() < (major, minor):
        pytest.skip(f"needs compute capability {major}.{minor}")


def error(work: Callable[[], Tensor], exact: Tensor, flags: Flags) -> float:
    """The relative error of work() under these switches."""
    with applied(flags):
        found = work()
    return float((found.double() - exact).norm() / exact.norm())


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda a, b: a @ b.t(),
    "linear": functional.linear,
    "baddbmm": lambda a, b: torch.baddbmm(a.new_zeros(1, len(a), len(b)), a[None], b.t()[None])[0],
}


@pytest.mark.parametrize("operator", PRODUCTS)
def test_the_switch_for_float16_sums_has_an_effect(operator: str) -> None:
    """With the switch, the error against float64 is at least 1.5 times as large. The numbers are all positive, so that
    sums of 8192 products round visibly in float16. On a GPU where this fails, why_no_effect() must return a reason, and
    the settings tab shows it. operator: see PRODUCTS."""
    has(HALF_SUMS)
    since(7, 0)
    work = PRODUCTS[operator]
    a, b = (torch.rand(512, 8192, device=GPU).half() for _ in range(2))
    exact = a.double() @ b.double().t()
    on, off = (error(lambda: work(a, b), exact, ((HALF_SUMS, value),)) for value in (True, False))
    print(f"{operator}: relative error {on:.1e} with half sums, {off:.1e} without, {torch.cuda.get_device_name()}")
    assert off < 5e-4, "float32 sums, rounded once"
    assert on > 1.5 * off, "the switch had no effect: then why_no_effect must return a reason for this GPU"
    assert why_no_effect("accumulation", "half") is None


@pytest.mark.parametrize(("switch", "work"), [
    (TF32_MATMUL, lambda a, b: a @ b.t()),
    (TF32_CONVOLUTION, lambda a, b: functional.conv2d(a.view(1, 256, 32, 32), b.view(256, 256, 3, 3))),
])
def test_the_switches_for_tf32_have_an_effect(switch: str, work: Any) -> None:
    """TF32 keeps ten bits of each factor. With the switch, the relative error against float64 is more than 20 times as
    large as without it, where it is below 1e-5."""
    since(8, 0)
    size = {TF32_MATMUL: ((512, 1024), (512, 1024)), TF32_CONVOLUTION: ((256, 1024), (256, 2304))}[switch]
    a, b = (torch.randn(*shape, device=GPU) for shape in size)
    exact = work(a.double(), b.double())
    on, off = (error(lambda: work(a, b), exact, ((switch, value),)) for value in (True, False))
    assert on > 20 * off and off < 1e-5, (on, off)
