"""Low-bit on a real GPU: whole UNets by graphs, weights that change under them, and memory that comes back."""
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

from lib_onediff.bench.models import random_unet
from lib_onediff.options.settings import Settings
from lib_onediff.public import compile_unet, status
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import low_bit

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


@pytest.mark.parametrize("size", [(128, 128), (120, 72)], ids=str)
def test_a_replay_is_near_the_hosts(unet: nn.Module, option: str, size: tuple[int, int]) -> None:
    compile_unet(unet, low_bit=option)
    given = arguments(unet, *size)
    expected = host(unet, given)
    error = relative_error(replayed(unet, given, option), expected)
    assert 1e-4 < error < NEAR[option]
    assert runtime.totals().low_bit > 0
    with runtime.settings_for_run(Settings()), torch.no_grad():
        exact = [unet(**given, return_dict=False)[0] for _ in range(3)][-1]
        assert (status()["lossy"], status()["route"]) == ("", "graph"), status()["reason"]
        assert runtime.totals().low_bit == 0
    assert relative_error(exact, expected) < 1e-2
    assert relative_error(replayed(unet, given, option), expected) < NEAR[option]
