"""Z-Image on a real GPU: our kernels and graphs against the module's own forward."""
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

import lib_onediff.hosts.forge.lumina  # noqa: F401 (it hands in the reader)
from lib_onediff.core.settings import Settings
from lib_onediff.families.z_image.call import ZImageCall, joined_prompts
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime", "exact_products")]
STAND_INS = Path(__file__).parents[1] / "contract" / "stand_ins"
GPU = torch.device("cuda")
CONTEXT_WIDTH = 2560
MULTIPLE = 32
# Of our error to the host's own. FP8 and INT8: of the output.
WORST_RATIO = 1.1
NEAR = {"fp8": 0.12, "int8": 0.05}
# Two blocks and a refiner of the image, with four layers each.
LOW_BIT_LAYERS = 12
SIZES = [(64, 64, 2, 77), (33, 50, 1, 601)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a network of the real width with two blocks, in a type."""
    for folder in ("webui", "forge", "neo"):
        monkeypatch.syspath_prepend(str(STAND_INS / folder))
    code = import_module("backend.nn.lumina")

    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(GPU):
            network = code.NextDiT(
                16, 3840, 30, 30, CONTEXT_WIDTH, [32, 48, 48], z_image_modulation=True, time_scale=1000.0,
                pad_tokens_multiple=MULTIPLE,
            )
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        network.x_pad_token.normal_()
        network.cap_pad_token.normal_()
        return network.to(dtype)

    yield made
    runtime.configure(Settings())
    runtime.release_all()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("backend", "stand_in_engine")]:
        del sys.modules[name]


def inputs(dtype: torch.dtype, height: int, width: int, batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    latent = torch.randn(batch, 16, height, width, device=GPU, dtype=dtype)
    context = torch.randn(batch, tokens, CONTEXT_WIDTH, device=GPU, dtype=dtype)
    return latent, torch.full((batch,), 0.6, device=GPU), context


@torch.inference_mode()
def served(network: nn.Module, given: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    """The last of three calls, which is replayed."""
    runtime.configure(Settings(**options))
    runtime.adopt(network)
    latent, timestep, context = given
    call = ZImageCall(latent, timestep, *joined_prompts(list(context), MULTIPLE))
    for _ in range(3):
        output = runtime.run(network, call, lambda: network(*given))
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
    assert last_call()["lossy"] == "8-bit" and last_call()["low_bit_layers"] == LOW_BIT_LAYERS
    assert 1e-4 < relative_error(output, expected) < NEAR[option]
