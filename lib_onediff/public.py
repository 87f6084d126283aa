"""The API for users of diffusers."""
from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn

from .accelerator import runtime
from .deepcache.choice import depth_of
from .hosts import diffusers, diffusers_decoder
from .settings import Settings
from .shapes.history import chosen_folder
from .unet.layout import UnsupportedUNet
from .unet.read import read_layout
from .vae.read import read_decoder

log = logging.getLogger("onediff")


def compile_unet(unet: nn.Module, settings: Settings | None = None, **options: Any) -> nn.Module:
    """Run a diffusers UNet2DConditionModel by our forward from now on. Returns the same module.

    options are those of Settings (backend="cudagraph", verify=False, ...); ValueError names a wrong one. A UNet that
    we cannot run keeps its own forward, and the log and status() say why. Safe to call twice; the last options count.
    What is measured and compiled is remembered where the environment variable ONEDIFF_CACHE says, else nowhere.
    """
    chosen, folder = Settings.from_mapping(options, settings), chosen_folder()
    if folder is not None:
        runtime.guard.attempt("opening the cache", lambda: runtime.open_cache(folder))
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
    cache_interval: int | None = None, cache_layer_id: int | None = None, cache_block_id: int | None = None,
    **options: Any,
) -> Any:
    """Make a Stable Diffusion or SDXL pipeline of diffusers fast. Returns the same pipe.

    That is its UNet and its VAE; ignores=("unet",) and ignores=("vae",) leave the one or the other as
    it is. A VAE that is not an AutoencoderKL stays as it is too. fuse_qkv_projections is there for callers of
    OneDiff's own compile_pipe: here the UNet's projections always share one GEMM, without a change of the pipe. A pipe
    without a UNet (Flux, SD3) is returned as it is, with a line in the log. options as for compile_unet.

    cache_interval=3 is DeepCache: every third step computes the whole UNet, the others only its outer layers, down to
    residual block cache_block_id of down block cache_layer_id (both 0 by default). It is the same as the options
    deepcache_interval and deepcache_depth.
    """
    unet = getattr(pipe, "unet", None)
    if unet is None:
        log.warning("OneDiff: %s has no UNet; it stays as it is.", type(pipe).__name__)
        return pipe
    options = {**deepcache_options(unet, cache_interval, cache_layer_id, cache_block_id), **options}
    left = set(ignores)
    if "unet" not in left:
        compile_unet(unet, settings, **options)
        diffusers.follow(unet, pipe)
    if "vae" not in left:
        for half in diffusers_decoder.halves_of(pipe):
            compile_half(half, Settings.from_mapping(options, settings))
    return pipe


def deepcache_options(
    unet: nn.Module, cache_interval: int | None, cache_layer_id: int | None, cache_block_id: int | None
) -> dict[str, int]:
    """OneDiff's DeepCache arguments as our options; None where one is not given. Raises ValueError for a wrong one."""
    if cache_interval is cache_layer_id is cache_block_id is None:
        return {}
    layers = getattr(getattr(unet, "config", None), "layers_per_block", 2)
    depth = depth_of(cache_layer_id or 0, cache_block_id or 0, layers if isinstance(layers, int) else max(layers))
    return {"deepcache_depth": depth, **({} if cache_interval is None else {"deepcache_interval": cache_interval})}


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
