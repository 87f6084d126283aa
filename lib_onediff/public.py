"""The API for users of diffusers."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from .core import quality as quality
from .core.attempt import Outcome, attempted
from .core.refusal import Refusal
from .core.sampling import Sampling
from .core.settings import Settings
from .core.version import __version__ as __version__
from .hosts.diffusers import unet as diffusers
from .hosts.diffusers import vae as diffusers_decoder
from .hosts.diffusers.model_folder import load_folder as load_folder
from .hosts.diffusers.model_folder import load_unet as load_unet
from .hosts.diffusers.module_forward import stay_on, unwrapped
from .hosts.diffusers.schedule import no_longer_announce
from .runtime.runtime import runtime

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

log = logging.getLogger("onediff")

Network = TypeVar("Network", bound=nn.Module)
Pipe = TypeVar("Pipe", bound="DiffusionPipeline")
# What of a pipeline is compiled, as ignores names it.
PARTS = ("unet", "vae")
# Where a pipeline has its network.
NETWORKS = ("unet", "transformer")


def compile_unet(unet: Network, settings: Settings | None = None, **options: Any) -> Network:
    """Run a UNet or transformer of diffusers by our forward from now on. Returns the same module. Its classes are
    UNet2DConditionModel, CosmosTransformer3DModel and ZImageTransformer2DModel.

    options are those of Settings (deepcache_interval=3, ...); ValueError names a wrong one, TypeError what is no UNet
    at all. A UNet that we cannot run keeps its own forward, and the log and status() say why. One that is not of
    diffusers' own class, but has its name or is derived from it, is left alone, and they say so too. Safe to call
    twice; the last options count. What is measured is remembered where the environment variable ONEDIFF_CACHE says,
    else nowhere.
    """
    must_be_network(unet, "compile_unet")
    chosen = settings_of(settings, options)
    runtime.guard.attempt("opening the cache", runtime.open_cache)
    network = unwrapped(unet)
    attached = attempted(lambda: diffusers.attach(network, chosen))
    refused = attached.outcome is Outcome.REFUSED
    runtime.leave_alone(network, f"the UNet keeps its own forward: {attached.reason}" if refused else "")
    if refused:
        return unet
    attached.given()
    read = attempted(lambda: runtime.services.families.read(network))
    if not read.is_ours:
        log.warning("OneDiff: the UNet keeps its own forward for now: %s.", read.reason, exc_info=read.fault)
    return unet


def uncompile_unet(unet: Network) -> Network:
    """Undo compile_unet: the module is as it was, bit for bit. Returns the same module."""
    must_be_network(unet, "uncompile_unet")
    runtime.leave_alone(unwrapped(unet), "")
    diffusers.detach(unwrapped(unet))
    return unet


def compile_pipe(
    pipe: Pipe, ignores: Iterable[str] = (), settings: Settings | None = None, fuse_qkv_projections: bool = True,
    cache_interval: int | None = None, cache_layer_id: int | None = None, cache_block_id: int | None = None,
    **options: Any,
) -> Pipe:
    """Make a pipeline of diffusers fast, whose networks OneDiff serves. Returns the same pipe.

    That is its UNet, or the transformer in its place, and its VAE; ignores=("unet",) and ignores=("vae",) leave the
    one or the other as it is. A VAE that is not an AutoencoderKL stays as it is too. fuse_qkv_projections is there for
    callers of OneDiff's own compile_pipe: here the UNet's projections always share one GEMM, without a change of the
    pipe. A pipe without either (Flux, SD3) is returned as it is, with a line in the log and in status()["left_alone"].
    options as for compile_unet.

    cache_interval=3 is DeepCache: every third step computes the whole UNet, the others only its outer layers, down to
    residual block cache_block_id of down block cache_layer_id (both 0 by default). It is the same as the options
    deepcache_interval and deepcache_depth. TypeError and ValueError say in a sentence what to pass.
    """
    must_be_pipeline(pipe, "compile_pipe")
    left = parts_of(pipe, ignores)
    chosen = settings_of(settings, options)
    unet = network_of(pipe)
    if unet is None:
        runtime.leave_alone(first_network(pipe), f"{type(pipe).__name__} has no UNet; it stays as it is")
        return pipe
    deepcache = deepcache_options(unet, cache_interval, cache_layer_id, cache_block_id)
    chosen = Settings.from_mapping({**deepcache, **options}, chosen)
    if left.isdisjoint(NETWORKS):
        compile_unet(unet, chosen)
        diffusers.follow(unet, pipe)
    if "vae" not in left:
        for half in diffusers_decoder.halves_of(pipe):
            compile_half(half, chosen)
    return pipe


@contextlib.contextmanager
def sampling(unet: nn.Module, timesteps: Iterable[float] | None = None) -> Iterator[None]:
    """Say that the calls of a compiled UNet made inside are the steps of one sampling, for loops of one's own.

    DeepCache reuses what earlier steps of a sampling have computed; outside of one, nothing is remembered from call to
    call. A pipeline says so by itself. timesteps: at which the steps begin, as the UNet gets them; without them every
    step is computed whole.
    """
    must_be_network(unet, "sampling")
    times = None if timesteps is None else [float(time) for time in timesteps]
    runtime.guard.attempt("beginning a sampling", lambda: stay_on(unwrapped(unet)))
    runtime.begin_sampling(unet, Sampling(times=lambda: times), of_all=False)
    try:
        yield
    finally:
        runtime.end_sampling(unet)


def settings_of(settings: Settings | None, options: dict[str, Any]) -> Settings:
    """The settings that a caller asks for. Raises TypeError and ValueError with a sentence."""
    if not isinstance(settings, Settings | None):
        raise TypeError(
            f"settings is a lib_onediff.Settings, not a {type(settings).__name__}; options are given by name, such as "
            'backend="native".'
        )
    return Settings.from_mapping(options, settings)


def must_be_network(unet: Any, caller: str) -> None:
    """Raise TypeError with a sentence for what is no network."""
    if not isinstance(unet, nn.Module):
        is_whole = "unet" in caller and is_pipeline(unet)
        hint = f"; for a whole pipeline there is {caller.replace('unet', 'pipe')}" if is_whole else ""
        raise TypeError(f"{caller} takes a UNet, such as pipe.unet, not a {type(unet).__name__}{hint}.")


def must_be_pipeline(pipe: Any, caller: str) -> None:
    """Raise TypeError with a sentence for what is no pipeline."""
    if not is_pipeline(pipe):
        hint = f"; for a UNet there is {caller.replace('pipe', 'unet')}" if isinstance(pipe, nn.Module) else ""
        raise TypeError(
            f"{caller} takes a pipeline of diffusers, such as StableDiffusionPipeline.from_pretrained(...) returns, "
            f"not a {type(pipe).__name__}{hint}."
        )


def is_pipeline(pipe: Any) -> bool:
    """Whether something holds networks and is none."""
    holds = any(isinstance(part, nn.Module) for part in getattr(pipe, "__dict__", {}).values())
    return holds and not isinstance(pipe, (nn.Module, type))


def first_network(pipe: Any) -> nn.Module:
    """Any network of a pipeline, always the same: a pipeline itself need not allow weak references."""
    return next(part for part in vars(pipe).values() if isinstance(part, nn.Module))


def network_of(pipe: Any) -> Any:
    """A pipeline's UNet, or its transformer where it is of a kind that OneDiff knows; None where it has neither."""
    unet, transformer = (unwrapped(getattr(pipe, name, None)) for name in NETWORKS)
    return transformer if unet is None and diffusers.is_served(transformer) else unet


def parts_of(pipe: Any, names: Iterable[str]) -> frozenset[str]:
    """The parts of a pipeline that ignores names. Raises TypeError and ValueError with a sentence."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f'ignores is a collection of names, such as ("vae",), not {names!r}.')
    left = list(names)
    unknown = [name for name in left if name not in PARTS and not (isinstance(name, str) and hasattr(pipe, name))]
    if unknown:
        raise ValueError(f"ignores names parts of the pipeline, {' or '.join(map(repr, PARTS))}, not {unknown[0]!r}.")
    return frozenset(left)


def deepcache_options(
    unet: nn.Module, cache_interval: int | None, cache_layer_id: int | None, cache_block_id: int | None
) -> dict[str, int]:
    """OneDiff's DeepCache arguments as our options; None where one is not given. Raises ValueError for a wrong one."""
    if cache_interval is cache_layer_id is cache_block_id is None:
        return {}
    layers = getattr(getattr(unet, "config", None), "layers_per_block", 2)
    depth = depth_of(cache_layer_id or 0, cache_block_id or 0, layers if isinstance(layers, int) else max(layers))
    return {"deepcache_depth": depth, **({} if cache_interval is None else {"deepcache_interval": cache_interval})}


def depth_of(cache_layer_id: int, cache_block_id: int, layers_per_block: int = 2) -> int:
    """OneDiff's cache_layer_id and cache_block_id as a depth.

    They name the deepest layer that runs at every step: the down block (0: the outermost), and the residual block in
    it, or its downsampler (cache_block_id = layers_per_block). Raises ValueError for what is none.
    """
    if cache_layer_id < 0 or not 0 <= cache_block_id <= layers_per_block:
        raise ValueError(
            f"cache_layer_id is 0 or more and cache_block_id 0 to {layers_per_block} for this UNet, "
            f"not {cache_layer_id} and {cache_block_id}."
        )
    # The first input stage is the convolution before all blocks.
    return 1 + cache_layer_id * (layers_per_block + 1) + cache_block_id + 1


def compile_half(half: nn.Module, settings: Settings) -> None:
    """half: a VAE's decoder or encoder."""
    try:
        runtime.vae.read(half)
        diffusers_decoder.attach(half, settings)
        runtime.leave_alone(half, "")
    except (Refusal, ValueError) as reason:
        runtime.leave_alone(half, f"the VAE keeps its own {type(half).__name__.lower()}: {reason}")


def uncompile_pipe(pipe: Pipe) -> Pipe:
    """Undo compile_pipe. Returns the same pipe."""
    must_be_pipeline(pipe, "uncompile_pipe")
    unet = network_of(pipe)
    no_longer_announce(pipe)
    runtime.leave_alone(first_network(pipe), "")
    if unet is not None:
        uncompile_unet(unet)
    for half in diffusers_decoder.halves_of(pipe):
        runtime.leave_alone(half, "")
        diffusers_decoder.detach(half)
    return pipe


def status() -> dict[str, Any]:
    """What the last UNet call and the last decode were, by which route they went and why; see Accelerator.status."""
    return runtime.status()
