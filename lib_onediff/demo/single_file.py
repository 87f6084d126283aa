"""A single checkpoint file of Stable Diffusion 1.x, 2.x or XL, loaded by diffusers without any download."""
from __future__ import annotations

import json
import logging
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..core.refusal import Refusal

log = logging.getLogger("onediff")
Shapes = dict[str, tuple[int, ...]]

CONFIGS = Path(__file__).with_name("checkpoint_configs.json")
UNET_SIGN = "model.diffusion_model.input_blocks.0.0.weight"
VAE_SIGN = "first_stage_model.decoder.conv_in.weight"
# The weight of a text encoder that only this family has.
FAMILY_SIGNS = {
    "conditioner.embedders.1.model.token_embedding.weight": "sdxl",
    "cond_stage_model.model.token_embedding.weight": "sd2",
    "cond_stage_model.transformer.text_model.embeddings.token_embedding.weight": "sd1",
}
V_IN_YAML = re.compile(r'^\s*parameterization:\s*"?v"?\s*(#.*)?$', re.MULTILINE)
CACHED = ("openai/clip-vit-large-patch14",)
VOCABULARY = ("vocab.json", "merges.txt")


def load_checkpoint(path: Path, dtype: torch.dtype) -> Any:
    """A diffusers pipeline of the checkpoint at path. Raises Refusal for what is not such a checkpoint."""
    import diffusers

    shapes = read_shapes(path)
    family = family_of(path, shapes)
    configs = json.loads(CONFIGS.read_text(encoding="utf-8"))[family]
    configs["unet/config.json"]["in_channels"] = shapes[UNET_SIGN][1]
    # Weights do not say whether a model predicts v. As in A1111 a .yaml beside the file does; else XL checkpoints carry
    # a mark, and Stable Diffusion 2 counts as predicting it.
    predicts_v = "v_pred" in shapes or family == "sd2"
    original = path.with_suffix(".yaml")
    if original.is_file():
        predicts_v = V_IN_YAML.search(original.read_text(encoding="utf-8", errors="replace")) is not None
    configs["scheduler/scheduler_config.json"]["prediction_type"] = "v_prediction" if predicts_v else "epsilon"
    kind = configs["model_index.json"]["_class_name"]
    with tempfile.TemporaryDirectory(prefix="onediff-config-") as folder:
        for name, config in configs.items():
            file = Path(folder, name)
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(config), encoding="utf-8")
            if file.name == "tokenizer_config.json":
                copy_vocabulary(path, file.parent)
        options = {} if "XL" in kind else {"safety_checker": None}
        return getattr(diffusers, kind).from_single_file(
            str(path), config=folder, local_files_only=True, torch_dtype=dtype, **options
        )


def read_shapes(path: Path) -> Shapes:
    """The shape of every weight in the file, by name. Raises Refusal for what is no .safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        # Loading any other can run what is in it.
        raise Refusal(f"{path.name} is not a complete .safetensors file ({error}).") from error


def family_of(path: Path, shapes: Shapes) -> str:
    """Which family a checkpoint belongs to. Raises Refusal unless it holds a UNet, a VAE and a text encoder."""
    family = next((family for sign, family in FAMILY_SIGNS.items() if sign in shapes), None)
    missing = {"UNet": UNET_SIGN not in shapes, "VAE": VAE_SIGN not in shapes, "text encoder": family is None}
    if family is None or any(missing.values()):
        raise Refusal(
            f"{path.name} is no checkpoint of Stable Diffusion 1.x, 2.x or XL: it holds no "
            f"{' and no '.join(part for part, lacking in missing.items() if lacking)} of these."
        )
    return family


def copy_vocabulary(checkpoint: Path, folder: Path) -> None:
    """Put the files of CLIP's tokenizer into folder, from beside the checkpoint or from the Hugging Face cache. Raises
    Refusal, saying what to put where, when there are none."""
    from transformers.utils import cached_file

    parent = checkpoint.resolve().parent
    for place in (parent / "tokenizer", parent / checkpoint.stem / "tokenizer", *CACHED):
        try:
            for name in VOCABULARY:
                shutil.copy(cached_file(str(place), name, local_files_only=True) or "", folder)
            return
        except Exception:
            # What is raised where there is none depends on what else is installed.
            log.debug("no tokenizer in %s", place, exc_info=True)
    raise Refusal(
        f"{checkpoint.name} holds no tokenizer, and CLIP's was not found on this machine. Put a folder named tokenizer "
        "with vocab.json and merges.txt beside it (every Stable Diffusion folder in diffusers' layout has one)."
    )
