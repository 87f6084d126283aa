"""torch.compile and OneDiff on one module, in any order: outputs stay close to those of the original forward, and
torch.compile never traces our code."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import SMALL, diffusers_unet, relative_error
from own_forward import own_forward
from test_public_api_pipelines import pipeline
from torch import Tensor, nn

from lib_onediff.hosts.diffusers.module_forward import attached
from lib_onediff.public import compile_pipe, compile_unet, status
from lib_onediff.runtime.runtime import runtime


class Traced:
    """A backend of torch.compile that runs a traced graph as it is, and counts its operators."""

    def __init__(self) -> None:
        self.operators = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.operators += sum(node.op.startswith("call_") for node in graph.graph.nodes)
        return graph.forward


@pytest.fixture
def traced() -> Iterator[Traced]:
    torch._dynamo.reset()
    yield Traced()
    torch._dynamo.reset()


def unet_inputs(side: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(side)
    latent = torch.randn(2, 4, side, side, generator=generator)
    return latent, torch.tensor(417.0), torch.randn(2, 77, SMALL["cross_attention_dim"], generator=generator)


def wrapped_first(unet: nn.Module, traced: Traced) -> Callable[..., Any]:
    return compile_unet(torch.compile(unet, backend=traced))


def in_place_first(unet: nn.Module, traced: Traced) -> Callable[..., Any]:
    unet.compile(backend=traced)
    return compile_unet(unet)


def wrapped_later(unet: nn.Module, traced: Traced) -> Callable[..., Any]:
    return torch.compile(compile_unet(unet), backend=traced)


def within_a_function(unet: nn.Module, traced: Traced) -> Callable[..., Any]:
    compile_unet(unet)
    return torch.compile(lambda *given: unet(*given), backend=traced)


@pytest.mark.parametrize("compiled", [wrapped_first, in_place_first, wrapped_later, within_a_function])
@torch.no_grad()
def test_onediff_computes_a_unet_that_torch_compile_also_compiles_and_nothing_is_traced(
    compiled: Callable[..., Any], traced: Traced
) -> None:
    """The output must be close to that of the original forward, and torch.compile must trace no operator at all.
    compiled: applies compile_unet() and, before or after it, torch.compile: to the module or to a function that calls
    it."""
    unet = diffusers_unet(**SMALL)
    call = compiled(unet, traced)
    for side in (8, 8, 10):
        given = unet_inputs(side)
        assert relative_error(call(*given).sample, own_forward(unet)(*given).sample) < 1e-5
        assert status()["route"] == "plain"
    assert traced.operators == 0 and runtime.guard.faults == []


@pytest.mark.parametrize("fullgraph", [False, True])
@torch.no_grad()
def test_torch_compile_traces_another_unet_of_the_class_as_without_onediff(fullgraph: bool, traced: Traced) -> None:
    """OneDiff replaces forward() in the class of a UNet, which also runs for UNets that were not passed to
    compile_unet(). fullgraph=True: torch.compile raises if there is code that it cannot trace."""
    ours = compile_unet(diffusers_unet(**SMALL))
    other = diffusers_unet(**SMALL)
    calls = status()["calls"]
    given = unet_inputs()
    compiled = torch.compile(other, backend=traced, fullgraph=fullgraph)
    assert relative_error(compiled(*given).sample, own_forward(other)(*given).sample) < 1e-5
    assert traced.operators > 100 and status()["calls"] == calls
    assert relative_error(ours(*given).sample, compiled(*given).sample) < 1e-5 and status()["route"] == "plain"


@torch.no_grad()
def test_with_fullgraph_torch_compile_compiles_the_original_forward_and_logs_a_message(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    """With fullgraph=True, torch.compile would raise at our code, which it must not trace. So the module, a VAE decoder
    that OneDiff computes otherwise, runs its own forward, and OneDiff logs that."""
    pipe = pipeline("StableDiffusionPipeline", SMALL, "DDIMScheduler")
    decoder = pipe.vae.decoder
    latent = torch.randn(1, 4, 8, 8)
    expected = decoder(latent)
    compile_pipe(pipe)
    assert attached(decoder) is not None
    torch.testing.assert_close(torch.compile(decoder, backend=traced, fullgraph=True)(latent), expected)
    assert traced.operators > 0 and "fullgraph=True" in caplog.text
