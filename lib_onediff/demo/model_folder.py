"""What a folder in diffusers' layout may name: parts that we know, as classes of diffusers and transformers themselves.

A model_index.json can name any module for a part, also a Python file beside its weights, and diffusers would run it.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from ..api.answers import readable
from .errors import ModelProblem

INDEX, MODEL_CONFIG = "model_index.json", "config.json"
UNET_PIPELINES = ("StableDiffusion", "StableDiffusionXL", "LatentConsistencyModel")
TASKS = ("Pipeline", "Img2ImgPipeline", "InpaintPipeline")
SUPPORTED_PIPELINES = frozenset(family + task for family in UNET_PIPELINES for task in TASKS)
TOKENIZERS = ("CLIPTokenizer", "CLIPTokenizerFast")
TEXT_ENCODERS = ("CLIPTextModel", "CLIPTextModelWithProjection")
CLASSES = {
    "unet": ("diffusers", ("UNet2DConditionModel",)),
    "vae": ("diffusers", ("AutoencoderKL",)),
    "text_encoder": ("transformers", TEXT_ENCODERS),
    "text_encoder_2": ("transformers", TEXT_ENCODERS),
    "tokenizer": ("transformers", TOKENIZERS),
    "tokenizer_2": ("transformers", TOKENIZERS),
}
NEEDED = ("unet", "vae", "scheduler")
# Never loaded, so it does not matter what they are.
LEFT_OUT = ("safety_checker", "feature_extractor", "image_encoder")
PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl", ".pickle")
# Beside those that diffusers lists as exchangeable.
MORE_SCHEDULERS = ("LCMScheduler", "TCDScheduler")


def read_index(folder: Path) -> dict[str, Any]:
    """The contents of a folder's model_index.json. Raises ModelProblem unless what it names can be loaded."""
    check_files(folder)
    if not (folder / INDEX).is_file():
        raise ModelProblem(f"{folder.name} is not a diffusers model folder: it has no {INDEX}.")
    index = read_json(folder / INDEX)
    kind = index.get("_class_name")
    if not isinstance(kind, str) or kind not in SUPPORTED_PIPELINES:
        shown = readable(kind) if isinstance(kind, str) else "model without a class name"
        raise ModelProblem(
            f"The model in {folder.name} is a {shown}; this host runs Stable Diffusion 1.x, 2.x and XL, whose networks "
            "are UNets."
        )
    for part in dict.fromkeys((*NEEDED, *index)):
        check_part(folder, part, index.get(part))
    missing = sorted(missing_parts(folder, index))
    if missing:
        raise ModelProblem(f"The model folder {folder.name} is incomplete: {', '.join(missing)} missing.")
    return index


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises ModelProblem."""
    shown = f"{file.name} in {file.parent.name}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelProblem(readable(f"{shown} cannot be read: {error}.")) from error
    if not isinstance(content, dict):
        raise ModelProblem(f"{shown} holds no JSON object.")
    return content


def check_part(folder: Path, part: str, named: Any) -> None:
    """Raise ModelProblem unless a part is left out, absent, plain data, or of a library and class that we know."""
    absent = is_plain(named) or named == [None, None]
    if part.startswith("_") or part in LEFT_OUT or absent and part not in NEEDED:
        return
    library, classes = ("diffusers", scheduler_names()) if part == "scheduler" else CLASSES.get(part, ("", ()))
    if not (isinstance(named, list) and len(named) == 2 and named[0] == library and named[1] in classes):
        raise ModelProblem(readable(
            f"{INDEX} in {folder.name} names {json.dumps(named)} for {part}: this host loads parts of Stable Diffusion "
            "by diffusers and transformers alone, and runs nothing that comes with a model."
        ))


def is_plain(value: Any) -> bool:
    """Whether an entry is a setting of the pipeline, and no part of it."""
    return value is None or isinstance(value, (bool, int, float, str))


def scheduler_names() -> list[str]:
    from diffusers.schedulers import KarrasDiffusionSchedulers

    return [*KarrasDiffusionSchedulers.__members__, *MORE_SCHEDULERS]


def check_files(folder: Path) -> None:
    """Raise ModelProblem for Python code in the folder, and for a link that leads out of it, or out of a Hugging Face
    cache's own."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            shown = path.relative_to(folder)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ModelProblem(readable(
                    f"{shown} in the model folder {folder.name} is a link to a place outside of it."
                ))
            if name.lower().endswith(tuple(all_suffixes())):
                raise ModelProblem(readable(
                    f"The model folder {folder.name} brings Python code ({shown}), and this host runs nothing that "
                    "comes with a model: take it out, or use a model without it."
                ))


def missing_parts(folder: Path, index: dict[str, Any]) -> Iterator[str]:
    """What model_index.json promises and the folder lacks, for example "unet/config.json is"."""
    for part, named in index.items():
        if part.startswith("_") or part in LEFT_OUT or is_plain(named) or named[0] is None:
            continue
        if not (folder / part).is_dir():
            yield f"{part}/"
        elif part in ("unet", "vae", "text_encoder", "text_encoder_2"):
            if not (folder / part / MODEL_CONFIG).is_file():
                yield f"{part}/{MODEL_CONFIG}"
            endings = {file.suffix for file in (folder / part).iterdir()}
            if ".safetensors" not in endings:
                # Loading a pickle can run what is in it.
                yield f"{part}'s weights{' as .safetensors' * (not endings.isdisjoint(PICKLES))}"
