"""Loading a model: a diffusers folder, a single checkpoint file, or the small random one that ships as code."""
from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .loaded_model import LoadedModel
from .modules import devices
from .refusal import ModelProblem
from .single_file import load_checkpoint, safetensors_shapes
from .tiny_model import tiny_sd15_pipeline

DEMO_NAME = "random-tiny-sd15"
CHECKPOINT_ENDINGS = (".safetensors", ".ckpt")
UNET_PIPELINES = ("StableDiffusion", "StableDiffusionXL", "LatentConsistencyModel")
TASKS = ("Pipeline", "Img2ImgPipeline", "InpaintPipeline")
SUPPORTED_PIPELINES = frozenset(family + task for family in UNET_PIPELINES for task in TASKS)
OPTIONAL_PARTS = ("safety_checker", "feature_extractor", "image_encoder")
WEIGHT_ENDINGS = (".safetensors", ".bin")


def load_model(path: str | None) -> LoadedModel:
    """The model at path, on the host's device; without a path the random demo model.

    Raises ModelProblem with a sentence for the user when there is no such model or it cannot be loaded.
    """
    if path is None:
        return place(tiny_sd15_pipeline(), DEMO_NAME)
    location = Path(path).expanduser()
    if location.is_dir():
        return place(load_folder(location), location.resolve().name)
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


def place(pipeline: Any, name: str) -> LoadedModel:
    """Move a pipeline to the host's device; SDXL's VAE stays in float32, because it overflows in float16."""
    pipeline.to(devices.device, devices.dtype)
    if pipeline.vae.config.force_upcast:
        pipeline.vae.to(dtype=torch.float32)
    return LoadedModel(pipeline, name)


def load_folder(folder: Path) -> Any:
    """The pipeline of a folder in diffusers' layout."""
    import diffusers

    index = read_index(folder)
    kind = index.get("_class_name")
    if kind not in SUPPORTED_PIPELINES:
        raise ModelProblem(
            f"The model in {folder.name} is a {kind or 'model without a class name'}; this host runs Stable Diffusion "
            "1.x, 2.x and XL, whose networks are UNets."
        )
    missing = sorted(missing_parts(folder, index))
    if missing:
        raise ModelProblem(f"The model folder {folder.name} is incomplete: {', '.join(missing)} missing.")
    for weights in folder.glob("*/*.safetensors"):
        safetensors_shapes(weights)
    parts = {}
    if "XL" not in kind:
        parts = {"safety_checker": None, "requires_safety_checker": False}
    with loading(folder):
        return getattr(diffusers, kind).from_pretrained(
            str(folder), local_files_only=True, torch_dtype=devices.dtype, **variant_of(folder), **parts
        )


def read_index(folder: Path) -> dict[str, Any]:
    """The contents of model_index.json."""
    file = folder / "model_index.json"
    if not file.is_file():
        raise ModelProblem(f"{folder.name} is not a diffusers model folder: it has no model_index.json.")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelProblem(f"model_index.json in {folder.name} cannot be read: {error}.") from error
    if not isinstance(index, dict):
        raise ModelProblem(f"model_index.json in {folder.name} does not describe a pipeline.")
    return index


def missing_parts(folder: Path, index: dict[str, Any]) -> Iterator[str]:
    """What model_index.json promises and the folder lacks, for example "unet/config.json is"."""
    for part, kind in index.items():
        if part.startswith("_") or part in OPTIONAL_PARTS or not isinstance(kind, list) or kind[0] is None:
            continue
        if not (folder / part).is_dir():
            yield f"{part}/"
        elif part in ("unet", "vae", "text_encoder", "text_encoder_2"):
            if not (folder / part / "config.json").is_file():
                yield f"{part}/config.json"
            if not any(file.suffix in WEIGHT_ENDINGS for file in (folder / part).iterdir()):
                yield f"{part}'s weights"


def variant_of(folder: Path) -> dict[str, str]:
    """{"variant": "fp16"} for a folder that holds only weights of that name."""
    weights = [file.name for file in (folder / "unet").iterdir() if file.suffix in WEIGHT_ENDINGS]
    return {"variant": "fp16"} if weights and all(".fp16." in name for name in weights) else {}


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
