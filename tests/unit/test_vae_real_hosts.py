"""The VAE decoders of Forge and of sgm (A1111's SDXL), from a checkout that the environment names.

As test_real_host_unets.py: ONEDIFF_FORGE and ONEDIFF_SGM.
"""
from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders import relative_error, without_initial_values
from test_real_host_unets import SGM, needs_forge, needs_sgm
from torch import nn
from vae_builders import LDM, a_latent, host_picture, last, ldm_decoder, our_picture, with_small_groups

from lib_onediff.families.registry import read_decoder
from lib_onediff.hosts.forge.traits import FORGE as FORGE_TRAITS
from lib_onediff.hosts.hooks import VaeHooks
from lib_onediff.weights.scan import HostTraits

pytestmark = pytest.mark.usefixtures("fresh_route")
SIZES = [(6, 6), (5, 7)]


def sgm_decoder(**config: Any) -> Any:
    find_sgm()
    return ldm_decoder(module="sgm.modules.diffusionmodules.model", **config)


def find_sgm() -> None:
    # sgm/__init__.py pulls in the training stack; the VAE needs none of it.
    for name in ("sgm", "sgm.modules"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(SGM or "", *name.split("."))]
        sys.modules.setdefault(name, package)


@pytest.fixture
def forge_vae() -> Iterator[Any]:
    """Forge's module backend.nn.vae."""
    from test_real_host_unets import SD1, forge_unet

    forge_unet(**SD1)
    from backend.nn import vae

    yield vae


def forge_decoder(module: Any, forge_layers: bool, kind: str = "Decoder", **config: Any) -> Any:
    with without_initial_values(), contextlib.redirect_stdout(io.StringIO()):
        decoder = getattr(module, kind)(**{**LDM, **config})
    if forge_layers:
        in_forge_layers(decoder)
    return with_small_groups(decoder)


def in_forge_layers(decoder: nn.Module) -> None:
    """Give every layer the class that Forge's loader builds it with, the parameters staying."""
    from backend.operations import ForgeOperations

    for module in decoder.modules():
        kind = getattr(ForgeOperations, type(module).__name__, None)
        if kind is not None:
            module.__class__ = kind
            module.parameters_manual_cast = False


@needs_sgm
@pytest.mark.parametrize(
    "config", [{}, {"z_channels": 16}, {"attn_resolutions": [16]}], ids=["SD", "Flux", "attention"]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sgm_gets_its_own_picture(config: dict[str, Any], size: tuple[int, int]) -> None:
    decoder = sgm_decoder(**config)
    latent = a_latent(decoder, *size, batch=2)
    assert read_decoder(decoder).family == "sgm"
    assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", "")


@needs_forge
@pytest.mark.parametrize("forge_layers", [False, True], ids=["torch's layers", "Forge's layers"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forge_gets_its_own_picture(forge_vae: Any, forge_layers: bool, size: tuple[int, int]) -> None:
    decoder = forge_decoder(forge_vae, forge_layers)
    latent = a_latent(decoder, *size, batch=2)
    assert read_decoder(decoder).family == "backend"
    with torch.inference_mode():
        assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", "")


@needs_sgm
def test_sgm_encodes_as_itself() -> None:
    find_sgm()
    module = importlib.import_module("sgm.modules.diffusionmodules.model")
    with without_initial_values(), contextlib.redirect_stdout(io.StringIO()):
        encoder = with_small_groups(module.Encoder(**LDM))
    picture = torch.rand(2, 3, 24, 40)
    assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert last() == ("ours", "") and read_decoder(encoder).encodes


@needs_forge
@pytest.mark.parametrize("forge_layers", [False, True], ids=["torch's layers", "Forge's layers"])
def test_forge_encodes_as_itself(forge_vae: Any, forge_layers: bool) -> None:
    encoder = forge_decoder(forge_vae, forge_layers, kind="Encoder")
    picture = torch.rand(2, 3, 24, 40)
    with torch.inference_mode():
        assert relative_error(our_picture(encoder, picture), host_picture(encoder, picture)) < 1e-5
    assert last() == ("ours", "") and read_decoder(encoder).encodes


@needs_forge
def test_forge_with_another_attention_is_left_to_it(forge_vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = forge_decoder(forge_vae, forge_layers=True)
    own = forge_vae.Decoder.__dict__["forward"]
    patches = VaeHooks(
        [forge_vae.Decoder], HostTraits(), FORGE_TRAITS.check_vae
    )
    patches.serve()
    try:
        latent = a_latent(decoder)
        with torch.no_grad():
            decoder(latent)
            assert last() == ("ours", "")
            monkeypatch.setattr(forge_vae, "attention_function_single_head_spatial", lambda q, k, v: v)
            assert torch.equal(decoder(latent), own(decoder, latent))
        assert last() == ("host", f"the attention of the WebUI's VAE was replaced by {__name__}")
    finally:
        patches.stop()
    assert forge_vae.Decoder.__dict__["forward"] is own
