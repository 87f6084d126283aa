"""The parts of a model in diffusers' layout, made by us of their JSON and .safetensors files.

from_pretrained of diffusers and transformers looks into the folder for Python, pickles and adapters; nothing here does.
"""
from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelProblem
from .model_folder import LEFT_OUT, MODEL_CONFIG, is_plain, read_index, read_json
from .tokenizer import MERGES, VOCABULARY

SCHEDULER_CONFIG = "scheduler_config.json"
# What each library calls a part's weights.
WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
# What diffusers' first releases called the layers of a VAE's attention.
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
MOST_NAMED = 3


def load_folder(folder: Path, dtype: torch.dtype) -> Any:
    """The pipeline of a folder, its weights in dtype on the CPU. Raises ModelProblem, and whatever diffusers raises."""
    import diffusers

    index = read_index(folder)
    kind = getattr(diffusers, index["_class_name"])
    known = inspect.signature(kind.__init__).parameters
    given: dict[str, Any] = {part: None for part in LEFT_OUT if part in known}
    for name, named in index.items():
        if name not in known or name in LEFT_OUT:
            continue
        given[name] = named if is_plain(named) else make_part(folder / name, dtype, *named)
    if "requires_safety_checker" in known:
        given["requires_safety_checker"] = False
    return kind(**given)


def make_part(folder: Path, dtype: torch.dtype, library: str | None, name: str) -> Any:
    """A part of a pipeline: folder's, of a class that read_index has let pass."""
    import diffusers
    import transformers

    if library is None:
        return None
    kind = getattr(diffusers if library == "diffusers" else transformers, name)
    if "Tokenizer" in name:
        return make_tokenizer(folder, kind)
    if "Scheduler" in name:
        return kind.from_config(read_json(folder / SCHEDULER_CONFIG))
    return make_network(folder, library, kind, dtype)


def make_network(folder: Path, library: str, kind: Any, dtype: torch.dtype) -> Any:
    """A network with the weights in folder. Raises ModelProblem where one is missing, RuntimeError for another shape.
    """
    config = read_json(folder / MODEL_CONFIG)
    # Its own weights would be drawn in vain, which takes longer than to read those of the folder.
    with torch.device("meta"):
        network = kind.from_config(config) if library == "diffusers" else kind(text_config(config))
    weights = {newer(name): weight for name, weight in weights_in(folder, WEIGHTS[library], dtype).items()}
    missing = network.load_state_dict(weights, strict=False, assign=True).missing_keys
    if missing:
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise ModelProblem(f"The weights in {folder.name} lack {', '.join(missing[:MOST_NAMED])}{more}.")
    count_positions(network)
    return network.eval()


def text_config(config: dict[str, Any]) -> Any:
    from transformers import CLIPTextConfig

    known = inspect.signature(CLIPTextConfig.__init__).parameters
    return CLIPTextConfig(**{name: value for name, value in config.items() if name in known})


def newer(name: str) -> str:
    """A weight's name in diffusers of today."""
    block, *old = name.rsplit(".", 2)
    return f"{block}.{OLD_NAMES[old[0]]}.{old[1]}" if len(old) == 2 and old[0] in OLD_NAMES else name


def count_positions(network: nn.Module) -> None:
    """Number the positions of a text encoder, which no file holds."""
    for name, numbers in list(network.named_buffers()):
        if numbers.is_meta:
            place, _, own = name.rpartition(".")
            counted = torch.arange(numbers.shape[-1]).expand(numbers.shape)
            network.get_submodule(place).register_buffer(own, counted, persistent=False)


def weights_in(folder: Path, stem: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a part, in one file or several, those in float16 where there are no others."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for names in (f"{stem}.safetensors", f"{stem}-*-of-?????.safetensors", f"{stem}.fp16.safetensors",
                  f"{stem}.fp16-*-of-*.safetensors", f"{stem}-*-of-*.fp16.safetensors"):
        for file in sorted(folder.glob(names)):
            try:
                found = load_file(file)
            except (SafetensorError, OSError) as error:
                raise ModelProblem(f"{file.name} is not a complete .safetensors file ({error}).") from error
            weights |= {name: weight.to(dtype) if weight.is_floating_point() else weight
                        for name, weight in found.items()}
        if weights:
            return weights
    raise ModelProblem(f"There are no weights {stem}.safetensors in {folder.name}.")


def make_tokenizer(folder: Path, kind: Any) -> Any:
    """CLIP's tokenizer of the vocabulary in folder, with its special tokens."""
    said: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            said |= read_json(folder / name)
    options = {"model_max_length": said.get("model_max_length", 77)}
    for name in [name for name in TOKENS if name in said]:
        options[name] = said[name]["content"] if isinstance(said[name], dict) else said[name]
    for file in (VOCABULARY, MERGES):
        if not (folder / file).is_file():
            raise ModelProblem(f"The tokenizer in {folder.name} has no {file}.")
    return kind(str(folder / VOCABULARY), str(folder / MERGES), **options)


