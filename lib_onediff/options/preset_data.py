"""The presets and what is known of single checkpoints: data, to be edited freely.

Unknown option names and invalid values are ignored at run time; a test lists them.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

QUALITY, BALANCED, SPEED, DRAFTS = "Quality first", "Balanced", "Speed first", "Fast drafts"
# How far a preset takes images from the host's in float32, by the judge (.readme/measuring.md): the rows of
#   python -m lib_onediff.bench quality --dtype fp16 --set deepcache_interval=2 --set ...
# on a GPU, where Low-bit is in every layer.
DISTANCES = {BALANCED: 0.01, SPEED: 0.046, DRAFTS: 0.14}
# What computes each layer faster than exactly, whatever DeepCache does.
FASTER_LAYERS: Mapping[str, Any] = {
    "matmul_accumulation": "half", "convolution_accumulation": "half", "reduced_precision_reduction": "on",
    "tf32": "on", "vae_precision": "fp16",
}


@dataclass(frozen=True)
class Preset:
    """values: what differs from the options' defaults.

    explanation: names its measured distance.
    """

    name: str
    explanation: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """What a family of checkpoints bears. marks: a checkpoint is of it if its name has one of these, letters and digits
    alone; of several profiles the first counts. changes: what is different there, by the preset's name."""

    name: str
    marks: tuple[str, ...]
    reason: str
    changes: Mapping[str, Mapping[str, Any]]


PRESETS = (
    Preset(QUALITY, "Everything exact: images differ from the WebUI's own by rounding alone."),
    Preset(
        BALANCED,
        f"Half of the steps compute a small part of the UNet (distance {DISTANCES[BALANCED]}): about twice as fast.",
        {"deepcache_interval": 2},
    ),
    Preset(
        SPEED,
        f"Two of three steps compute part of the UNet, products in INT8 (distance {DISTANCES[SPEED]}).",
        {"deepcache_interval": 3, "low_bit": "int8", **FASTER_LAYERS},
    ),
    Preset(
        DRAFTS,
        f"Four of five steps compute part of the UNet, products in INT8 (distance {DISTANCES[DRAFTS]}).",
        {"deepcache_interval": 5, "deepcache_depth": 2, "low_bit": "int8", **FASTER_LAYERS},
    ),
)
PROFILES = (
    Profile(
        "few-step checkpoints", ("turbo", "lightning", "lcm", "hypersd", "dmd2"),
        "They take 1 to 8 steps, each of which changes the whole image: there is nothing to take over from the step "
        "before.",
        {preset: {"deepcache_interval": 1} for preset in (BALANCED, SPEED, DRAFTS)},
    ),
    Profile(
        "SDXL base", ("sdxlbase", "stablediffusionxlbase"),
        "It is known to be sensitive: errors in its UNet show as paler colours, and its own VAE overflows in fp16.",
        {
            preset: {
                "deepcache_interval": interval, "matmul_accumulation": "full", "low_bit": "off",
                "vae_precision": "auto",
            } for preset, interval in ((SPEED, 2), (DRAFTS, 3))
        },
    ),
    Profile(
        "playground-v2.5", ("playgroundv25", "playground25"),
        "It bears more than SDXL base, from which its network comes: its images keep their contrast.",
        {BALANCED: {"deepcache_interval": 3}},
    ),
    Profile(
        "SD 2.1", ("v21768", "v21512", "sd21", "stablediffusion21"),
        "Its attention overflows in fp16 where sums are not kept in float32.",
        {preset: {"matmul_accumulation": "full", "reduced_precision_reduction": "auto"} for preset in (SPEED, DRAFTS)},
    ),
)
