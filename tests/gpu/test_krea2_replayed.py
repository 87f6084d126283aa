"""Krea 2 on a real GPU: our kernels and graphs against the module's own forward."""
from __future__ import annotations

import copy
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

import lib_onediff
from lib_onediff.core.settings import Settings
from lib_onediff.families.krea2.call import Krea2Call, filled_prompt
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime", "exact_products")]
STAND_INS = Path(__file__).parents[1] / "contract" / "stand_ins"
GPU = torch.device("cuda")
# Of our error to the host's own. FP8 and INT8: of the output.
WORST_RATIO = 1.1
NEAR = {"fp8": 0.12, "int8": 0.05}
SIZES = [(64, 64, 2, 77), (33, 50, 1, 601)]
TEXT_WIDTH = 2560


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a network of the real width with two blocks, in a type."""
    for folder in ("webui", "forge", "neo"):
        monkeypatch.syspath_prepend(str(STAND_INS / folder))
    kind = import_module("backend.nn.krea").SingleStreamDiT

    def made(dtype: torch.dtype) -> nn.Module:
        with torch.device(GPU):
            network = kind(
                features=6144, heads=48, kvheads=12, layers=2, channels=16, txtdim=TEXT_WIDTH, txtheads=20, inner=16384,
                tdim=256,
            )
        return with_norms_and_tables(network).to(dtype)

    yield made
    runtime.configure(Settings())
    runtime.release_all()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("backend", "stand_in_engine")]:
        del sys.modules[name]


def with_norms_and_tables(network: nn.Module) -> nn.Module:
    """The network with random numbers in the parameters that its class leaves at zero."""
    torch.manual_seed(0)
    for name, parameter in network.requires_grad_(False).named_parameters():
        if "norm" in name or name.endswith((".lin", "scale_shift_table")):
            parameter.normal_(std=0.1)
    return network


def inputs(dtype: torch.dtype, height: int, width: int, batch: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    latent = torch.randn(batch, 16, 1, height, width, device=GPU, dtype=dtype)
    context = torch.randn(batch, tokens, 12 * TEXT_WIDTH, device=GPU, dtype=dtype)
    return latent, torch.full((batch,), 0.6, device=GPU), context


@torch.inference_mode()
def served(network: nn.Module, given: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    """The last of three calls, which is replayed."""
    runtime.configure(Settings(**options))
    runtime.adopt(network)
    latent, timestep, context = given
    for _ in range(3):
        call = Krea2Call(latent, timestep, *filled_prompt(context))
        output = runtime.run(network, call, lambda: network(*given))
    assert (last_call()["backend"], last_call()["route"]) == ("native", "graph"), last_call()["reason"]
    return output


@torch.inference_mode()
def exact(network: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    output: Tensor = copy.deepcopy(network).float()(*(tensor.float() for tensor in given))
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
    assert last_call()["lossy"] == "8-bit" and last_call()["low_bit_layers"] == 8
    assert 1e-4 < relative_error(output, expected) < NEAR[option]


@torch.inference_mode()
def test_diffusers_class_with_a_mask_and_norms_in_float32_is_as_exact() -> None:
    code = pytest.importorskip("diffusers.models.transformers.transformer_krea2", reason="needs diffusers 0.41")
    with torch.inference_mode(False):
        with torch.device(GPU):
            network = with_norms_and_tables(code.Krea2Transformer2DModel(num_layers=2)).bfloat16()
        for module in network.modules():
            if type(module).__name__ == "Krea2RMSNorm":
                module.float()
    rows, columns, tokens = 24, 40, 64
    torch.manual_seed(1)
    axes = torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float()
    wide = {
        "hidden_states": torch.randn(1, rows * columns, 64), "timestep": torch.full((1,), 0.6),
        "encoder_hidden_states": torch.randn(1, tokens, 12, TEXT_WIDTH),
        "position_ids": torch.cat([torch.zeros(tokens, 3), torch.cartesian_prod(*axes)]),
    }
    given = {name: tensor.to(GPU) for name, tensor in wide.items()}
    for name in ("hidden_states", "encoder_hidden_states"):
        given[name] = given[name].bfloat16()
    mask = torch.arange(tokens, device=GPU)[None] < 40
    floats = {name: tensor.float() for name, tensor in given.items()}
    expected = copy.deepcopy(network).float()(**floats, encoder_attention_mask=mask).sample
    host = relative_error(network(**given, encoder_attention_mask=mask).sample, expected)
    lib_onediff.compile_unet(network)
    for _ in range(3):
        output = network(**given, encoder_attention_mask=mask).sample
    assert (last_call()["backend"], last_call()["route"]) == ("native", "graph"), last_call()["reason"]
    assert relative_error(output, expected) < WORST_RATIO * host
