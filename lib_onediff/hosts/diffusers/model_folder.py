"""Loads a model folder in diffusers' layout that may be malicious. Reads JSON, a tokenizer's vocabulary and
.safetensors files, and runs no code from the folder.

A model_index.json can name any Python module for a part of the pipeline, even a file in the folder, and a pipeline's
own from_pretrained would run it. Here, the folder does not decide the class of any part.
"""
from __future__ import annotations

import math
import reprlib
from pathlib import Path
from typing import Any

import torch

from ...core.logs import readable
from ...core.refusal import Refusal
from .model_files import check_files, read_json, read_shapes, weight_files
from .tokenizer import load_tokenizer

# The folders that a model folder must have.
NEEDED = ("unet", "vae", "scheduler")
# The file with the configuration, in the folder of each network.
CONFIG = "config.json"
# The entries of a text encoder's configuration that are used. Others can name other weights, or code.
TEXT_CONFIG = (
    "vocab_size", "hidden_size", "intermediate_size", "projection_dim", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "hidden_act", "layer_norm_eps", "attention_dropout", "initializer_range",
    "initializer_factor", "pad_token_id", "bos_token_id", "eos_token_id",
)
# Entries of a configuration, by which check_size limits the number of a network's layers: the largest number in each
# entry of COUNTS, all multiplied with each other and with the length of the longest list in BLOCKS.
COUNTS = ("layers_per_block", "transformer_layers_per_block", "reverse_transformer_layers_per_block",
          "num_hidden_layers")
BLOCKS = ("block_out_channels", "down_block_types", "up_block_types")
# A configuration may describe at most this many times the weights in the files: a limit against configurations of huge
# networks. load_network refuses a network of which any weight is missing.
FEWER_WEIGHTS = 2
# The largest num_train_timesteps and number of trained_betas of a scheduler.
MOST_TRAIN_STEPS = 100_000
# The largest sample_size of a UNet, in latent pixels.
LARGEST_SAMPLE = 100_000


def load_folder(folder: Path, dtype: torch.dtype) -> Any:
    """The diffusers pipeline of a model folder, with its weights in dtype on the CPU: Stable Diffusion, XL, or for an
    XL refiner the img2img pipeline. Its class follows from the UNet, never from model_index.json. It has no safety
    checker.

    Raises Refusal if the folder is not a Stable Diffusion model in diffusers' layout, or not safe to load. Exceptions
    of diffusers and transformers are raised as they are.
    """
    import diffusers
    import transformers

    lacking = [f"{part}/" for part in NEEDED if not (folder / part).is_dir()]
    if lacking:
        raise Refusal(
            f"{readable(folder.name)} is not a Stable Diffusion 1.x, 2.x or XL model in diffusers' layout: it has no "
            f"{', '.join(lacking)}."
        )
    check_files(folder)
    # Small files come first, so that an error in them is reported before gigabytes of weights are read.
    parts = {"scheduler": load_scheduler(folder / "scheduler")}
    for name in ("tokenizer", "tokenizer_2"):
        if (folder / name).is_dir():
            parts[name] = load_tokenizer(folder / name, transformers.CLIPTokenizer)
    networks: dict[str, Any] = {
        "text_encoder": transformers.CLIPTextModel, "text_encoder_2": transformers.CLIPTextModelWithProjection,
        "vae": diffusers.AutoencoderKL, "unet": diffusers.UNet2DConditionModel,
    }
    present = {name: kind for name, kind in networks.items() if (folder / name).is_dir()}
    for name, kind in present.items():
        check_network(folder / name, kind)
    for name, kind in present.items():
        parts[name] = load_network(folder / name, kind, dtype)
    if parts["unet"].config.addition_embed_type == "text_time":
        if "text_encoder" in parts:
            return diffusers.StableDiffusionXLPipeline(**parts)
        # The refiner has only the second text encoder, and takes an aesthetics score.
        parts.update(text_encoder=None, tokenizer=None, requires_aesthetics_score=True)
        return diffusers.StableDiffusionXLImg2ImgPipeline(**parts)
    return diffusers.StableDiffusionPipeline(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )


def load_unet(path: Path) -> Any:
    """The UNet2DConditionModel in a model folder in diffusers' layout, in its unet folder, or in a .safetensors
    checkpoint, in float32 on the CPU. path: any of the three. Raises as load_folder."""
    from diffusers import UNet2DConditionModel

    if not path.is_dir():
        read_shapes(path)
        return UNet2DConditionModel.from_single_file(str(path), local_files_only=True)
    folder = path / "unet" if (path / "unet").is_dir() else path
    check_files(folder)
    check_network(folder, UNet2DConditionModel)
    return load_network(folder, UNet2DConditionModel, torch.float32)


def load_network(folder: Path, kind: Any, dtype: torch.dtype) -> Any:
    """The network in a folder, in eval mode, with its weights in dtype on the CPU. The folder must have passed
    check_network. Reads the .fp16 files only if there are no other weight files.

    kind: the network's class, of diffusers or transformers. Raises Refusal if weights are missing. Weights that the
    network does not have are ignored.
    """
    options: dict[str, Any] = {}
    if is_text_encoder(kind):
        options["config"] = text_config(kind, read_json(folder / CONFIG))
    halves = [".fp16" in name for name in weight_files(folder)]
    network, found = kind.from_pretrained(
        folder, torch_dtype=dtype, variant="fp16" if all(halves) else None, use_safetensors=True, local_files_only=True,
        output_loading_info=True, **options,
    )
    missing = sorted(found["missing_keys"])
    if missing:
        raise Refusal(f"{len(missing)} weights are missing in {folder.name}, the first of them {missing[0]}.")
    return network.eval()


def check_network(folder: Path, kind: Any) -> None:
    """Raise Refusal if the weights or the configuration in a network's folder are not safe to load: files that are not
    .safetensors, invalid numbers, or a much larger network than there are weights for. kind: the network's class."""
    names = weight_files(folder)
    config = read_json(folder / CONFIG)
    check_numbers(folder.name, config)
    check_size(folder, kind, config, names)


def is_text_encoder(kind: Any) -> bool:
    """Whether a network's class is of the library transformers, as text encoders are, and not of diffusers."""
    return bool(kind.__module__.startswith("transformers."))


def text_config(kind: Any, config: dict[str, Any]) -> Any:
    """A text encoder's configuration object with the entries of TEXT_CONFIG; an entry that config lacks gets its
    default. kind: the encoder's class. config: the content of its config.json."""
    return kind.config_class(**{name: config[name] for name in TEXT_CONFIG if name in config})


def check_size(folder: Path, kind: Any, config: dict[str, Any], names: list[str]) -> None:
    """Raise Refusal if a configuration describes a much larger network than there are weights for: creating it could
    take hours, or all memory.

    folder: the network's. kind: the network's class. config: the content of config.json. names: the files with weights.
    """
    shapes = [shape for name in names for shape in read_shapes(folder / name).values()]
    counts = [most_in(config[name], name, folder) for name in COUNTS if config.get(name) is not None]
    blocks = [len(config[name]) for name in BLOCKS if isinstance(config.get(name), list)]
    layers = math.prod([*counts, max([1, *blocks])])
    held = sum(map(math.prod, shapes))
    if layers <= len(shapes):
        # On this device, parameters take neither time nor memory.
        with torch.device("meta"):
            network = kind(text_config(kind, config)) if is_text_encoder(kind) else kind.from_config(config)
        if sum(parameter.numel() for parameter in network.parameters()) <= FEWER_WEIGHTS * held:
            return
    raise Refusal(
        f"config.json in {folder.name} describes a much larger network than there are weights for, so the model is not "
        "loaded. Copy the model folder again."
    )


def most_in(value: Any, name: str, folder: Path) -> int:
    """The largest number in `value`, which must be a whole number from 1, or a list of such numbers or lists of them.
    Raises Refusal for other values, such as an empty list. name: the value's, in the configuration of the network in
    `folder`, for the message."""
    numbers = []
    for one in value if isinstance(value, list) else [value]:
        numbers += one if isinstance(one, list) and one else [one]
    if not numbers or not all(is_whole(number) and number >= 1 for number in numbers):
        shown = reprlib.repr(value)
        raise Refusal(readable(f"config.json in {folder.name} has {name} = {shown} instead of a number of layers."))
    return max(numbers)


def check_numbers(part: str, config: dict[str, Any]) -> None:
    """Raise Refusal for quantized weights, and for invalid numbers in a configuration that would otherwise fail only
    while an image is made: a UNet's sample_size, which must be given, and a VAE's scaling_factor, latents_mean and
    latents_std, which may be missing. part: the name of the network's folder; only "unet" and "vae" have numbers."""
    if config.get("quantization_config") is not None:
        raise Refusal(f"The weights of the {part} are quantized, which OneDiff cannot load.")
    if part == "unet":
        sides: Any = config.get("sample_size")
        known = sides if isinstance(sides, list) and len(sides) == 2 else [sides]
        if not all(is_whole(side) and 0 < side <= LARGEST_SAMPLE for side in known):
            raise Refusal(readable(f"config.json in {part} has sample_size = {sides!r} instead of a latent's size."))
    if part == "vae":
        factor: Any = config.get("scaling_factor", 1)
        if not is_real(factor) or factor <= 0:
            raise Refusal(readable(f"config.json in {part} has scaling_factor = {factor!r} instead of a factor."))
        for name in ("latents_mean", "latents_std"):
            values = config.get(name)
            if values is not None and not (isinstance(values, list) and all(map(is_real, values))):
                raise Refusal(readable(f"config.json in {part} has {name} = {values!r} instead of a list of numbers."))


def is_whole(value: Any) -> bool:
    """Whether a value is a Python int, of either sign; False for a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    """Whether a value is a finite int or float; False for a boolean."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def load_scheduler(folder: Path) -> Any:
    """The scheduler that a folder's scheduler_config.json describes. Raises Refusal for invalid numbers, and for a
    class that is neither in diffusers' KarrasDiffusionSchedulers, nor LCMScheduler or TCDScheduler."""
    import diffusers
    from diffusers.schedulers import KarrasDiffusionSchedulers

    config = read_json(folder / "scheduler_config.json")
    name = config.get("_class_name")
    if name not in (*KarrasDiffusionSchedulers.__members__, "LCMScheduler", "TCDScheduler"):
        raise Refusal(readable(f"OneDiff does not support the model's scheduler {name!r}."))
    check_schedule(config)
    return getattr(diffusers, name).from_config(config)


def check_schedule(config: dict[str, Any]) -> None:
    """Raise Refusal for invalid numbers in a scheduler's configuration, with which the scheduler would take all memory,
    or make useless images. A missing entry is valid."""
    steps = config.get("num_train_timesteps", 1000)
    if not is_whole(steps) or not 0 < steps <= MOST_TRAIN_STEPS:
        raise Refusal(readable(f"The model's scheduler has num_train_timesteps = {steps!r}, which is not valid."))
    for name in ("beta_start", "beta_end"):
        beta = config.get(name, 0)
        if not is_real(beta) or not 0 <= beta < 1:
            raise Refusal(readable(f"The model's scheduler has {name} = {beta!r}, which is not a number from 0 to 1."))
    betas = config.get("trained_betas")
    if betas is None:
        return
    if not isinstance(betas, list) or len(betas) > MOST_TRAIN_STEPS or not all(map(is_real, betas)):
        raise Refusal("The model's scheduler has trained_betas that are not a list of numbers.")
