"""What OneDiff needs to know of a WebUI; one adapter per host offers it."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ..model.layout import UnsupportedUNet
from ..model.read import read_layout
from ..runtime.runtime import runtime

Result = TypeVar("Result")
# How loud the noise is that stands for a prompt in a warm-up: at 1 the softmaxes of some models choose between two
# tokens that are nearly equal, and then rounding alone decides what comes out, the host's no less than ours.
PROMPT_NOISE = 0.1


class WebUI(Protocol):
    """A running WebUI. Nothing of it is changed but by serve(), and stop() undoes all of that.

    What has a body here is the same for all; adapters inherit it.
    """

    name: str
    # The host's own name and release, for people: "Forge Neo 2.26".
    release: str

    def serve(self) -> None:
        """Put our forward into every UNet call. Safe to call twice."""

    def stop(self) -> None:
        """Undo serve() and give every UNet back as it was. Safe to call twice."""

    def hooks(self) -> int:
        """How many hooks of ours are in place: 1 after serve(), however often, and 0 after stop()."""

    def loads_at_start(self) -> bool:
        """Whether the host loads a checkpoint by itself when it starts, and not with the first image."""
        return False

    def model_loaded(self, sd_model: Any) -> None:
        """The host has loaded a checkpoint."""

    def before_sampling(self, p: Any) -> None:
        """A sampling of the generation p is about to begin."""

    def before_step(self, params: Any) -> None:
        """The host's denoiser begins a step, and says what it will call with."""
        return None

    def after_run(self, p: Any) -> None:
        """The generation p is done."""

    def data_folder(self) -> Path:
        """Where the WebUI keeps its own data; our cache folder lies in it by default."""
        from modules import paths

        return Path(paths.data_path)

    def why_not_served(self) -> str | None:
        """One line about the loaded model when its UNet cannot be ours; None when it is, or none is loaded."""

    def notes(self) -> list[str]:
        """What users should know of the host's own settings while OneDiff is in use, one sentence each."""
        return []

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call as the host itself would, at a size in pixels; batch counts the latents of the call.

        Raises CannotWarm and UnsupportedUNet. Call it through exclusively().
        """

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode random latents of so many images of a size in pixels, as the host does after a sampling.

        Call it through exclusively().
        """

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(latents, tokens) of the UNet calls that the host makes for so many images at once with a prompt of so
        many tokens, the usual call first."""

    def model_name(self, sd_model: Any = None) -> str | None:
        """What the rows of a checkpoint's UNet call it ("SD1"); None for one that is none of ours.

        sd_model: as model_loaded gets it; by default the one that is loaded, if any.
        """

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """Run work() while the host makes no image, on the thread that the host would use."""
        from modules import call_queue

        with call_queue.queue_lock:
            return work()


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """What is drawn inside does not move the random numbers of the next image."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        yield


def network_name(unet: nn.Module | None) -> str | None:
    """What the rows call a UNet ("SD1"); None for what is none that we know. Waits for no call that is being made."""
    managed = None if unet is None else runtime.managed_unet(unet)
    try:
        if managed is not None:
            return managed.bound.layout.model_name
    except UnsupportedUNet:
        pass  # It has not been called yet.
    try:
        return None if unet is None else read_layout(unet).model_name
    except UnsupportedUNet:
        return None
