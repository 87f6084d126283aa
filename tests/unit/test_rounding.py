"""The check of a first use compares our first output of each shape with the host's. It finds small errors of our
forward, and accepts rounding errors, also those that a network amplifies."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import LAYOUTS, a_call, diffusers_output, diffusers_unet, served
from torch import Tensor
from vae_builders import a_latent, diffusers_vae, host_picture, last_decode, routed_picture

import lib_onediff
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.families.unet.family import UNets
from lib_onediff.families.vae import Decoding

Forward = Callable[[Any, Any, Any, Any, UNetCall], Tensor]


def scaled(by: float) -> Callable[[Forward], Forward]:
    """A function that gives a forward the relative error `by`."""
    return lambda forward: lambda *given: forward(*given) * (1 + by)


def of_half_y(forward: Forward) -> Forward:
    """A forward that rounds y, SDXL's embedding of pooled text and sizes, to float16."""
    def output(family: Any, layout: Any, weights: Any, ops: Any, call: UNetCall) -> Tensor:
        assert call.y is not None
        return forward(family, layout, weights, ops, replace(call, y=call.y.half().float()))

    return output


def sharp(config: dict[str, Any], factor: float, seed: int) -> Any:
    """A UNet whose attention scores are multiplied by factor**2. Its softmaxes then decide between nearly equal tokens,
    and amplify any rounding."""
    unet = diffusers_unet(seed, **config)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "to_q" in name or "to_k" in name:
                parameter.mul_(factor)
    return unet


@pytest.mark.parametrize(("name", "fault"), [
    *((name, scaled(by)) for name in ("small", "SD1", "SDXL", "refiner") for by in (1e-5, -2e-5, 5e-5)),
    ("small XL", of_half_y), ("SDXL", of_half_y),
])
def test_an_error_of_our_forward_of_1e_5_is_found_at_the_first_use(
    name: str, fault: Callable[[Forward], Forward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fault: gives our forward a relative error, or makes it round y to float16. Both calls return the host's
    output, and the reason says that ours differs."""
    unet = lib_onediff.compile_unet(diffusers_unet(**LAYOUTS[name]))
    call = a_call(unet)
    monkeypatch.setattr(UNets, "output", fault(UNets.output))
    for _ in range(2):
        output = served(unet, call)
        status = lib_onediff.status()
        assert status["route"] == "host" and "differs too much from the one without OneDiff" in status["reason"]
        assert torch.equal(output, diffusers_output(unet, call))


@pytest.mark.parametrize(("name", "factor", "seed"), [("SD1", 2.1, 0), ("SD1", 2.1, 1), ("SDXL", 1.7, 0)])
def test_the_check_of_a_first_use_accepts_rounding_that_a_network_amplifies(
    name: str, factor: float, seed: int
) -> None:
    """The UNets of sharp() amplify rounding so much that two correct forwards differ visibly. The route "plain" means
    that our output passed the check. name, factor and seed determine the UNet."""
    unet = lib_onediff.compile_unet(sharp(LAYOUTS[name], factor, seed))
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_the_check_of_a_first_use_runs_our_forward_once_where_outputs_are_close(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if the outputs differ more does the check need further forwards, which measure the effect of rounding."""
    calls: list[Any] = []
    forward = UNets.output

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return forward(*given)

    monkeypatch.setattr(UNets, "output", counted)
    unet = lib_onediff.compile_unet(diffusers_unet(**LAYOUTS["SD1"]))
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain" and len(calls) == 1


@pytest.mark.parametrize("by", [1e-5, 5e-5])
def test_an_error_of_our_vae_decode_of_1e_5_is_found_at_the_first_use(
    by: float, fresh_route: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """by: the relative error that our decode is given. The image is the host's to the bit, and the reason says that
    ours differs."""
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    run = Decoding.run
    monkeypatch.setattr(Decoding, "run", lambda *given: run(*given) * (1 + by))
    assert torch.equal(routed_picture(decoder, latent), host_picture(decoder, latent))
    assert last_decode()[0] == "host" and "differs too much from the one without OneDiff" in last_decode()[1]
