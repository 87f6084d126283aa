"""Transformers on a real GPU: our kernels and graphs against the network's own forward."""
from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from gpu_calls import last_call
from torch import Tensor, nn

import lib_onediff
import lib_onediff.hosts.forge.networks
from lib_onediff.core.call import Call
from lib_onediff.core.settings import Settings
from lib_onediff.families.anima.call import AnimaCall
from lib_onediff.families.anima.family import FEWEST_TOKENS
from lib_onediff.families.krea2.call import Krea2Call, filled_prompt
from lib_onediff.families.z_image.call import ZImageCall, joined_prompts
from lib_onediff.runtime.runtime import runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime", "exact_products")]
STAND_INS = Path(__file__).parents[1] / "contract" / "stand_ins"
GPU = torch.device("cuda")
CHANNELS = 16
# The largest ratio of our error to the host's own. FP8 and INT8: the error of the output.
WORST_RATIO = 1.1
NEAR = {"fp8": 0.12, "int8": 0.05}
# Height, width and batch of the latent, and the prompt's tokens.
SIZES = [(64, 64, 2, 77), (33, 50, 1, 601)]
MULTIPLE = 32
TEXT_WIDTH = 2560
Inputs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class NeosNetwork:
    """A network of Forge Neo, of its real width, with two blocks.

    code, name: the Python module and the name of its class. new: a function of the class that makes the network.
    context_width: the values of a token of the prompt. call_of: makes our call of latent, timestep and context.
    low_bit_layers: how many layers of the network may be in 8 bits. has_images: whether the latent has a dimension of
    frames. fewest_tokens: the fewest tokens of a prompt. random: the endings of the names of parameters that the class
    leaves at zero. deviation: the standard deviation of the normal distribution that these parameters are drawn from.
    """

    code: str
    name: str
    new: Callable[[Any], nn.Module]
    context_width: int
    call_of: Callable[[Tensor, Tensor, Tensor], Call]
    low_bit_layers: int
    has_images: bool = True
    fewest_tokens: int = 1
    random: tuple[str, ...] = ()
    deviation: float = 0.1

    def made(self, dtype: torch.dtype) -> nn.Module:
        """A new network with random parameters in this dtype."""
        torch.manual_seed(0)
        with torch.device(GPU):
            network = self.new(getattr(import_module(self.code), self.name))
        return with_random_parameters(network, self.random, self.deviation).to(dtype)

    def inputs(self, dtype: torch.dtype, height: int, width: int, batch: int, tokens: int) -> Inputs:
        """Latent, timestep and context."""
        torch.manual_seed(1)
        images = (1,) if self.has_images else ()
        latent = torch.randn(batch, CHANNELS, *images, height, width, device=GPU, dtype=dtype)
        tokens = max(tokens, self.fewest_tokens)
        context = torch.randn(batch, tokens, self.context_width, device=GPU, dtype=dtype)
        return latent, torch.full((batch,), 0.6, device=GPU), context


def with_random_parameters(network: nn.Module, endings: tuple[str, ...], deviation: float) -> nn.Module:
    """The network with random numbers in the parameters whose names end so."""
    for name, parameter in network.requires_grad_(False).named_parameters():
        if name.endswith(endings):
            parameter.normal_(std=deviation)
    return network


def new_anima(kind: Any) -> nn.Module:
    network: nn.Module = kind(CHANNELS, 2048, 1024, 16, 256, 2)
    return network


def new_krea2(kind: Any) -> nn.Module:
    network: nn.Module = kind(
        features=6144, heads=48, kvheads=12, layers=2, channels=CHANNELS, txtdim=TEXT_WIDTH, txtheads=20, inner=16384,
        tdim=256,
    )
    return network


def new_z_image(kind: Any) -> nn.Module:
    network: nn.Module = kind(
        CHANNELS, 3840, 30, 30, TEXT_WIDTH, [32, 48, 48], z_image_modulation=True, time_scale=1000.0,
        pad_tokens_multiple=MULTIPLE,
    )
    return network


def krea2_call(latent: Tensor, timestep: Tensor, context: Tensor) -> Krea2Call:
    return Krea2Call(latent, timestep, *filled_prompt(context))


def z_image_call(latent: Tensor, timestep: Tensor, context: Tensor) -> ZImageCall:
    return ZImageCall(latent, timestep, *joined_prompts(list(context), MULTIPLE))


NETWORKS = (
    NeosNetwork(
        "backend.nn.anima", "Anima", new_anima, 1024, AnimaCall, low_bit_layers=12, fewest_tokens=FEWEST_TOKENS,
    ),
    NeosNetwork(
        "backend.nn.krea", "SingleStreamDiT", new_krea2, 12 * TEXT_WIDTH, krea2_call, low_bit_layers=8,
        random=(".scale", ".lin"),
    ),
    # Two blocks and a refiner of the image, with four layers each.
    NeosNetwork(
        "backend.nn.lumina", "NextDiT", new_z_image, TEXT_WIDTH, z_image_call, low_bit_layers=12, has_images=False,
        random=("pad_token",), deviation=1.0,
    ),
)


@pytest.fixture(params=NETWORKS, ids=lambda one: one.name)
def kind(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[NeosNetwork]:
    for folder in ("webui", "forge", "neo"):
        monkeypatch.syspath_prepend(str(STAND_INS / folder))
    yield request.param
    runtime.configure(Settings())
    runtime.release_all()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("backend", "stand_in_engine")]:
        del sys.modules[name]


@torch.inference_mode()
def served(kind: NeosNetwork, network: nn.Module, given: Inputs, **options: Any) -> Tensor:
    """The output of the third call, which is replayed."""
    runtime.configure(Settings(**options))
    runtime.adopt(network)
    for _ in range(3):
        output = runtime.run(network, kind.call_of(*given), lambda: network(*given))
    assert (last_call()["backend"], last_call()["route"]) == ("native", "graph"), last_call()["reason"]
    return output


@torch.inference_mode()
def exact(network: nn.Module, given: Inputs) -> Tensor:
    """The host's output in float32."""
    output: Tensor = copy.deepcopy(network).float()(*(tensor.float() for tensor in given))
    return output


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_error_in_half_precision_is_not_above_that_of_the_host(
    kind: NeosNetwork, dtype: torch.dtype, size: tuple[int, int, int, int]
) -> None:
    """Both errors are against the network's own forward in float32; the host's error is that of the own forward in half
    precision. Ours may be a tenth larger. size: height, width and batch of the latent, and the prompt's tokens."""
    network = kind.made(dtype)
    given = kind.inputs(dtype, *size)
    expected = exact(network, given)
    with torch.inference_mode():
        host = relative_error(network(*given), expected)
    assert relative_error(served(kind, network, given), expected) < WORST_RATIO * host


@pytest.mark.parametrize("option", list(NEAR))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_with_low_bit_the_error_against_the_own_forward_in_float32_is_limited(
    kind: NeosNetwork, dtype: torch.dtype, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """option: the setting of Low-bit. NEAR: the largest relative error. All layers that may be in 8 bits are, though a
    measurement would choose fewer; the output differs from an exact one."""
    ours = runtime.devices.lossy.low_bit
    if ours.why_not(option, GPU, dtype) is not None:
        pytest.skip("this GPU has none")
    monkeypatch.setattr(ours, "_best", lambda product, dtype, kinds: kinds[0])
    monkeypatch.setattr(ours, "gains", lambda product, dtype, kind: 1.0)
    network = kind.made(dtype)
    given = kind.inputs(dtype, *SIZES[0])
    expected = exact(network, given)
    output = served(kind, network, given, low_bit=option, low_bit_budget=NEAR["fp8"])
    assert last_call()["lossy"] == "8-bit" and last_call()["low_bit_layers"] == kind.low_bit_layers
    assert 1e-4 < relative_error(output, expected) < NEAR[option]


@torch.inference_mode()
def test_our_error_in_krea2_with_a_mask_and_float32_norms_is_not_above_that_of_diffusers() -> None:
    """diffusers' Krea2Transformer2DModel in bfloat16; the mask leaves out 24 of the prompt's 64 tokens. Errors are
    against diffusers' output in float32 (expected). Ours may be a tenth larger than that of diffusers in bfloat16."""
    code = pytest.importorskip("diffusers.models.transformers.transformer_krea2", reason="needs diffusers 0.41")
    with torch.inference_mode(False):
        torch.manual_seed(0)
        with torch.device(GPU):
            network = code.Krea2Transformer2DModel(num_layers=2)
        tables = "norm1.weight", "norm2.weight", "norm_q.weight", "norm_k.weight", "norm.weight", "scale_shift_table"
        with_random_parameters(network, tables, deviation=0.1).bfloat16()
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
