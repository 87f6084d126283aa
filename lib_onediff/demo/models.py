"""Loading a model: a diffusers folder, a single checkpoint file, the one that ships with us, or a random one."""
from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..logs import one_line
from . import SHIPPED
from .errors import ModelProblem
from .folder_parts import load_folder
from .loaded_model import LoadedModel
from .model_folder import INDEX
from .modules import devices
from .single_file import load_checkpoint
from .tiny_model import tiny_sd15_pipeline

DEMO_NAME = "random-tiny-sd15"
ABOUT_SHIPPED = "Draws emoji: try “a red apple on a blue background” or “an owl and a rocket”."
OWN_MODEL = "Start with --model FILE_OR_FOLDER for your own."
CHECKPOINT_ENDINGS = (".safetensors", ".ckpt")


def load_model(path: str | None, random: bool = False) -> LoadedModel:
    """The model at path, on the host's device; without a path the one that ships with us, or, where that is missing or
    random weights are asked for, the random demo model.

    Raises ModelProblem with a sentence for the user when there is no such model or it cannot be loaded.
    """
    if path is None and (random or not (SHIPPED / INDEX).is_file()):
        return place(tiny_sd15_pipeline(), DEMO_NAME, f"Random weights: its images show nothing. {OWN_MODEL}")
    if path is None:
        with loading(SHIPPED):
            return place(load_folder(SHIPPED, devices.dtype), SHIPPED.name, f"{ABOUT_SHIPPED} {OWN_MODEL}")
    location = Path(path).expanduser()
    if location.is_dir():
        with loading(location):
            pipeline = load_folder(location, devices.dtype)
        return place(pipeline, location.resolve().name)
    if not location.exists():
        raise ModelProblem(f"There is no model file or folder {path}.")
    if location.suffix not in CHECKPOINT_ENDINGS:
        raise ModelProblem(
            f"{location.name} is not a model that this host reads: it takes a diffusers folder or a file ending in "
            f"{' or '.join(CHECKPOINT_ENDINGS)}."
        )
    with loading(location):
        pipeline = load_checkpoint(location, devices.dtype)
    return place(pipeline, location.stem)


def place(pipeline: Any, name: str, about: str = "") -> LoadedModel:
    """Move a pipeline to the host's device; SDXL's VAE stays in float32, because it overflows in float16."""
    pipeline.to(devices.device, devices.dtype)
    if pipeline.vae.config.force_upcast:
        pipeline.vae.to(dtype=torch.float32)
    return LoadedModel(pipeline, one_line(name), about)


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Turn whatever a loader raises into a ModelProblem: loaders raise dozens of kinds for damaged files."""
    from diffusers.utils import logging

    logging.disable_progress_bar()
    try:
        yield
    except ModelProblem:
        raise
    except Exception as error:
        first_sentence = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        cause = textwrap.shorten(first_sentence, 200, placeholder=" ...").rstrip(".")
        raise ModelProblem(f"The model {path.name} cannot be loaded; it may be damaged ({cause}).") from error
