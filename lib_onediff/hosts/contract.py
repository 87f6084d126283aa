"""The interface of a WebUI's adapter, and the check that a release of the WebUI has everything that the
adapter needs."""
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
from ..core.settings import OFF_IN_SETTINGS
from ..runtime.runtime import runtime
from ..weights.scan import HostTraits
from .hooks import ForwardPatches

log = logging.getLogger("onediff")
Result = TypeVar("Result")
UNETS = ("SD1", "SD2", "SDXL")
# The name of the adapter for a WebUI that OneDiff does not support.
NO_HOST = "unknown"
BYPASSED = "no step of this image reached OneDiff, and no extension was found that bypasses it"
# Names of models for users, by the WebUI's class names, if the two differ.
NAMES = {
    "ErnieImage": "Ernie Image", "Flux2": "Flux.2", "Krea2": "Krea 2", "Lumina2": "Lumina 2", "QwenImage": "Qwen-Image",
    "ZImage": "Z-Image",
}


class WebUI:
    """A running WebUI. Only serve() changes it, and stop() undoes that.

    Adapters override the methods up to call_shapes, and set patches. The class itself is the adapter of a WebUI in
    which OneDiff does nothing, for the reason `unmet`. The methods after call_shapes are the same for all WebUIs, and
    may be overridden too.

    name: for programs ("forge").
    release: for users ("Forge Neo 2.26").
    network_classes: the classes of networks that OneDiff serves.
    models: the names of these models, for users.
    checkpoint_paths: attributes that a checkpoint must have.
    unmet: a sentence on what this release or its checkpoint lacks; None if it lacks nothing.
    patches: the patches of the classes of its networks and VAEs.
    """

    name = NO_HOST
    network_classes: tuple[type, ...] = ()
    models: tuple[str, ...] = UNETS
    checkpoint_paths: tuple[str, ...] = ()
    patches: Sequence[ForwardPatches] = ()

    def __init__(self, release: str = "this WebUI", unmet: str | None = None) -> None:
        """release: for users. unmet: why OneDiff does nothing in this WebUI; None if it can serve."""
        self.release = release
        self.unmet = unmet

    def network(self, checkpoint: Any) -> Any:
        """The UNet or transformer of a checkpoint, of any class; None if it has none."""
        return None

    def host_traits(self, unet: Any) -> HostTraits:
        """The HostTraits of a network: how this WebUI treats its modules and weights."""
        return HostTraits()

    def before_sampling(self, p: Any) -> None:
        """Called before each sampling of the generation p, the WebUI's processing object. Adapters adopt its UNet and
        VAE, and tell the runtime that a sampling begins."""

    def after_run(self, p: Any) -> None:
        """Called when the generation p is done."""
        for forwards in self.patches:
            forwards.end_sampling()
        runtime.end_sampling()

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call with random inputs, as the WebUI does in a step, so that OneDiff makes the shape ready.
        width, height: in pixels. batch: the rows of the call. tokens: the context length.

        Raises Refusal if OneDiff does not serve the checkpoint. Call it through exclusively().
        """
        raise Refusal(str(self.why_not_served()))

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode the random latents of `images` images, as the WebUI does after a sampling, so that OneDiff makes the
        VAE's shape ready. width, height: in pixels.

        Raises Refusal if OneDiff does not serve the checkpoint. Call it through exclusively().
        """
        raise Refusal(str(self.why_not_served()))

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of each UNet call that the WebUI may make in a step, for `images` images at once and a prompt
        of this context length: the shapes that pre-warming makes ready. The usual call comes first."""
        return (2 * images, tokens), (images, tokens)

    # --- the same for all WebUIs ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Patch the classes, so that OneDiff serves the calls of UNets and VAEs. Safe to call twice."""
        for forwards in self.patches:
            forwards.serve()

    def stop(self) -> None:
        """Undo serve(), and restore every network. Safe to call twice."""
        for forwards in self.patches:
            runtime.guard.attempt("restoring the WebUI's functions", forwards.stop)
        runtime.guard.attempt("restoring the UNets' weights", runtime.release_all)

    def hooks(self) -> int:
        """1 while any of our functions replaces a method of the WebUI, else 0; for the status. So 1 after serve(),
        however often it was called, and 0 after stop()."""
        return int(any(forwards.active for forwards in self.patches))

    def loads_at_start(self) -> bool:
        """Whether the WebUI loads a checkpoint when it starts, rather than with the first image."""
        return False

    def model_loaded(self, checkpoint: Any) -> None:
        """Called when the WebUI has loaded a checkpoint. Sets `unmet` to what the checkpoint lacks of checkpoint_paths,
        or to None. While OneDiff serves, adopts its UNet, or logs why it does not serve it."""
        if self.checkpoint_paths:
            path = first_missing(checkpoint, self.checkpoint_paths)
            self.unmet = path and (
                f"{self.release} has loaded a checkpoint without {path}: this version of OneDiff does not support that"
            )
        if self.hooks():
            self.adopt(checkpoint)
            if why_not := self.why_not_served(checkpoint):
                log.warning("%s.", why_not)

    def before_step(self, params: Any) -> None:
        """Called when the WebUI's denoiser begins a step. params: its CFGDenoiserParams. Adapters keep what they need
        to tell the prompt's rows."""

    def notes(self) -> list[str]:
        """Sentences for users on settings of the WebUI that matter while OneDiff is in use."""
        return []

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """The result of work(), run while the WebUI makes no image, in the thread that makes its images. Waits for the
        image in progress; raises Refusal where waiting could be a deadlock."""
        if self.name == NO_HOST:
            return work()
        from modules import call_queue

        with call_queue.queue_lock:
            return work()

    def data_folder(self) -> Path:
        """The WebUI's data folder; by default, our cache folder is inside of it."""
        from modules import paths

        return Path(paths.data_path)

    def checkpoint(self) -> Any:
        """The loaded checkpoint; None if none is loaded yet. Never loads one; the WebUI's own shared.sd_model loads one
        when it is read."""
        if self.name == NO_HOST:
            return None
        from modules import sd_models

        return getattr(sd_models.model_data, "sd_model", None)

    def unet_of(self, checkpoint: Any) -> Any:
        """A checkpoint's UNet if OneDiff serves its class; otherwise None."""
        network = self.network(checkpoint)
        return network if type(network) in self.network_classes else None

    def adopt(self, checkpoint: Any) -> Any:
        """Make the runtime serve this checkpoint's UNet, and return the UNet; None if OneDiff does not serve its
        class."""
        unet = self.unet_of(checkpoint)
        if unet is not None:
            runtime.adopt(unet, host_traits=self.host_traits(unet))
        return unet

    def kind_of(self, checkpoint: Any) -> str:
        """The name of a checkpoint's model for users."""
        # A1111's class for SD3 is SD3Inferencer.
        return name_of_model(type(checkpoint).__name__.removesuffix("Inferencer"))

    def why_not_served(self, checkpoint: Any = None) -> str | None:
        """Why OneDiff does not serve a checkpoint, by default the loaded one, in one line for the user. `unmet` comes
        first, whatever is loaded. None if OneDiff serves it, or no checkpoint is loaded."""
        checkpoint = self.checkpoint() if checkpoint is None and self.unmet is None else checkpoint
        if self.unmet is not None or checkpoint is None or self.unet_of(checkpoint) is not None:
            return self.unmet
        return f"{self.kind_of(checkpoint)} is not accelerated: OneDiff serves {listed(self.models)}"

    def call_to_warm(self, width: int, height: int, batch: int, tokens: int, noise: Callable[..., Tensor]) -> Call:
        """A call of the loaded checkpoint's UNet with random inputs, for warm(). noise: noise(*shape) draws a tensor.
        Raises Refusal if there is no UNet that OneDiff serves."""
        if not self.hooks():
            raise Refusal(OFF_IN_SETTINGS)
        unet = self.adopt(self.checkpoint())
        if unet is None:
            raise Refusal(self.why_not_served() or "no checkpoint is loaded yet")
        layout = runtime.services.families.read(unet)
        size = (height // LATENT_PIXEL, width // LATENT_PIXEL)
        return runtime.services.families.of(layout).example(layout, size, batch, tokens, noise)

    def model_name(self, checkpoint: Any = None) -> str | None:
        """The model's name in the rows of the table ("SD1"); None if OneDiff does not serve it. checkpoint: by default
        the loaded one."""
        return runtime.model_name(self.unet_of(self.checkpoint() if checkpoint is None else checkpoint))


def name_of_model(kind: str) -> str:
    """The name for users of the model whose class has this name."""
    return NAMES.get(kind, kind)


def listed(words: Sequence[str]) -> str:
    """The words as a list in a sentence: "SD1, SD2 and SDXL"; a single word as it is."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def random_state_kept() -> AbstractContextManager[object]:
    """A context that restores torch's random states at its end, so that numbers drawn inside do not
    change the next image."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


# --- requirements -----------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """An attribute that a module of the WebUI must have, or OneDiff patches nothing.

    module: the Python module's name.
    name: of the attribute, dotted for a member of a class.
    parameters: names of parameters that the function must take.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


def offers(module: str) -> bool:
    """Whether the WebUI has this module. Imports its parent packages, but not the module itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def check_needs(release: str, needs: Iterable[Need]) -> None:
    """Raise Refusal with a sentence on the first need that this release of the WebUI does not meet."""
    for need in needs:
        if lack := lack_of(need):
            raise Refusal(f"{release} has {lack}: this version of OneDiff does not support that, and changes nothing")


def lack_of(need: Need) -> str:
    """What the WebUI lacks of a need, in words that complete "the WebUI has ..."; "" if it lacks nothing. Imports the
    need's module."""
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
    """Whether a function has a parameter of this name. Decorators with __wrapped__ are looked through. False for an
    object without a signature.

    module: the Python module that should define the function. A function of another package with *args and **kwargs
        counts as well: it is assumed to wrap the module's own.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    kinds = {found.kind for found in parameters.values()}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return parameter in parameters or (takes_all and package(origin(function)) != package(module))


def first_missing(holder: Any, paths: Iterable[str]) -> str | None:
    """The first of these dotted attribute paths that `holder` does not have; None if it has all."""
    for path in paths:
        try:
            attrgetter(path)(holder)
        except AttributeError:
            return path
    return None
