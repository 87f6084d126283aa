"""Anima on a real GPU: our kernels and graphs against the module's own forward."""
from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from gpu_calls import last_call
from torch import Tensor, nn

import lib_onediff.hosts.forge.anima  # noqa: F401 (it hands in the reader)
from lib_onediff.core.settings import Settings
from lib_onediff.families.anima.call import AnimaCall
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime", "exact_products")]
STAND_INS = Path(__file__).parents[1] / "contract" / "stand_ins"
GPU = torch.device("cuda")
# The largest ratio of our error to the host's own. FP8 and INT8: the error of the output.
WORST_RATIO = 1.1
NEAR = {"fp8": 0.12, "int8": 0.05}
SIZES = [(64, 64, 2, 512), (33, 50, 1, 601)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a network of the real width with two blocks, in a dtype."""
    for folder in ("webui", "forge", "neo"):
        monkeypatch.syspath_prepend(str(STAND_INS / folder))
    anima = import_module("backend.nn.anima").Anima

    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(GPU):
            network = anima(16, 2048, 1024, 16, 256, 2)
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        return network.to(dtype)

    yield made
    runtime.configure(Settings())
    runtime.release_all()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("backend", "stand_in_engine")]:
        del sys.modules[name]


def inputs(dtype: torch.dtype, height: int, width: int, batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    latent = torch.randn(batch, 16, 1, height, width, device=GPU, dtype=dtype)
    return latent, torch.full((batch,), 0.6, device=GPU), torch.randn(batch, tokens, 1024, device=GPU, dtype=dtype)


@torch.inference_mode()
def served(network: nn.Module, given: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    """The output of the third call, which is replayed."""
    runtime.configure(Settings(**options))
    runtime.adopt(network)
    for _ in range(3):
        output = runtime.run(network, AnimaCall(*given), lambda: network(*given))
    assert (last_call()["backend"], last_call()["route"]) == ("native", "graph"), last_call()["reason"]
    return output


@torch.inference_mode()
def exact(network: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    dtype = given[0].dtype
    output: Tensor = network.float()(*(tensor.float() for tensor in given))
    network.to(dtype)
    return output


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_is_as_exact_as_the_host(make: Any, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    network = make(dtype)
    given = inputs(dtype, *size)
    expected = exact(network, given)
    with torch.inference_mode():
        host = relative_error(network(*given), expected)
    assert relative_error(served(network, given), expected) < WORST_RATIO * host


@pytest.mark.parametrize("option", list(NEAR))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_eight_bits(make: Any, dtype: torch.dtype, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = runtime.devices.lossy.low_bit
    if ours.why_not(option, GPU, dtype) is not None:
        pytest.skip("this GPU has none")
    monkeypatch.setattr(ours, "_best", lambda product, dtype, kinds: kinds[0])
    monkeypatch.setattr(ours, "gains", lambda product, dtype, kind: 1.0)
    network = make(dtype)
    given = inputs(dtype, *SIZES[0])
    expected = exact(network, given)
    output = served(network, given, low_bit=option, low_bit_budget=NEAR["fp8"])
    assert last_call()["lossy"] == "8-bit" and last_call()["low_bit_layers"] == 12
    assert 1e-4 < relative_error(output, expected) < NEAR[option]
