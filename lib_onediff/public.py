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
from .hosts.diffusers.module_forward import keep_replaced, unwrapped
from .hosts.diffusers.schedule import stop_announcing
from .runtime.runtime import runtime

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

log = logging.getLogger("onediff")

Network = TypeVar("Network", bound=nn.Module)
Pipe = TypeVar("Pipe", bound="DiffusionPipeline")
# The names that compile_pipe's argument `ignores` accepts for any pipeline: "unet" also stands for a transformer.
PARTS = ("unet", "vae")
# The attributes in which a pipeline may have the network that OneDiff serves, in the order in which they are tried.
NETWORKS = ("unet", "transformer")


def compile_unet(unet: Network, settings: Settings | None = None, **options: Any) -> Network:
    """Compute all later calls of a diffusers network with OneDiff's forward: of a UNet2DConditionModel,
    CosmosTransformer3DModel, Krea2Transformer2DModel or ZImageTransformer2DModel. Returns the same module.

    settings: None for the defaults. options: values of Settings by name, such as deepcache_interval=3, which override
    those of settings. A second call replaces the settings of the first one.

    A network of any other class, even of one derived from these, keeps its own forward; this is no error, and the
    reason is in the log and in status()["left_alone"]. A network of these classes with parts that OneDiff does not
    support also runs its own forward, until the parts are replaced; the reason is in the log. Measurements are kept in
    the folder of the environment variable ONEDIFF_CACHE, if it is set. Raises ValueError for a wrong option, and
    TypeError if unet is not a module or settings not a Settings.
    """
    must_be_network(unet, "compile_unet")
    chosen = settings_of(settings, options)
    runtime.guard.attempt("opening the cache", runtime.open_cache)
    network = unwrapped(unet)
    attached = attempted(lambda: diffusers.attach(network, chosen))
    refused = attached.outcome is Outcome.REFUSED
    runtime.leave_alone(network, f"the model runs without OneDiff: {attached.reason}" if refused else "")
    if refused:
        return unet
    attached.given()
    read = attempted(lambda: runtime.services.families.read(network))
    if not read.is_ours:
        log.warning("OneDiff: the model runs without OneDiff for now: %s.", read.reason, exc_info=read.fault)
    return unet


def uncompile_unet(unet: Network) -> Network:
    """Undo compile_unet: the module computes with its own forward again, with the same parameters bit for bit. Does
    nothing if the module was not compiled. Returns the same module; raises TypeError if unet is not a module."""
    must_be_network(unet, "uncompile_unet")
    runtime.leave_alone(unwrapped(unet), "")
    diffusers.detach(unwrapped(unet))
    return unet


def compile_pipe(
    pipe: Pipe, ignores: Iterable[str] = (), settings: Settings | None = None, fuse_qkv_projections: bool = True,
    cache_interval: int | None = None, cache_layer_id: int | None = None, cache_block_id: int | None = None,
    **options: Any,
) -> Pipe:
    """Make a diffusers pipeline fast: OneDiff's forward computes its UNet or transformer (see compile_unet), and its
    VAE if that is an AutoencoderKL. Returns the same pipe.

    A pipe with neither a UNet nor a supported transformer (Flux, SD3) is returned unchanged, VAE included, with a line
    in the log and in status()["left_alone"].

    ignores: names of parts to leave unchanged: "unet" (the UNet or transformer) and "vae"; for a pipeline with a
    transformer, "transformer" means the same as "unet". Names of other attributes of the pipe have no effect. settings,
    options: as for compile_unet. fuse_qkv_projections: has no effect, because the projections always share one GEMM; it
    exists for code written for the compile_pipe of the original OneDiff.

    cache_interval=3 is DeepCache: every third step computes the whole UNet, the other steps only its outer layers, down
    to residual block cache_block_id of down block cache_layer_id (each 0 by default). The three arguments set two
    options: if any of the three is given, deepcache_depth, and if cache_interval is given, deepcache_interval. They
    override the values of `settings`; `options` override them.

    Raises TypeError for an argument of a wrong type, and ValueError for a wrong value. For a pipe that is left
    unchanged, the values of the cache arguments are not checked.
    """
    must_be_pipeline(pipe, "compile_pipe")
    left = ignored_parts(pipe, ignores)
    chosen = settings_of(settings, options)
    unet = network_of(pipe)
    if unet is None:
        why = "has no UNet or transformer that OneDiff supports, so OneDiff changes nothing in it"
        runtime.leave_alone(first_network(pipe), f"{type(pipe).__name__} {why}")
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
    """A context in which the calls of a compiled UNet are the steps of one sampling (from noise to latent). Put it
    around a denoising loop of your own; compiled pipelines announce their samplings themselves. Without effect on a
    UNet that is not compiled.

    Step policies such as DeepCache reuse results of earlier steps of a sampling, and are inactive outside of one.
    timesteps: those at which the steps begin, in any order and in the UNet's unit (1000 to 0); None: they are unknown,
    and every step computes the whole UNet.
    """
    must_be_network(unet, "sampling")
    network = unwrapped(unet)
    times = None if timesteps is None else [float(time) for time in timesteps]
    runtime.guard.attempt("beginning a sampling", lambda: keep_replaced(network))
    runtime.begin_sampling(network, Sampling(times=lambda: times), of_all=False)
    try:
        yield
    finally:
        runtime.end_sampling(network)


def settings_of(settings: Settings | None, options: dict[str, Any]) -> Settings:
    """A copy of the settings with these options changed. settings: None for the defaults. Raises TypeError if settings
    is neither None nor a Settings, and ValueError for an unknown option or a wrong value."""
    if not isinstance(settings, Settings | None):
        raise TypeError(
            f"settings must be a lib_onediff.Settings, not a {type(settings).__name__}; options are given by name, "
            'such as backend="native".'
        )
    return Settings.from_mapping(options, settings)


def must_be_network(unet: Any, caller: str) -> None:
    """Raise TypeError unless unet is a torch module. caller: the name of the public function, for the message. If unet
    is a pipeline and the caller's name has "unet" in it, the message suggests the function for pipelines, such as
    compile_pipe for compile_unet."""
    if not isinstance(unet, nn.Module):
        is_whole = "unet" in caller and is_pipeline(unet)
        hint = f"; for a whole pipeline there is {caller.replace('unet', 'pipe')}" if is_whole else ""
        raise TypeError(f"{caller} takes a UNet, such as pipe.unet, not a {type(unet).__name__}{hint}.")


def must_be_pipeline(pipe: Any, caller: str) -> None:
    """Raise TypeError unless pipe is a pipeline (see is_pipeline). caller: the name of the public function, for the
    message. If pipe is a module, the message suggests the function for UNets, such as compile_unet for compile_pipe."""
    if not is_pipeline(pipe):
        hint = f"; for a UNet there is {caller.replace('pipe', 'unet')}" if isinstance(pipe, nn.Module) else ""
        raise TypeError(
            f"{caller} takes a pipeline of diffusers, such as StableDiffusionPipeline.from_pretrained(...) returns, "
            f"not a {type(pipe).__name__}{hint}."
        )


def is_pipeline(pipe: Any) -> bool:
    """Whether an object counts as a pipeline: it has torch modules as attributes, and is neither a module nor a class.
    The class does not matter, so pipelines of other packages count too."""
    holds = any(isinstance(part, nn.Module) for part in getattr(pipe, "__dict__", {}).values())
    return holds and not isinstance(pipe, (nn.Module, type))


def first_network(pipe: Any) -> nn.Module:
    """The first torch module among a pipeline's attributes: any module, be it the text encoder. runtime.leave_alone
    stores its sentences on a pipeline under this module, because the pipeline may not support weak references."""
    return next(part for part in vars(pipe).values() if isinstance(part, nn.Module))


def network_of(pipe: Any) -> Any:
    """A pipeline's UNet, even of a class that OneDiff does not serve; without a UNet, its transformer if OneDiff serves
    the transformer's class; otherwise None. A network inside of torch.compile's wrapper is returned without it."""
    unet, transformer = (unwrapped(getattr(pipe, name, None)) for name in NETWORKS)
    return transformer if unet is None and diffusers.is_served(transformer) else unet


def ignored_parts(pipe: Any, names: Iterable[str]) -> frozenset[str]:
    """The names given as compile_pipe's argument `ignores`, as they are. Raises TypeError if names is a string or no
    collection, and ValueError for a name that is neither in PARTS nor an attribute of the pipe. Attributes such as
    "text_encoder" are accepted, because OneDiff leaves them unchanged anyway."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f'ignores must be a collection of names, such as ("vae",), not {names!r}.')
    left = list(names)
    unknown = [name for name in left if name not in PARTS and not (isinstance(name, str) and hasattr(pipe, name))]
    if unknown:
        known = " or ".join(map(repr, PARTS))
        raise ValueError(f"ignores must name parts of the pipeline, {known}, not {unknown[0]!r}.")
    return frozenset(left)


def deepcache_options(
    unet: nn.Module, cache_interval: int | None, cache_layer_id: int | None, cache_block_id: int | None
) -> dict[str, int]:
    """compile_pipe's three cache arguments, which are those of the original OneDiff, as values of Settings by name: {}
    if all three are None (not given); otherwise "deepcache_depth", and "deepcache_interval" too if cache_interval was
    given.

    unet: its config has the number of residual blocks in a down block (2 if it has none; the largest, if the blocks
    differ). Raises ValueError if an id is out of range (see depth_of).
    """
    if cache_interval is cache_layer_id is cache_block_id is None:
        return {}
    layers = getattr(getattr(unet, "config", None), "layers_per_block", 2)
    depth = depth_of(cache_layer_id or 0, cache_block_id or 0, layers if isinstance(layers, int) else max(layers))
    return {"deepcache_depth": depth, **({} if cache_interval is None else {"deepcache_interval": cache_interval})}


def depth_of(cache_layer_id: int, cache_block_id: int, layers_per_block: int = 2) -> int:
    """The value of the option deepcache_depth for cache_layer_id and cache_block_id: the number of input stages that
    every step computes. The first stage is the convolution before all blocks, so the ids 0 and 0 give 2.

    The two ids identify the deepest layer that runs at every step: cache_layer_id its down block (0: the outermost),
    and cache_block_id the residual block in that down block, or its downsampler if equal to layers_per_block.
    layers_per_block: the number of residual blocks in a down block. Raises ValueError for a negative id and for a
    cache_block_id above layers_per_block; a cache_layer_id that is too large is not noticed here.
    """
    if cache_layer_id < 0 or not 0 <= cache_block_id <= layers_per_block:
        raise ValueError(
            f"cache_layer_id must be 0 or more and cache_block_id 0 to {layers_per_block} for this UNet, "
            f"not {cache_layer_id} and {cache_block_id}."
        )
    return 1 + cache_layer_id * (layers_per_block + 1) + cache_block_id + 1


def compile_half(half: nn.Module, settings: Settings) -> None:
    """Compute all later calls of a VAE's decoder or encoder (half) with OneDiff's forward. A half that OneDiff does not
    support keeps its own forward, with the reason in the log and in status()["left_alone"]."""
    try:
        runtime.vae.read(half)
        diffusers_decoder.attach(half, settings)
        runtime.leave_alone(half, "")
    except (Refusal, ValueError) as reason:
        runtime.leave_alone(half, f"the VAE's {type(half).__name__.lower()} runs without OneDiff: {reason}")


def uncompile_pipe(pipe: Pipe) -> Pipe:
    """Undo compile_pipe: all parts compute with their own forwards again. Parts that were not compiled stay as they
    are. Returns the same pipe; raises TypeError if pipe is not a pipeline."""
    must_be_pipeline(pipe, "uncompile_pipe")
    unet = network_of(pipe)
    stop_announcing(pipe)
    runtime.leave_alone(first_network(pipe), "")
    if unet is not None:
        uncompile_unet(unet)
    for half in diffusers_decoder.halves_of(pipe):
        runtime.leave_alone(half, "")
        diffusers_decoder.detach(half)
    return pipe


def status() -> dict[str, Any]:
    """How the last image was computed (by OneDiff or not, why, and how fast), as nested dictionaries of plain values.
    Has the keys of runtime.cache.Cache.status, and "left_alone": sentences on networks and pipelines that OneDiff
    leaves to their own forwards."""
    return runtime.status()
