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
# The names for users of the models with a UNet that OneDiff serves.
UNETS = ("SD1", "SD2", "SDXL")
# The name of the adapter for a WebUI that OneDiff does not support.
NO_HOST = "unknown"
# A reason for users, if a sampling has ended without a call of our forward.
BYPASSED = "another extension seems to compute this image's steps without OneDiff; which one is unknown"
# The end of the reason for users, if a WebUI or its checkpoint lacks something that OneDiff needs.
NOT_SUPPORTED = (
    "this version of OneDiff does not support that, so the WebUI makes its images without OneDiff. A newer version of "
    "OneDiff may help"
)
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
    checkpoint_paths: dotted paths of the attributes that a loaded checkpoint must have.
    unmet: why OneDiff does nothing here, in one sentence for the user: what this release, or the loaded checkpoint,
        lacks. None if nothing is missing.
    patches: replace the forwards of the WebUI's classes of networks and VAEs, from serve() to stop().
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
        """The UNet or transformer of a checkpoint, also of a class that OneDiff does not serve; None if the checkpoint
        has none, or is None."""
        return None

    def host_traits(self, unet: Any) -> HostTraits:
        """How this WebUI treats the modules and weights of a network: what OneDiff must know to read them."""
        return HostTraits()

    def before_sampling(self, p: Any) -> None:
        """Called before each sampling of the generation p, the WebUI's processing object: two with hires fix. Adapters
        adopt its UNet and VAE, and tell the runtime that a sampling begins. Does nothing in this class."""

    def after_run(self, p: Any) -> None:
        """Called when the generation p, the WebUI's processing object, is done: tells the patches and the runtime that
        its last sampling has ended."""
        for forwards in self.patches:
            forwards.end_sampling()
        runtime.end_sampling()

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call with random inputs, as the WebUI does in a step, so that OneDiff makes the shape ready
        before an image needs it.

        width, height: in pixels. batch: the rows of the call. tokens: the context length. Raises Refusal if OneDiff
        does not serve the checkpoint, as this class always does. Call it through exclusively().
        """
        raise Refusal(str(self.why_not_served()))

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode the random latents of `images` images, as the WebUI does after a sampling, so that OneDiff makes the
        VAE's shape ready before an image needs it.

        width, height: in pixels. This class raises Refusal; adapters need a loaded checkpoint, which they do not check:
        the caller has made a UNet call with warm() before. Call it through exclusively().
        """
        raise Refusal(str(self.why_not_served()))

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of each kind of UNet call that the WebUI may make in a step: the shapes that pre-warming
        makes ready. The usual one comes first: prompt and negative prompt in one call of 2 * images rows.

        images: how many are made at once. tokens: the prompt's context length.
        """
        return (2 * images, tokens), (images, tokens)

    # --- the same for all WebUIs ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Patch the WebUI's classes of UNets and VAEs, so that OneDiff serves their calls. Safe to call twice."""
        for forwards in self.patches:
            forwards.serve()

    def stop(self) -> None:
        """Undo serve(), and give every network ordinary parameters with the same values. Safe to call twice. If one of
        these steps fails, the fault is logged and the other steps are done."""
        for forwards in self.patches:
            runtime.guard.attempt("restoring the WebUI's functions", forwards.stop)
        runtime.guard.attempt("restoring the UNets' weights", runtime.release_all)

    def hooks(self) -> int:
        """The number "hooks" in the status: 1 from serve() to stop(), while our functions replace the WebUI's methods;
        otherwise 0. It does not count methods or calls of serve()."""
        return int(any(forwards.active for forwards in self.patches))

    def loads_at_start(self) -> bool:
        """Whether the WebUI loads a checkpoint when it starts, rather than with the first image."""
        return False

    def model_loaded(self, checkpoint: Any) -> None:
        """Called when the WebUI has loaded a checkpoint. Between serve() and stop(), adopts its UNet if OneDiff serves
        the UNet's class, and logs a warning with the reason if OneDiff does not serve the checkpoint.

        If this adapter has checkpoint_paths, `unmet` becomes a sentence on the first path that the checkpoint lacks;
        None if it lacks none.
        """
        if self.checkpoint_paths:
            path = first_missing(checkpoint, self.checkpoint_paths)
            self.unmet = path and (
                f"{self.release} has loaded a checkpoint without {path}: {NOT_SUPPORTED}"
            )
        if self.hooks():
            self.adopt(checkpoint)
            if why_not := self.why_not_served(checkpoint):
                log.warning("%s.", why_not)

    def before_step(self, params: Any) -> None:
        """Called when the WebUI's CFG denoiser begins a step. params: its CFGDenoiserParams. Adapters that need them to
        find the prompt's rows in the step's calls keep them. Does nothing in this class."""

    def notes(self) -> list[str]:
        """Sentences for users on settings of the WebUI that have another effect, or none, while OneDiff is in use; []
        if there are none."""
        return []

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """The result of work(), which runs while the WebUI makes no image. Waits for the image in progress, and holds
        the WebUI's lock until work() ends, so that no other image begins. Exceptions of work() are raised here.

        work() runs in this thread, unless the WebUI makes all images in one thread, as Forge does: then in that thread.
        Such an adapter raises Refusal if waiting could be a deadlock. For a WebUI that OneDiff does not support, just
        runs work().
        """
        if self.name == NO_HOST:
            return work()
        from modules import call_queue

        with call_queue.queue_lock:
            return work()

    def data_folder(self) -> Path:
        """The folder in which the WebUI keeps its own data. OneDiff's cache folder is inside of it by default."""
        from modules import paths

        return Path(paths.data_path)

    def checkpoint(self) -> Any:
        """The loaded checkpoint; None if none is loaded yet, or if OneDiff does not support this WebUI. Never loads
        one: so it does not read the WebUI's shared.sd_model, which would."""
        if self.name == NO_HOST:
            return None
        from modules import sd_models

        return getattr(sd_models.model_data, "sd_model", None)

    def unet_of(self, checkpoint: Any) -> Any:
        """A checkpoint's UNet or transformer if OneDiff serves its class; otherwise None, as for no checkpoint."""
        network = self.network(checkpoint)
        return network if type(network) in self.network_classes else None

    def adopt(self, checkpoint: Any) -> Any:
        """Give this checkpoint's UNet to the runtime, which serves its calls from now on, and return it. If OneDiff
        does not serve its class, does nothing and returns None."""
        unet = self.unet_of(checkpoint)
        if unet is not None:
            runtime.adopt(unet, host_traits=self.host_traits(unet))
        return unet

    def kind_of(self, checkpoint: Any) -> str:
        """The name for users of a checkpoint's model, also of one that OneDiff does not serve: "Flux.2". It comes from
        the name of the checkpoint's class; compare model_name."""
        # A1111's class for SD3 is SD3Inferencer.
        return name_of_model(type(checkpoint).__name__.removesuffix("Inferencer"))

    def why_not_served(self, checkpoint: Any = None) -> str | None:
        """Why OneDiff does not serve a checkpoint, by default the loaded one, in one line for the user. None if OneDiff
        serves it, or if no checkpoint is loaded. If `unmet` is set, it is the answer for any checkpoint."""
        checkpoint = self.checkpoint() if checkpoint is None and self.unmet is None else checkpoint
        if self.unmet is not None or checkpoint is None or self.unet_of(checkpoint) is not None:
            return self.unmet
        return f"{self.kind_of(checkpoint)} is not accelerated: OneDiff supports {listed(self.models)}"

    def call_to_warm(self, width: int, height: int, batch: int, tokens: int, noise: Callable[..., Tensor]) -> Call:
        """A Call with random inputs for the UNet of the loaded checkpoint, after adopting that UNet. The adapters'
        warm() then passes these inputs to the UNet.

        width, height: in pixels. batch: the rows of the call. tokens: the context length. noise: noise(*shape) returns
        a random tensor of this shape. Raises Refusal if OneDiff is off, if no checkpoint is loaded, or if OneDiff does
        not serve the loaded one.
        """
        if not self.hooks():
            raise Refusal(OFF_IN_SETTINGS)
        unet = self.adopt(self.checkpoint())
        if unet is None:
            raise Refusal(self.why_not_served() or "no checkpoint is loaded yet")
        layout = runtime.services.families.read(unet)
        size = (height // LATENT_PIXEL, width // LATENT_PIXEL)
        return runtime.services.families.of(layout).example(layout, size, batch, tokens, noise)

    def model_name(self, checkpoint: Any = None) -> str | None:
        """The name under which the table and the history have a checkpoint's shapes ("SD1"), from its UNet's structure;
        None if OneDiff does not serve it, or if none is loaded. checkpoint: by default the loaded one."""
        return runtime.model_name(self.unet_of(self.checkpoint() if checkpoint is None else checkpoint))


def name_of_model(class_name: str) -> str:
    """The name for users of the model whose class in a WebUI has this name: the class's name itself unless NAMES has
    another one."""
    return NAMES.get(class_name, class_name)


def listed(words: Sequence[str]) -> str:
    """The words as a list in a sentence: "SD1, SD2 and SDXL"; a single word as it is. words: at least one."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def random_state_kept() -> AbstractContextManager[object]:
    """A context at whose end torch's random states, of the CPU and of all GPUs, are as at its beginning, so that
    numbers drawn inside do not change the next image."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


# --- requirements -----------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """An attribute that one of the WebUI's Python modules must have; otherwise, OneDiff patches nothing.

    module: the Python module's name.
    name: of the attribute, dotted for a member of a class.
    parameters: if the attribute is a function, names of parameters that it must take.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()


def offers(module: str) -> bool:
    """Whether a Python module of this name could be imported, which shows the kind of WebUI. Imports its parent
    packages, but not the module itself."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def check_needs(release: str, needs: Iterable[Need]) -> None:
    """Raise Refusal with a sentence for the user on the first of these needs that is not met. Imports their Python
    modules. release: the WebUI's name and version, for the sentence."""
    for need in needs:
        if lack := lack_of(need):
            raise Refusal(f"{release} has {lack}: {NOT_SUPPORTED}")


def lack_of(need: Need) -> str:
    """Why a need is not met, in words that complete "the WebUI has ...", such as "no state in modules.shared"; "" if it
    is met. Imports the need's Python module; an exception while importing it counts as not met."""
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
    """Whether a function takes a parameter of this name. Of a decorated function with __wrapped__, the function inside
    counts. False for an object without a signature.

    module: the name of the Python module that should define the function. A function of another package with *args and
        **kwargs counts as taking any parameter: it is assumed to wrap the module's own function.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    kinds = {found.kind for found in parameters.values()}
    takes_all = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds
    return parameter in parameters or (takes_all and package(origin(function)) != package(module))


def first_missing(holder: Any, paths: Iterable[str]) -> str | None:
    """The first of these dotted attribute paths ("shared.state") that `holder` does not have; None if it has all."""
    for path in paths:
        try:
            attrgetter(path)(holder)
        except AttributeError:
            return path
    return None
