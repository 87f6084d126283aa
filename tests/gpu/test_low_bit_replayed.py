"""Low-bit on a real GPU: whole UNets by graphs, weights that change under them, and memory that comes back."""
from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

from gpu_calls import arguments, host

from lib_onediff import compile_unet, sampling, status
from lib_onediff.bench.models import random_unet
from lib_onediff.devices.cuda.graphs.capture import CudaGraphs
from lib_onediff.devices.cuda.low_bit.gains import WORTH_ROUNDING
from lib_onediff.families.registry import FAMILIES
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import low_bit
from lib_onediff.weights.low_bit import KINDS

pytestmark = pytest.mark.gpu
NEAR = {"fp8": 0.12, "int8": 5e-2, "auto": 0.12}


@pytest.fixture(autouse=True)
def every_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The networks are small, and all of their products are done in eight bits nevertheless."""
    runtime.purge()
    monkeypatch.setattr(low_bit, "FEWEST_WEIGHTS", 0)
    ours = runtime.devices.lossy.low_bit
    ours.forget()
    # By turns, where there are several kinds.
    monkeypatch.setattr(ours.choice, "_best", lambda product, dtype, kinds: kinds[product.out // 32 % len(kinds)])
    monkeypatch.setattr(ours.choice, "gains", lambda product, dtype, kind: 1.0)
    yield
    runtime.free_graphs()
    ours.forget()


@pytest.fixture
def unet() -> nn.Module:
    return random_unet("tiny-sdxl", torch.device("cuda")).half()


@torch.no_grad()
def replayed(unet: nn.Module, given: dict[str, Any], option: str) -> Tensor:
    for _ in range(3):
        output = unet(**given, return_dict=False)[0]
    assert (status()["lossy"], status()["route"]) == ("8-bit", "graph"), status()["reason"]
    return output


def test_what_python_takes_to_launch_is_no_part_of_a_time() -> None:
    numbers = torch.ones(1 << 24, device="cuda")

    def work(seconds: float) -> None:
        time.sleep(seconds)
        numbers.mul_(1.0)

    device, graphs = numbers.device, CudaGraphs(FAMILIES.output)
    fast, slow = (graphs.time_ms(device, torch.float16, partial(work, seconds)) for seconds in (0, 0.01))
    assert 0 < fast < 5 and slow < 2 * fast + 0.1


@pytest.mark.parametrize("size", [(128, 128), (120, 72)], ids=str)
def test_a_replay_is_near_the_hosts(unet: nn.Module, option: str, size: tuple[int, int]) -> None:
    compile_unet(unet, low_bit=option)
    given = arguments(unet, *size)
    expected = host(unet, given)
    error = relative_error(replayed(unet, given, option), expected)
    assert 1e-4 < error < NEAR[option]
    assert runtime.totals().low_bit > 0


def test_an_edit_reaches_the_graph(unet: nn.Module, option: str) -> None:
    compile_unet(unet, low_bit=option)
    given = arguments(unet)
    with sampling(unet), torch.no_grad():
        before = replayed(unet, given, option)
        for name, parameter in unet.named_parameters():
            if "attn1" in name or "ff.net" in name:
                parameter.mul_(0.5)
        expected = host(unet, given)
        after = unet(**given, return_dict=False)[0]
    assert (status()["lossy"], status()["route"]) == ("8-bit", "graph"), "the same graph"
    assert relative_error(before, expected) > 2 * relative_error(after, expected)
    assert relative_error(after, expected) < NEAR[option]


def test_off_and_on_again(unet: nn.Module, option: str) -> None:
    compile_unet(unet, low_bit=option)
    given = arguments(unet)
    expected = host(unet, given)
    replayed(unet, given, option)
    with runtime.settings_for_run(Settings()), torch.no_grad():
        exact = [unet(**given, return_dict=False)[0] for _ in range(3)][-1]
        assert (status()["lossy"], status()["route"]) == ("", "graph"), status()["reason"]
        assert runtime.totals().low_bit == 0
    assert relative_error(exact, expected) < 1e-2
    assert relative_error(replayed(unet, given, option), expected) < NEAR[option]


def test_what_gains_is_measured_before_the_first_use(
    unet: nn.Module, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(low_bit, "FEWEST_WEIGHTS", 0)
    runtime.tuning_cache.clear()
    runtime.devices.measure_anew()
    compile_unet(unet, low_bit=option)
    given = arguments(unet)
    expected = host(unet, given)
    with torch.no_grad():
        outputs = [unet(**given, return_dict=False)[0] for _ in range(4)]
    assert all(relative_error(output, expected) < NEAR[option] for output in outputs)
    lossy, reason = status()["lossy"], status()["reason"]
    names = tuple(f"{kind.name} product" for kind in KINDS if option in (kind.name, "auto"))
    measured = [times for name, times in runtime.tuning_cache._values.items() if name.startswith(names)]
    assert measured
    # So small products mostly gain nothing; what a busy or cold GPU says is what counts.
    gains = [plain - rounded for plain, rounded in measured if rounded < WORTH_ROUNDING * plain]
    assert lossy == ("" if "(measured)" in reason else "8-bit")
    assert gains or not lossy, (measured, reason)
