"""Weights that are stored in float8 and cast by torch.autocast, as A1111's option "FP8 weight" does, on a real GPU: in
graphs, no farther from float32 than the host, and without a second UNet."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from test_on_the_fly import MEBIBYTE, MOST_MORE, WORST_RATIO, call_for, exact_output, forward, fresh_runtime, peak  # noqa: F401
from torch import Tensor, nn

from lib_onediff.bench.models import random_unet
from lib_onediff.core.call import UNetCall
from lib_onediff.hosts.a1111.layers import CASTS
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.gpu
FLOAT8 = torch.float8_e4m3fn


def host_unet(name: str, device: str = "cuda") -> nn.Module:
    """Linear layers and convolutions in float8, norms in float16."""
    unet = random_unet(name, torch.device(device)).half()
    for module in unet.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.to(FLOAT8)
    return unet


def under_autocast(unet: nn.Module, call: UNetCall) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.autocast(call.latent.device.type):
            return forward(unet, call)()

    return run


def served(unet: nn.Module, call: UNetCall, backend: str, calls: int = 3) -> Tensor:
    """The output of the last of several calls: plain, plain and captured afterwards, replayed."""
    runtime.adopt(unet, Settings(backend=backend), HostTraits(casts=CASTS))
    with torch.no_grad(), torch.autocast(call.latent.device.type):
        for _ in range(calls):
            output = runtime.run(unet, call, under_autocast(unet, call))
    status = runtime.status()
    assert status["route"] == ("plain" if backend == "eager" else "graph"), status["reason"]
    assert status["backend"] == backend, status["reason"]
    return output


def errors(unet: nn.Module, call: UNetCall, mine: Tensor) -> tuple[float, float]:
    """Ours and the host's."""
    decoded: Any = copy.deepcopy(unet).float()
    exact = exact_output(decoded, call)
    return relative_error(mine, exact), relative_error(under_autocast(unet, call)(), exact)


@pytest.mark.parametrize("backend", ["native", "cudagraph", "eager"])
@pytest.mark.parametrize(("name", "side"), [("tiny-sdxl", 512), ("sdxl", 1024)])
def test_no_farther_from_float32_than_the_host(name: str, side: int, backend: str) -> None:
    unet = host_unet(name)
    call = call_for(unet, side)
    mine, theirs = errors(unet, call, served(unet, call, backend))
    print(f"{name} {backend}: {mine:.2e}, the host {theirs:.2e}")
    assert mine <= WORST_RATIO * theirs
    # A LoRA that is merged in place, biases too: the graph reads the weights where they lie.
    with torch.no_grad():
        for parameter in unet.parameters():
            if parameter.dtype == FLOAT8:
                parameter.copy_((1.25 * parameter.half()).to(FLOAT8))
    runtime.begin_sampling(unet)
    mine, theirs = errors(unet, call, served(unet, call, backend))
    print(f"other weights: {mine:.2e}, the host {theirs:.2e}")
    assert mine <= WORST_RATIO * theirs
