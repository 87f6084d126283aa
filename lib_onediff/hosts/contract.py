"""The contract of a WebUI: what its adapter has, what follows from that, and what an adapter needs of its host, which
is asked for before anything is hooked."""
from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..core.call import Call
from ..core.key import LATENT_PIXEL
from ..core.origins import origin, package
from ..core.refusal import Refusal
from ..runtime.runtime import runtime
from ..weights.scan import HostTraits
from .hooks import ForwardPatches

log = logging.getLogger("onediff")
Result = TypeVar("Result")
UNETS = ("SD1", "SD2", "SDXL")
NOT_IN_USE = "OneDiff is not in use"
# The name of an adapter that has no host.
NO_HOST = "unknown"
BYPASSED = "none of this generation's UNet calls reached OneDiff; no extension's code was found above it"
# Of classes, what people call the model where that is something else.
NAMES = {
    "ErnieImage": "Ernie Image", "Flux2": "Flux.2", "Krea2": "Krea 2", "Lumina2": "Lumina 2", "QwenImage": "Qwen-Image",
    "ZImage": "Z-Image",
}


class WebUI:
    """A running WebUI. Nothing of it is changed but by serve(), and stop() undoes all of that.

    An adapter overrides the first six methods, and sets patches. As they stand here they are those of a WebUI in which
    OneDiff does nothing, for the reason `unmet`. The others are the same for all hosts, but may be overridden too.

    name: the kind of host, for programs ("forge"). release: for people ("Forge Neo 2.26").
    network_classes: the classes of networks that we serve; models: the names of these models, for users.
    checkpoint_paths: attributes that a checkpoint must have. unmet: what this release or its checkpoint lacks, as a
    sentence; None for nothing. patches: our forwards in the classes of its networks and VAEs.
    """

    name = NO_HOST
    network_classes: tuple[type, ...] = ()
    models: tuple[str, ...] = UNETS
    checkpoint_paths: tuple[str, ...] = ()
    patches: Sequence[ForwardPatches] = ()

    def __init__(self, release: str = "this WebUI", unmet: str | None = None) -> None:
        self.release, self.unmet = release, unmet

    def network(self, checkpoint: Any) -> Any:
        """What a checkpoint computes its steps with, of whatever kind; None where it has none."""
        return None

    def host_traits(self, unet: Any) -> HostTraits:
        """What is known of a network's host; see there."""
        return HostTraits()

    def before_sampling(self, p: Any) -> None:
        """A sampling of the generation p is about to begin."""

    def after_run(self, p: Any) -> None:
        """The generation p is done."""
        for forwards in self.patches:
            forwards.end_sampling()
        runtime.end_sampling()

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call as the host itself would, at a size in pixels; batch counts the latents of the call.

        Raises Refusal. Call it through exclusively().
        """
        raise Refusal(str(self.why_not_served()))

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode random latents of so many images of a size in pixels, as the host does after a sampling.

        Raises Refusal. Call it through exclusively().
        """
        raise Refusal(str(self.why_not_served()))

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(latents, tokens) of the UNet calls that the host makes for so many images at once with a prompt of so
        many tokens, the usual call first."""
        return (2 * images, tokens), (images, tokens)

    # --- what is the same for all ---------------------------------------------------------------------------------

    def serve(self) -> None:
        """Put our forwards into every UNet's and VAE's calls. Safe to call twice."""
        for forwards in self.patches:
            forwards.serve()

    def stop(self) -> None:
        """Undo serve() and give every network back as it was. Safe to call twice."""
        for forwards in self.patches:
            runtime.guard.attempt("switching a hook off", forwards.stop)
        runtime.guard.attempt("giving the UNets back", runtime.release_all)

    def hooks(self) -> int:
        """How many hooks of ours are in place on a method: 1 after serve(), however often, and 0 after stop()."""
        return int(any(forwards.active for forwards in self.patches))

    def loads_at_start(self) -> bool:
        """Whether the host loads a checkpoint by itself when it starts, and not with the first image."""
        return False

    def model_loaded(self, checkpoint: Any) -> None:
        """The host has loaded a checkpoint."""
        if self.checkpoint_paths:
            path = first_missing(checkpoint, self.checkpoint_paths)
            self.unmet = path and (
                f"{self.release} has loaded a checkpoint without {path}: OneDiff does not know this release"
            )
        if self.hooks():
            self.adopt(checkpoint)
            if why_not := self.why_not_served(checkpoint):
                log.warning("%s.", why_not)

    def before_step(self, params: Any) -> None:
        """The host's denoiser begins a step, and says what it will call with."""

    def notes(self) -> list[str]:
        """What users should know of the host's own settings while OneDiff is in use, one sentence each."""
        return []

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run work() while the host makes no image, on the thread that the host would use."""
        if self.name == NO_HOST:
            return work()
        from modules import call_queue

        with call_queue.queue_lock:
            return work()

    def data_folder(self) -> Path:
        """Where the WebUI keeps its own data; our cache folder lies in it by default."""
        from modules import paths

        return Path(paths.data_path)

    def checkpoint(self) -> Any:
        """The loaded checkpoint; None before the first. Loads none, which the host's own shared.sd_model would."""
        if self.name == NO_HOST:
            return None
        from modules import sd_models

        return getattr(sd_models.model_data, "sd_model", None)

    def unet_of(self, checkpoint: Any) -> Any:
        """A checkpoint's UNet, where it is of the kind that we serve; else None."""
        network = self.network(checkpoint)
        return network if type(network) in self.network_classes else None

    def adopt(self, checkpoint: Any) -> Any:
        """Have the runtime know this checkpoint's UNet, and return it; None where it has none that we serve."""
        unet = self.unet_of(checkpoint)
        if unet is not None:
            runtime.adopt(unet, host_traits=self.host_traits(unet))
        return unet

    def kind_of(self, checkpoint: Any) -> str:
        """What people call a checkpoint's model."""
        # A1111's SD3 is an SD3Inferencer.
        return name_of_model(type(checkpoint).__name__.removesuffix("Inferencer"))

    def why_not_served(self, checkpoint: Any = None) -> str | None:
        """One line about a checkpoint, by default the loaded one, whose network cannot be ours; None where it is, or
        none is loaded."""
        checkpoint = self.checkpoint() if checkpoint is None and self.unmet is None else checkpoint
        if self.unmet is not None or checkpoint is None or self.unet_of(checkpoint) is not None:
            return self.unmet
        return f"{self.kind_of(checkpoint)} is not accelerated: OneDiff serves {listed(self.models)}"

    def call_to_warm(self, width: int, height: int, batch: int, tokens: int, noise: Callable[..., Tensor]) -> Call:
        """A random call of the loaded checkpoint's UNet at a size in pixels. noise: draws a tensor of a shape. Raises
        Refusal where there is none to make ready."""
        if not self.hooks():
            raise Refusal(NOT_IN_USE)
        unet = self.adopt(self.checkpoint())
        if unet is None:
            raise Refusal(self.why_not_served() or "no checkpoint is loaded yet")
        layout, size = runtime.services.families.read(unet), (height // LATENT_PIXEL, width // LATENT_PIXEL)
        return runtime.services.families.of(layout).example(layout, size, batch, tokens, noise)

    def model_name(self, checkpoint: Any = None) -> str | None:
        """What the rows of a checkpoint's UNet call it ("SD1"); None for one that is none of ours.

        checkpoint: as model_loaded gets it; by default the one that is loaded, if any.
        """
        return runtime.model_name(self.unet_of(self.checkpoint() if checkpoint is None else checkpoint))


def name_of_model(kind: str) -> str:
    """What people call the model whose class has this name."""
    return NAMES.get(kind, kind)


def listed(words: Sequence[str]) -> str:
    """ "SD1, SD2 and SDXL"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def random_state_kept() -> AbstractContextManager[object]:
    """What is drawn inside does not move the random numbers of the next image."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


# --- what an adapter needs --------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """Something that a module of the host must have.

    name: an attribute, with dots for one of a class. parameters: which a function must take by these names.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


def offers(module: str) -> bool:
    """Whether the host has this module. Imports the packages around it, and not the module itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def check_needs(release: str, needs: Iterable[Need]) -> None:
    """Raise Refusal with a sentence that names the first need that this release does not meet."""
    for need in needs:
        if lack := lack_of(need):
            raise Refusal(f"{release} has {lack}: OneDiff does not know this release, and changes nothing")


def lack_of(need: Need) -> str:
    """What the host has in place of a need, or lacks; "" where it meets it."""
    try:
        module = importlib.import_module(need.module)
    except Exception as error:
        log.debug("%s cannot be imported", need.module, exc_info=True)
        return f"no module {need.module} that can be imported ({type(error).__name__}: {error})"
    if first_missing(module, [need.name]):
        return f"no {need.name} in {need.module}"
    found = attrgetter(need.name)(module)
    names = ", ".join(name for name in need.parameters if not takes(found, name, need.module))
    return f"a {need.name} in {need.module} that does not take {names}" if names else ""


def takes(function: Any, parameter: str, module: str) -> bool:
    """Whether a function has a parameter of this name, below any decorator that keeps its signature.

    What another package has put there and takes everything is believed: it hands it on to the module's own.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    kinds = {found.kind for found in parameters.values()}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return parameter in parameters or (takes_all and package(origin(function)) != package(module))


def first_missing(holder: Any, paths: Iterable[str]) -> str | None:
    """The first of these dotted attribute paths that leads nowhere from holder; None where all lead somewhere."""
    for path in paths:
        try:
            attrgetter(path)(holder)
        except AttributeError:
            return path
    return None
