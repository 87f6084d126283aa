"""What a folder in diffusers' layout may name: parts that we know, as classes of diffusers and transformers themselves.

A model_index.json can name any module for a part, also a Python file beside its weights, and diffusers would run it.
"""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..api.answers import readable
from .errors import ModelProblem

INDEX = "model_index.json"
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
WEIGHT_ENDINGS = (".safetensors", ".bin")
# Beside those that diffusers lists as exchangeable.
MORE_SCHEDULERS = ("LCMScheduler", "TCDScheduler")


def read_index(folder: Path) -> dict[str, Any]:
    """The contents of a folder's model_index.json. Raises ModelProblem unless what it names can be loaded."""
    index = read_json(folder)
    kind = index.get("_class_name")
    if not isinstance(kind, str) or kind not in SUPPORTED_PIPELINES:
        shown = readable(kind) if isinstance(kind, str) else "model without a class name"
        raise ModelProblem(
            f"The model in {folder.name} is a {shown}; this host runs Stable Diffusion 1.x, 2.x and XL, whose networks "
            "are UNets."
        )
    for part in dict.fromkeys((*NEEDED, *index)):
        check_part(folder, part, index.get(part))
    check_links(folder)
    missing = sorted(missing_parts(folder, index))
    if missing:
        raise ModelProblem(f"The model folder {folder.name} is incomplete: {', '.join(missing)} missing.")
    return index


def read_json(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    if not file.is_file():
        raise ModelProblem(f"{folder.name} is not a diffusers model folder: it has no {INDEX}.")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelProblem(f"{INDEX} in {folder.name} cannot be read: {error}.") from error
    if not isinstance(index, dict):
        raise ModelProblem(f"{INDEX} in {folder.name} does not describe a pipeline.")
    return index


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


def check_links(folder: Path) -> None:
    """Raise ModelProblem for a link that leads out of the folder, or out of a Hugging Face cache's own."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ModelProblem(readable(
                    f"{path.relative_to(folder)} in the model folder {folder.name} is a link to a place outside of it."
                ))


def missing_parts(folder: Path, index: dict[str, Any]) -> Iterator[str]:
    """What model_index.json promises and the folder lacks, for example "unet/config.json is"."""
    for part, named in index.items():
        if part.startswith("_") or part in LEFT_OUT or is_plain(named) or named[0] is None:
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
