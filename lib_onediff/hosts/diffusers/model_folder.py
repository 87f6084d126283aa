"""A model in diffusers' layout, of which JSON and .safetensors files are read and nothing is run.

A model_index.json can name any module for a part, also a Python file beside its weights, and a pipeline's own
from_pretrained would run it. Here the folder has no say in what a part is.
"""
from __future__ import annotations

import inspect
import json
import os
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

import torch

from ...core.logs import readable
from ...core.refusal import Refusal

NEEDED = ("unet", "vae", "scheduler")
# By this transformers would load another model in the place of the one in the folder.
ADAPTER = "adapter_config.json"


def load_folder(folder: Path, dtype: torch.dtype) -> Any:
    """The pipeline of a folder, its weights in dtype on the CPU. Raises Refusal, and whatever the libraries raise."""
    import diffusers
    import transformers

    check_files(folder)
    lacking = [f"{part}/" for part in NEEDED if not (folder / part).is_dir()]
    if lacking:
        raise Refusal(
            f"{folder.name} is no folder of Stable Diffusion 1.x, 2.x or XL in diffusers' layout: it has no "
            f"{', '.join(lacking)}."
        )
    kinds: dict[str, Any] = {
        "unet": diffusers.UNet2DConditionModel, "vae": diffusers.AutoencoderKL,
        "text_encoder": transformers.CLIPTextModel, "text_encoder_2": transformers.CLIPTextModelWithProjection,
        "tokenizer": transformers.CLIPTokenizer, "tokenizer_2": transformers.CLIPTokenizer,
    }
    parts = {
        part: load_network(folder / part, kind, dtype) if issubclass(kind, torch.nn.Module)
        else load_tokenizer(folder / part, kind)
        for part, kind in kinds.items() if (folder / part).is_dir()
    }
    parts["scheduler"] = load_scheduler(folder / "scheduler")
    if parts["unet"].config.addition_embed_type == "text_time":
        if "text_encoder" in parts:
            return diffusers.StableDiffusionXLPipeline(**parts)
        # The refiner has the second text encoder only, and wants a score.
        parts.update(text_encoder=None, tokenizer=None, requires_aesthetics_score=True)
        return diffusers.StableDiffusionXLImg2ImgPipeline(**parts)
    return diffusers.StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )


def load_network(folder: Path, kind: Any, dtype: torch.dtype) -> Any:
    """A network of diffusers or transformers, in float16 where there are no other weights. Raises Refusal."""
    options: dict[str, Any] = {}
    if kind.__module__.startswith("transformers."):
        # A configuration file can name code for the attention too.
        content, fields = read_json(folder / "config.json"), inspect.signature(kind.config_class.__init__).parameters
        options["config"] = kind.config_class(**{key: content[key] for key in content if key in fields})
    halves = [".fp16" in file.name for file in folder.glob("*.safetensors")]
    if not halves:
        # Loading a pickle can run what is in it.
        raise Refusal(f"There are no weights of the {folder.name} as .safetensors.")
    network, found = kind.from_pretrained(
        folder, torch_dtype=dtype, variant="fp16" if all(halves) else None, use_safetensors=True, local_files_only=True,
        output_loading_info=True, **options,
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise Refusal(f"{folder.name} lacks {len(missing)} of its weights, the first of them {missing[0]}.")
    return network.eval()


def load_tokenizer(folder: Path, kind: Any) -> Any:
    """CLIP's. Raises Refusal where its files lack: transformers 5 makes one then that knows no word."""
    known = kind.vocab_files_names  # tokenizer.json from transformers 5 on
    whole = "tokenizer_file" in known and (folder / known["tokenizer_file"]).is_file()
    if not whole and not all((folder / known[part]).is_file() for part in ("vocab_file", "merges_file")):
        raise Refusal(f"{folder.name} lacks its vocab.json or merges.txt.")
    return kind.from_pretrained(folder, local_files_only=True)


def load_scheduler(folder: Path) -> Any:
    """The scheduler that a folder names, one of those that diffusers lists as exchangeable. Raises Refusal."""
    import diffusers
    from diffusers.schedulers import KarrasDiffusionSchedulers

    config = read_json(folder / "scheduler_config.json")
    name = config.get("_class_name")
    if name not in (*KarrasDiffusionSchedulers.__members__, "LCMScheduler", "TCDScheduler"):
        raise Refusal(readable(f"This host does not know the scheduler {name!r} of the model."))
    return getattr(diffusers, name).from_config(config)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises Refusal."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(readable(f"{file.name} in {file.parent.name} cannot be read: {error}.")) from error
    return content


def check_files(folder: Path) -> None:
    """Raise Refusal for Python code and adapters in the folder, and for a link that leads out of it (out of the model's
    part of a Hugging Face cache)."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            shown = path.relative_to(folder)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise Refusal(readable(f"{shown} in the model folder {folder.name} is a link that leads out of it."))
            if name == ADAPTER or name.lower().endswith(tuple(all_suffixes())):
                kind = "an adapter" if name == ADAPTER else "Python code"
                raise Refusal(readable(
                    f"The model folder {folder.name} brings {kind} ({shown}), and this host runs nothing that comes "
                    "with a model: take it out, or use a model without it."
                ))
