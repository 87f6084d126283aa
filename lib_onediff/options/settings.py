"""Every option of the product, defined once.

The settings page, the REST API, compile_unet's arguments and the table in .readme/options.md derive from the fields of
Settings.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..shapes.sizes import MOST_SIZES, parse_sizes
from . import deepcache_values as deepcache
from .migration import migrate_low_bit
from .option import allowed_values, check_value, current_value, did_you_mean, format_value, option

HOST_KEY_PREFIX = "onediff_"
# Where a user finds the switch; its label stands in Settings below.
OFF_IN_SETTINGS = "OneDiff is switched off in the settings (Settings > OneDiff > Use OneDiff)"
# A TiB: more than any GPU has.
MOST_GRAPH_MEMORY_MIB = 1 << 20
# The groups of the settings page, in its order.
GENERAL, SPEED, QUALITY, CACHE, PREWARM, ADVANCED = GROUPS = (
    "General", "Speed", "Quality", "Cache", "Pre-warm", "Advanced",
)
# What the check of a shape's first use lets pass. Float8 keeps three bits after the point of every factor, int8 seven
# of the largest of a row. Seen of float8: 2e-2 in SDXL, 7e-2 in very small networks. A wrong one is off by 1.
MOST_LOW_BIT_ERROR = 0.12
EXACT_ATTENTION = "exact"
# Beyond it, a line through two outputs misses the image.
MOST_FORECAST = 4
# One GPU computes; the next one that has room; or this one.
ONE_GPU = "off"
SECOND_GPUS = (ONE_GPU, "auto", *map(str, range(8)))
WITHOUT_KERNELS = {"backend": ("cudagraph", "oneflow", "eager")}
WITHOUT_DEEPCACHE = {"deepcache_interval": (1,)}


@dataclass(frozen=True)
class Settings:
    """One consistent set of choices. Immutable, so that a running call cannot see half a change."""

    enabled: bool = option(
        True, "Use OneDiff", "Off: OneDiff takes its hooks out; the WebUI's own UNet generates every image.",
        group=GENERAL, per_run=True,
    )
    backend: str = option(
        "auto", "Backend", "How the UNet is computed. auto: the fastest that runs here, measured once.",
        group=GENERAL, choices=("auto", "native", "cudagraph", "oneflow", "eager"), per_run=True,
        replaced={"inductor": "auto"},
    )
    verify: bool = option(
        True, "Check the first use of every shape",
        "The first UNet call at a new shape is compared with the WebUI's own UNet.",
        group=QUALITY, per_run=True,
    )
    vae_precision: str = option(
        "auto", "VAE precision",
        "How the VAE decodes and encodes. auto: as the WebUI does, in fp32 where fp16 overflows.",
        group=QUALITY, choices=("auto", "fp16", "bf16", "fp32"), per_run=True,
    )
    matmul_accumulation: str = option(
        "full", "Accumulation in matrix products",
        "half: float16 products are summed in float16; lossy. Needs torch 2.7.",
        group=ADVANCED, choices=("full", "half"), per_run=True,
    )
    convolution_accumulation: str = option(
        "full", "Accumulation in convolutions",
        "half: the same for convolutions, where the backend can; PyTorch cannot.",
        group=ADVANCED, choices=("full", "half"), per_run=True,
        no_effect_when={"backend": ("auto", "native", "cudagraph", "eager")},
    )
    reduced_precision_reduction: str = option(
        "auto", "Reduced-precision reduction",
        "Partial sums of matrix products in float16 or bfloat16; auto: the WebUI's choice.",
        group=ADVANCED, choices=("auto", "on", "off"), per_run=True,
    )
    tf32: str = option(
        "auto", "TF32", "Multiplies float32 with ten bits after the point; auto: the WebUI's choice.",
        group=ADVANCED, choices=("auto", "on", "off"), per_run=True,
    )
    attention_upcast: str = option(
        "auto", "Attention in float32",
        "Slower. auto: where the WebUI does it, or after an overflow.",
        group=QUALITY, choices=("auto", "on", "off"), per_run=True,
    )
    low_bit: str = option(
        "off", "Low-bit", "Large matrix products in 8 bits: faster, lossy. auto: what was measured to be faster.",
        group=SPEED, choices=("off", "auto", "int8", "fp8"), per_run=True, no_effect_when=WITHOUT_KERNELS,
    )
    low_bit_only: bool = option(
        False, "Low-bit only", "8 bits alone on the GPU: 2.8 GiB for SDXL's UNet.",
        group=SPEED, per_run=True, no_effect_when={**WITHOUT_KERNELS, "low_bit": ("off",)},
    )
    low_bit_budget: float = option(
        0.02, "Low-bit error budget",
        "Error that Low-bit may make; layers beyond stay exact. 0.12: any.",
        group=SPEED, per_run=True, bounds=(0.0, MOST_LOW_BIT_ERROR), step=0.005,
        no_effect_when={"low_bit": ("off",), "low_bit_only": (True,)},
    )
    attention: str = option(
        EXACT_ATTENTION, "Attention",
        "sage: attention by the package sageattention, lossy.",
        group=SPEED, choices=(EXACT_ATTENTION, "sage"), per_run=True,
        no_effect_when={**WITHOUT_KERNELS, "attention_upcast": ("on",)},
    )
    second_gpu: str = option(
        ONE_GPU, "Second GPU",
        "Another GPU computes half of every UNet call (prompt, negative prompt). auto: the next.",
        group=SPEED, choices=SECOND_GPUS,
    )
    memory_budget: int = option(
        0, "Graph memory in MiB", "GPU memory that all graphs may hold. 0: a quarter of the card.",
        group=CACHE, bounds=(0, MOST_GRAPH_MEMORY_MIB),
    )
    prewarm: str = option(
        "", "Pre-warm list", "Sizes to make ready after a checkpoint loads: 512x512, 768x512 x2.",
        group=PREWARM, check=parse_sizes,
    )
    prewarm_most_used: int = option(
        0, "Pre-warm the most used sizes", "How many to make ready after a checkpoint loads.",
        group=PREWARM, bounds=(0, MOST_SIZES),
    )
    idle_prewarm: bool = option(
        False, "Pre-warm while idle", "After a minute without an image, the most used sizes are made ready.",
        group=PREWARM,
    )

    deepcache_interval: int = option(
        1, "DeepCache interval", "One in this many sampling steps computes the whole UNet. 1: off. Lossy.",
        group=SPEED, per_run=True, bounds=(1, deepcache.MOST_INTERVAL),
    )
    deepcache_depth: int = option(
        1, "DeepCache depth", "What the other steps compute: 1 is fastest, more is nearer.",
        group=SPEED, per_run=True, bounds=(1, deepcache.MOST_DEPTH), no_effect_when=WITHOUT_DEEPCACHE,
    )
    deepcache_start: float = option(
        0.0, "DeepCache start", "Up to this fraction of an image's steps every step is whole.",
        group=SPEED, per_run=True, bounds=(0.0, 1.0), step=0.01, no_effect_when=WITHOUT_DEEPCACHE,
    )
    deepcache_end: float = option(
        1.0, "DeepCache end", "From this fraction of an image's steps on every step is whole.",
        group=SPEED, per_run=True, bounds=(0.0, 1.0), step=0.01, no_effect_when=WITHOUT_DEEPCACHE,
    )
    deepcache_schedule: str = option(
        deepcache.EARLY, "DeepCache schedule",
        "early: whole steps lie close together at first, rarer later. uniform: equal distances.",
        group=SPEED, choices=deepcache.SCHEDULES, per_run=True, no_effect_when=WITHOUT_DEEPCACHE,
    )
    deepcache_feature: str = option(
        deepcache.FORECAST, "DeepCache feature",
        "What stands for the deep layers. forecast: a line through the last two (Euler, DDIM).",
        group=SPEED, choices=deepcache.FEATURES, per_run=True, no_effect_when=WITHOUT_DEEPCACHE,
    )
    deepcache_hires: str = option(
        deepcache.AS_FIRST, "DeepCache in the hires pass",
        "off: Hires. fix's second pass computes every step whole.",
        group=SPEED, choices=deepcache.HIRES, per_run=True, no_effect_when=WITHOUT_DEEPCACHE,
    )

    guidance_end: float = option(
        1.0, "Guidance end",
        "From this fraction of an image's steps on, no negative prompt is computed. 1: off. Lossy.",
        group=SPEED, per_run=True, bounds=(0.0, 1.0), step=0.01,
    )
    forecast_interval: int = option(
        1, "Forecast interval",
        "One in this many steps runs the UNet, a line forecasts the others. 1: off. Lossy.",
        group=SPEED, per_run=True, bounds=(1, MOST_FORECAST),
    )

    def __post_init__(self) -> None:
        for option_field in fields(self):
            value, kind = current_value(option_field, getattr(self, option_field.name)), type(option_field.default)
            # JSON writes 1.0 as 1, and A1111's API tells a whole number as 1.0, which clients send back.
            if kind is float and type(value) is int or kind is int and type(value) is float and value.is_integer():
                value = kind(value)
            object.__setattr__(self, option_field.name, value)
        for option_field in fields(self):
            check_value(option_field, getattr(self, option_field.name))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], base: Settings | None = None) -> Settings:
        """Settings from option names to values; what is not named keeps its value in base (or its default).

        Raises ValueError with a sentence for the user on an unknown name or a value of the wrong kind.
        """
        known, values = {option_field.name for option_field in fields(cls)}, migrate_low_bit(values)
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"OneDiff has no option {unknown[0]!r}.{did_you_mean(unknown[0], sorted(known))}")
        kept = {name: getattr(base or cls(), name) for name in known}
        return cls(**{**kept, **values})

    def changed_from(self, other: Settings) -> dict[str, Any]:
        """The options that have another value in other, by name, with their values here."""
        return {
            option_field.name: getattr(self, option_field.name) for option_field in fields(self)
            if getattr(self, option_field.name) != getattr(other, option_field.name)
        }

    def for_run(self, values: dict[str, Any]) -> Settings:
        """These settings with other values for one generation. Raises ValueError as from_mapping does, and for an
        option that only holds for the whole WebUI."""
        for option_field in fields(self):
            if option_field.name in values and not option_field.metadata["per_run"]:
                name = option_field.name
                raise ValueError(f"OneDiff option {name} cannot be given for one generation: set it in the settings.")
        return self.from_mapping(values, self)


def host_key(name: str) -> str:
    """The key under which a WebUI keeps the option called name."""
    return HOST_KEY_PREFIX + name


def markdown_table() -> str:
    """The options as .readme/options.md shows them; a test holds the page to it."""
    lines = ["| option | values | default | what it does |", "| --- | --- | --- | --- |"]
    for option_field in fields(Settings):
        label = f"{option_field.metadata['label']} (`{option_field.name}`)"
        default, explanation = format_value(option_field.default), option_field.metadata["explanation"]
        cells = label, allowed_values(option_field), default, explanation
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
