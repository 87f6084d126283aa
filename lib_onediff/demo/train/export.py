"""The trained model as a folder in diffusers' layout, with its card."""
from __future__ import annotations

import json
from typing import Any

import torch

from .networks import make_schedule, size_of
from .setup import Setup
from .sources import Catalogue

PARTS = {
    "vae": ("diffusers", "AutoencoderKL"), "text_encoder": ("transformers", "CLIPTextModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"), "unet": ("diffusers", "UNet2DConditionModel"),
    "scheduler": ("diffusers", "DDIMScheduler"),
}
CARD = """---
license: apache-2.0
pipeline_tag: text-to-image
---
# emoji-sd

A small text-to-image model that draws emoji: {unet:.1f} million parameters of UNet, {text:.1f} of text encoder and
{vae:.1f} of VAE, in the layout of Stable Diffusion 1.5. It exists so that OneDiff can be tried, and its quality
measured, without a download. It knows {emoji} emoji by their names, in two styles (the second is called "flat"), on
backgrounds of ten colours, alone or two beside each other: "a red apple on a blue background", "a cat and a rocket".

Made for 256x256; from 128 to 512 pixels a side work. 20 steps, guidance 3 to 6. It predicts the velocity, as
scheduler/scheduler_config.json says.

**A1111 and Forge cannot load it**: they expect the vocabulary of CLIP-L, and this one has {tokens} tokens of its own.
diffusers loads it: `StableDiffusionPipeline.from_pretrained("emoji-sd")`. OneDiff's own demo draws with it.

## What it was trained on

{origins}

Noto Emoji is by Google (https://github.com/googlefonts/noto-emoji), Apache License 2.0. Fluent Emoji is by Microsoft
(https://github.com/microsoft/fluentui-emoji), MIT License, copyright Microsoft Corporation. Names and keywords are
of emojibase (https://github.com/milesj/emojibase), MIT License, copyright Miles Johnson. Nothing else went in.

The weights are under the Apache License 2.0, as OneDiff is. How it was trained, and how again:
lib_onediff/demo/train/README.md.

## What it cannot do

Anything but emoji. Flags, letters, clock faces and skin tones were left out. Words that are in no name are guessed.
"""


def export(setup: Setup, unet: Any, text: Any) -> None:
    """Write all but the VAE, which is there, in half precision. The networks stay as they are."""
    for name, network in (("unet", unet), ("text_encoder", text)):
        kinds = {key: value.dtype for key, value in network.state_dict().items()}
        halves = {
            key: value.half() if kinds[key].is_floating_point else value for key, value in network.state_dict().items()
        }
        fresh = type(network).from_config(network.config) if name == "unet" else type(network)(network.config)
        fresh.load_state_dict(halves)
        fresh.to(torch.float16).save_pretrained(setup.model / name)
    make_schedule().save_pretrained(setup.model / "scheduler")
    setup.tokenizer_folder()
    write_index(setup)
    write_card(setup, unet, text)


def write_index(setup: Setup) -> None:
    import diffusers

    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": diffusers.__version__}
    index |= {name: list(kind) for name, kind in PARTS.items()}
    index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    (setup.model / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_card(setup: Setup, unet: Any, text: Any) -> None:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(setup.model / "vae", local_files_only=True)
    card = CARD.format(
        unet=size_of(unet) / 1e6, text=size_of(text) / 1e6, vae=size_of(vae) / 1e6, emoji=len(setup.catalogue),
        tokens=text.config.vocab_size, origins=origins(setup.catalogue),
    )
    (setup.model / "README.md").write_text(card, encoding="utf-8")


def origins(catalogue: Catalogue) -> str:
    return "\n".join(f"- {each['name']} {each['version']}, {each['license']}" for each in catalogue.origins)
