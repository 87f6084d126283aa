"""Loading a single checkpoint file (.safetensors or .ckpt) of Stable Diffusion 1.x, 2.x or XL without any download.

diffusers converts the weights; the configuration that it would fetch from a hub is derived from the weights' shapes.
"""
from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from .checkpoint_config import UNET, VAE, Shapes, component_configs
from .errors import ModelProblem
from .tokenizer import VOCABULARY, copy_vocabulary

TEXT, SDXL_TEXT = "cond_stage_model.", "conditioner."
UNET_SIGN = UNET + "input_blocks.0.0.weight"
FOREIGN_SIGNS = {
    "double_blocks.": "a Flux model",
    "joint_blocks.": "a Stable Diffusion 3 model",
    "transformer_blocks.": "a transformer model",
    "lora_": "a LoRA",
    "control_model.": "a ControlNet",
    "down_blocks.": "a part of a model in diffusers' layout",
}


def load_checkpoint(path: Path, dtype: torch.dtype) -> Any:
    """A diffusers pipeline of the checkpoint at path. Raises ModelProblem for what is not such a checkpoint."""
    import diffusers

    shapes = read_shapes(path)
    check_complete(path, shapes)
    configs = component_configs(shapes, v_prediction=predicts_v(path, shapes))
    with tempfile.TemporaryDirectory(prefix="onediff-config-") as folder:
        write_configs(Path(folder), configs)
        write_tokenizers(path, Path(folder), configs)
        pipeline = getattr(diffusers, configs["model_index"]["_class_name"])
        options = {} if "XL" in pipeline.__name__ else {"safety_checker": None}
        return pipeline.from_single_file(
            str(path), config=folder, local_files_only=True, torch_dtype=dtype, **options
        )


def read_shapes(path: Path) -> Shapes:
    """The shape of every weight in the file, by name. Raises ModelProblem when the file is damaged."""
    if path.suffix == ".safetensors":
        return safetensors_shapes(path)
    try:
        # torch 2.1 maps a file by a name alone.
        content = torch.load(str(path), map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise ModelProblem(
            f"{path.name} cannot be read as a checkpoint of plain weights: it is damaged, or it contains Python "
            "objects, which this host does not load. Convert it to .safetensors."
        ) from error
    # Some files hold it one level down. More levels are no checkpoint's, and one that holds itself has no end.
    if isinstance(content, dict):
        content = content.get("state_dict", content)
    if not isinstance(content, dict) or "state_dict" in content:
        raise ModelProblem(f"{path.name} does not hold the weights of a model.")
    return {name: tuple(value.shape) for name, value in content.items() if isinstance(value, torch.Tensor)}


def safetensors_shapes(path: Path) -> Shapes:
    """The shape of every weight in a .safetensors file, read from its header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelProblem(f"{path.name} is not a complete .safetensors file ({error}).") from error


def check_complete(path: Path, shapes: Shapes) -> None:
    """Raise ModelProblem unless the file holds a UNet, a VAE and a text encoder."""
    if UNET_SIGN not in shapes:
        for sign, kind in FOREIGN_SIGNS.items():
            if any(sign in name for name in shapes):
                raise ModelProblem(
                    f"{path.name} is {kind}; this host runs checkpoints of Stable Diffusion 1.x, 2.x and XL."
                )
        raise ModelProblem(f"{path.name} is not a checkpoint of Stable Diffusion 1.x, 2.x or XL.")
    parts = {"VAE": (VAE,), "text encoder": (TEXT, SDXL_TEXT)}
    missing = [part for part, starts in parts.items() if not any(name.startswith(starts) for name in shapes)]
    if missing:
        raise ModelProblem(f"{path.name} is incomplete: it holds a UNet but no {' and no '.join(missing)}.")


def predicts_v(path: Path, shapes: Shapes) -> bool:
    """Whether the model predicts v rather than noise, which weights do not say.

    A .yaml beside the file decides, as in A1111; then the mark that XL checkpoints carry; then Stable Diffusion 2
    counts as predicting v.
    """
    original_config = path.with_suffix(".yaml")
    if original_config.is_file():
        settings = original_config.read_text(encoding="utf-8", errors="replace").splitlines()
        return any(line.split("#")[0].strip() in ("parameterization: v", 'parameterization: "v"') for line in settings)
    return "v_pred" in shapes or any(name.startswith("cond_stage_model.model.") for name in shapes)


def write_configs(folder: Path, configs: dict[str, dict[str, Any]]) -> None:
    """Write the configurations as a folder in diffusers' layout."""
    for part, config in configs.items():
        name = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}.get(
            part, f"{part}/config.json"
        )
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(config), encoding="utf-8")


def write_tokenizers(path: Path, folder: Path, configs: dict[str, dict[str, Any]]) -> None:
    """Add the tokenizers; all of Stable Diffusion's share one vocabulary and differ in the padding token."""
    for part in [part for part in configs if part.startswith("text_encoder")]:
        place = folder / part.replace("text_encoder", "tokenizer")
        place.mkdir()
        copy_vocabulary(path, place)
        encoder = configs[part]
        size = len(json.loads((place / VOCABULARY).read_text(encoding="utf-8")))
        if size > encoder["vocab_size"]:
            raise ModelProblem(
                f"The tokenizer found for {path.name} has {size} tokens, its text encoder {encoder['vocab_size']}: "
                "they do not belong together."
            )
        pad = "!" if encoder["hidden_act"] == "gelu" else "<|endoftext|>"
        settings = {"model_max_length": 77, "pad_token": pad, "unk_token": "<|endoftext|>"}
        (place / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
