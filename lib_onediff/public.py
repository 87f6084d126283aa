"""The API for users of diffusers."""
from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from .accelerator import runtime
from .hosts import diffusers, diffusers_decoder
from .settings import Settings
from .unet.layout import UnsupportedUNet
from .unet.read import read_layout
from .vae.read import read_decoder

log = logging.getLogger("onediff")


def compile_unet(unet: nn.Module, settings: Settings | None = None, **options: Any) -> nn.Module:
    """Run a diffusers UNet2DConditionModel by our forward from now on. Returns the same module.

    options are those of Settings (backend="cudagraph", verify=False, ...); ValueError names a wrong one. A UNet that
    we cannot run keeps its own forward, and the log and status() say why. Safe to call twice; the last options count.
    """
    chosen = Settings.from_mapping(options, settings)
    try:
        read_layout(unet)
    except UnsupportedUNet as reason:
        log.warning("OneDiff: the UNet keeps its own forward for now: %s.", reason)
    diffusers.attach(unet, chosen)
    return unet


def uncompile_unet(unet: nn.Module) -> nn.Module:
    """Undo compile_unet: the module is as it was, bit for bit. Returns the same module."""
    diffusers.detach(unet)
    return unet


def compile_pipe(
    pipe: Any, ignores: Iterable[str] = (), settings: Settings | None = None, fuse_qkv_projections: bool = True,
    **options: Any,
) -> Any:
    """Make a Stable Diffusion or SDXL pipeline of diffusers fast. Returns the same pipe.

    That is its UNet and its VAE; ignores=("unet",) and ignores=("vae",) leave the one or the other as
    it is. A VAE that is not an AutoencoderKL stays as it is too. fuse_qkv_projections is there for callers of
    OneDiff's own compile_pipe: here the UNet's projections always share one GEMM, without a change of the pipe. A pipe
    without a UNet (Flux, SD3) is returned as it is, with a line in the log. options as for compile_unet.
    """
    unet = getattr(pipe, "unet", None)
    if unet is None:
        log.warning("OneDiff: %s has no UNet; it stays as it is.", type(pipe).__name__)
        return pipe
    left = set(ignores)
    if "unet" not in left:
        compile_unet(unet, settings, **options)
    if "vae" not in left:
        for half in diffusers_decoder.halves_of(pipe):
            compile_half(half, Settings.from_mapping(options, settings))
    return pipe


def compile_half(half: nn.Module, settings: Settings) -> None:
    """half: a VAE's decoder or encoder."""
    try:
        read_decoder(half)
        diffusers_decoder.attach(half, settings)
    except (UnsupportedUNet, ValueError) as reason:
        log.warning("OneDiff: the VAE keeps its own %s: %s.", type(half).__name__.lower(), reason)


def uncompile_pipe(pipe: Any) -> Any:
    """Undo compile_pipe. Returns the same pipe."""
    unet = getattr(pipe, "unet", None)
    if unet is not None:
        uncompile_unet(unet)
    for half in diffusers_decoder.halves_of(pipe):
        diffusers_decoder.detach(half)
    return pipe


def status() -> dict[str, Any]:
    """What the last UNet call and the last decode were, by which route they went and why; see Accelerator.status."""
    return runtime.status()
