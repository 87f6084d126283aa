"""FP8 on a real GPU: whole UNets by graphs, weights that change under them, and memory that comes back."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

from gpu_calls import arguments, host

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.bench.models import random_unet
from lib_onediff.model import float8
from lib_onediff.ops.quantized.gains import WORTH_ROUNDING
from lib_onediff.ops.quantized.scaled_mm import support
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
NEAR = 0.12


@pytest.fixture(autouse=True)
def every_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The networks are small, and all of their products are done in float8 nevertheless."""
    lack = support(torch.device("cuda"), torch.float16).reason
    if lack:
        pytest.skip(lack)
    runtime.purge()
    monkeypatch.setattr(float8, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(runtime.operators, "_float8_looked_at", ())
    monkeypatch.setattr(runtime.operators.float8, "pays", lambda product, dtype: True)
    monkeypatch.setattr(runtime.operators.float8, "gains", lambda product, dtype: 1.0)
    yield
    runtime.free_graphs()


@pytest.fixture
def unet() -> nn.Module:
    return random_unet("tiny-sdxl", torch.device("cuda")).half()


@torch.no_grad()
def replayed(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    for _ in range(3):
        output = unet(**given, return_dict=False)[0]
    assert (status()["backend"], status()["route"]) == ("native fp8", "graph"), status()["reason"]
    return output


@pytest.mark.parametrize("size", [(128, 128), (120, 72)], ids=str)
def test_a_replay_is_near_the_hosts(unet: nn.Module, size: tuple[int, int]) -> None:
    compile_unet(unet, fp8=True)
    given = arguments(unet, *size)
    expected = host(unet, given)
    error = relative_error(replayed(unet, given), expected)
    assert 1e-3 < error < NEAR
    assert runtime.totals().float8 > 0


def test_an_edit_reaches_the_graph(unet: nn.Module) -> None:
    compile_unet(unet, fp8=True)
    given = arguments(unet)
    before = replayed(unet, given)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "attn1" in name or "ff.net" in name:
                parameter.mul_(0.5)
    expected = host(unet, given)
    with torch.no_grad():
        after = unet(**given, return_dict=False)[0]
    assert (status()["backend"], status()["route"]) == ("native fp8", "graph"), "the same graph"
    assert relative_error(before, expected) > 2 * relative_error(after, expected)
    assert relative_error(after, expected) < NEAR


def test_off_and_on_again(unet: nn.Module) -> None:
    compile_unet(unet, fp8=True)
    given = arguments(unet)
    expected = host(unet, given)
    replayed(unet, given)
    with runtime.settings_for_run(Settings()), torch.no_grad():
        exact = [unet(**given, return_dict=False)[0] for _ in range(3)][-1]
        assert (status()["backend"], status()["route"]) == ("native", "graph"), status()["reason"]
        assert runtime.totals().float8 == 0
    assert relative_error(exact, expected) < 1e-2
    assert relative_error(replayed(unet, given), expected) < NEAR


def test_nothing_is_left_behind(unet: nn.Module) -> None:
    names = {name: parameter.clone() for name, parameter in unet.named_parameters()}
    compile_unet(unet, fp8=True)
    replayed(unet, arguments(unet))
    uncompile_unet(unet)
    assert runtime.totals().float8 == 0
    assert all(torch.equal(parameter, names[name]) for name, parameter in unet.named_parameters())


def test_what_gains_is_measured_before_the_capture(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(float8, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(runtime.operators, "_float8_looked_at", ())
    runtime.tuning_cache.clear()
    compile_unet(unet, fp8=True)
    given = arguments(unet)
    expected = host(unet, given)
    with torch.no_grad():
        outputs = [unet(**given, return_dict=False)[0] for _ in range(4)]
    assert all(relative_error(output, expected) < NEAR for output in outputs)
    measured = [times for name, times in runtime.tuning_cache._values.items() if name.startswith("float8 product")]
    assert measured
    # So small products mostly gain nothing; what a busy or cold GPU says is what counts.
    gains = [plain - float8 for plain, float8 in measured if float8 < WORTH_ROUNDING * plain]
    backend, reason = status()["backend"], status()["reason"]
    assert backend == ("native fp8" if "(measured)" not in reason else "native")
    assert gains or backend == "native", (measured, reason)
