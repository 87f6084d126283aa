"""OneDiff's outputs do not depend on torch's default dtype and device, which a caller may have set."""
from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SMALL, SMALL_XL, a_call, diffusers_arguments, diffusers_unet, relative_error
from torch import Tensor
from vae_builders import a_latent, diffusers_vae, host_picture, last_decode, routed_picture

import lib_onediff

CLOSE = 1e-5
DEFAULTS = (torch.bfloat16, torch.float16, torch.float64, "meta")

# The functions of torch that make a tensor without being given one.
MAKERS = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
}
ROOT = Path(lib_onediff.__file__).parent


def lacking(call: ast.Call) -> set[str]:
    """Which of dtype and device a call of one of MAKERS leaves out; empty for any other call."""
    function = call.func
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return set()
    if function.value.id != "torch" or function.attr not in MAKERS:
        return set()
    return {"dtype", "device"} - {keyword.arg for keyword in call.keywords}


def test_every_tensor_in_lib_onediff_is_made_with_an_explicit_dtype_and_device() -> None:
    """Reads lib_onediff's source. It fails for each call of a function that makes tensors (MAKERS) without dtype= or
    device=."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno} leaves out {' and '.join(sorted(lacking(call)))}"
        for path in sorted(ROOT.rglob("*.py")) for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and lacking(call)
    ]
    assert not found, "\n".join(found)


@contextlib.contextmanager
def default(what: Any) -> Iterator[None]:
    """A context with this default dtype, or default device, of torch."""
    if isinstance(what, str):
        torch.set_default_device(what)
    else:
        torch.set_default_dtype(what)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def of_unet(config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    unet = diffusers_unet(**config)
    given = diffusers_arguments(a_call(unet))
    if given["added_cond_kwargs"] is not None:
        numbers = torch.tensor([[512.0, 510.5, 0.0, 0.0, 512.0, 512.0]] * 2)
        width = given["added_cond_kwargs"]["text_embeds"].shape[1] - 6 * unet.config.addition_time_embed_dim
        label = given["added_cond_kwargs"]["text_embeds"][:, :width]
        given["added_cond_kwargs"] = {"text_embeds": label, "time_ids": numbers}
    return unet, {**given, "timestep": 951.3}


def of_cosmos() -> tuple[Any, dict[str, Any]]:
    test_cosmos = pytest.importorskip("test_cosmos")
    return test_cosmos.network(), test_cosmos.call()


NETWORKS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "SD": partial(of_unet, SMALL), "SDXL": partial(of_unet, SMALL_XL),
    "LCM": partial(of_unet, {**SMALL, "time_cond_proj_dim": 24}), "Cosmos": of_cosmos,
}


@torch.no_grad()
def ours(network: Any, given: dict[str, Any]) -> Tensor:
    output: Tensor = network(**given, return_dict=False)[0]
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
    return output


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_the_default_dtype_and_device_of_the_caller_do_not_change_our_output(
    what: Any, make: Callable[[], Any]
) -> None:
    """what: the default dtype or device that is set. One network makes its first call before it is set, an equal one is
    compiled while it is set: both outputs equal the one under torch's own defaults to the bit."""
    network, given = make()
    another, _ = make()
    lib_onediff.compile_unet(network)
    before = ours(network, given)
    with default(what):
        assert torch.equal(ours(network, given), before)
        with torch.no_grad():
            hosts = type(network).forward(network, **given, return_dict=False)[0]
        assert relative_error(before, hosts) < CLOSE
    with default(what):
        lib_onediff.compile_unet(another)
        assert torch.equal(ours(another, given), before)


@pytest.mark.parametrize("what", DEFAULTS, ids=str)
def test_the_default_dtype_and_device_of_the_caller_do_not_change_our_decode(what: Any, fresh_route: Any) -> None:
    """what: the default dtype or device that is set. The image of the VAE's decoder equals to the bit the one under
    torch's own defaults."""
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    before = routed_picture(decoder, latent)
    with default(what):
        assert torch.equal(routed_picture(decoder, latent), before)
        assert relative_error(before, host_picture(decoder, latent)) < CLOSE
    assert last_decode()[0] == "ours", last_decode()
