"""Every option of the product, defined once.

The settings page, the REST API, compile_unet's arguments and the table in .readme/options.md derive from the fields of
Settings.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..model.deepcache import options as deepcache
from ..shapes.sizes import MOST_SIZES, parse_sizes
from .option import allowed_values, check_value, did_you_mean, format_value, option
from .presets import parse as check_own_presets

HOST_KEY_PREFIX = "onediff_"
# Where a user finds the switch; its label stands in Settings below.
OFF_IN_SETTINGS = "OneDiff is switched off in the settings (Settings > OneDiff > Use OneDiff)"
# A TiB: more than any GPU has.
MOST_GRAPH_MEMORY_MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """One consistent set of choices. Immutable, so that a running call cannot see half a change."""

    enabled: bool = option(
        True, "Use OneDiff", "Off: OneDiff takes its hooks out, and the WebUI's own UNet generates every image.",
        per_run=True,
    )
    backend: str = option(
        "auto",
        "Backend",
        "auto: OneDiff's own kernels where they run, else PyTorch's operators or its compiler, whichever makes the "
        "faster calls when it is measured, once on a machine. native: OneDiff's own kernels (Triton), one CUDA "
        "graph per resolution, replayed. inductor: PyTorch's own compiler for what lies between matrix products, "
        "convolutions and attentions, with graphs on a GPU; it needs torch 2.4, works on the CPU too, and compiles "
        "in the background when a model is used for the first time. cudagraph: graphs of PyTorch's operators. "
        "oneflow: OneFlow's compiler, where it is installed; it takes seconds for every resolution, in the "
        "background. eager: PyTorch's operators, no graphs.",
        choices=("auto", "native", "inductor", "cudagraph", "oneflow", "eager"),
        per_run=True,
    )
    verify: bool = option(
        True,
        "Check the first use of every shape",
        "The first UNet call at a new shape also runs the WebUI's own UNet and compares the two. "
        "A difference beyond rounding sends that shape back to the WebUI's own UNet.",
        per_run=True,
    )
    vae_precision: str = option(
        "auto",
        "VAE precision",
        "The type in which the VAE decodes and encodes. auto: the one that the WebUI keeps its VAE in, so that "
        "--no-half-vae means what it says; in float16 it is watched, and repeated in float32 where it overflows or "
        "comes near to that, which is remembered of the VAE. fp16, bf16, fp32: whatever the WebUI has chosen, fp16 "
        "also under --no-half-vae. With each of them an image with NaN or of one colour is decoded again in float32 "
        "before the WebUI sees it: its own 'Automatically revert VAE to 32-bit floats' finds nothing left to do. The "
        "WebUI's VAE is never converted.",
        choices=("auto", "fp16", "bf16", "fp32"),
        per_run=True,
    )
    matmul_accumulation: str = option(
        "full",
        "Accumulation in matrix products",
        "full: products of float16 are summed in float32, also where the WebUI or an extension has switched that off. "
        "half: they are summed in float16, which GeForce cards do at twice the speed; images change, and contrast "
        "may suffer. Attention and OneDiff's own kernels sum in float32 either way. Needs PyTorch 2.7.",
        choices=("full", "half"),
        per_run=True,
    )
    convolution_accumulation: str = option(
        "full",
        "Accumulation in convolutions",
        "half: convolutions of float16 are summed in float16 where the backend can do that; PyTorch never does.",
        choices=("full", "half"),
        per_run=True,
    )
    reduced_precision_reduction: str = option(
        "auto",
        "Reduced-precision reduction",
        "Whether the partial sums of a matrix product may be added in its own type, float16 or bfloat16. auto: as the "
        "WebUI has it, which is on unless somebody has switched it off.",
        choices=("auto", "on", "off"),
        per_run=True,
    )
    tf32: str = option(
        "auto",
        "TF32",
        "Whether float32 is multiplied with ten bits after the point, which is faster. auto: as the WebUI has it.",
        choices=("auto", "on", "off"),
        per_run=True,
    )
    attention_upcast: str = option(
        "auto",
        "Attention in float32",
        "auto: where the WebUI does it (Upcast cross attention layer to float32), and for a model whose attention was "
        "seen to overflow, as SD 2.1's does. on: always, which is slower. off: never, also where the WebUI does it.",
        choices=("auto", "on", "off"),
        per_run=True,
    )
    fp8: bool = option(
        False,
        "Low-bit (FP8)",
        "The largest matrix products of the transformer blocks are done in float8, with a scale for every row: faster "
        "and lossy, which shows in details. Weights are rounded again when a LoRA changes them, and lie beside the "
        "WebUI's own: 1.5 GiB for SDXL. Needs the native backend, a GPU of compute capability 8.9 or higher (RTX 40, "
        "H100) and a PyTorch that can multiply so.",
        per_run=True,
    )
    own_presets: str = option(
        "",
        "Your presets",
        "Options under names of your own, such as: drafts: tf32 on; vae_precision fp16, careful: tf32 off",
        check=check_own_presets,
    )
    memory_budget: int = option(
        0,
        "Graph memory in MiB",
        "How much GPU memory the graphs of all resolutions may hold together. When a new one does not fit, those that "
        "were used least recently are dropped and captured again when needed; pinned ones stay. Copies of weights for "
        "LoHas and others that are applied on the fly count too. 0: a quarter of the card.",
        bounds=(0, MOST_GRAPH_MEMORY_MIB),
    )
    prewarm: str = option(
        "",
        "Pre-warm list",
        "Sizes that are made ready after a checkpoint was loaded, for example: 512x512, 768x512 x2 "
        "(x2: a batch of two images). Empty: none.",
        check=parse_sizes,
    )
    prewarm_most_used: int = option(
        0,
        "Pre-warm the most used sizes",
        "So many of the sizes that were used the most on this machine are made ready after a checkpoint was loaded. "
        "0: none.",
        bounds=(0, MOST_SIZES),
    )
    idle_prewarm: bool = option(
        False,
        "Pre-warm while idle",
        "When no image has been made for a minute, the sizes that were used the most on this machine and are not "
        "ready are made ready, one at a time, until an image is asked for.",
    )

    deepcache_interval: int = option(
        1,
        "DeepCache interval",
        "1: off. n: only every n-th step computes the whole UNet, the others reuse what its deep part said: faster, "
        "and not the same image. The first and the last step are always whole.",
        per_run=True, bounds=(1, deepcache.MOST_INTERVAL),
    )
    deepcache_depth: int = option(
        1,
        "DeepCache depth",
        "How much runs at every step: 1 is the fastest, more is closer to the exact image (at most 11 for SD1 and 8 "
        "for SDXL; a larger number means that).",
        per_run=True, bounds=(1, deepcache.MOST_DEPTH),
    )
    deepcache_start: float = option(
        0.0,
        "DeepCache start",
        "Up to this fraction of an image's steps every step is whole.",
        per_run=True, bounds=(0.0, 1.0), step=0.01,
    )
    deepcache_end: float = option(
        1.0,
        "DeepCache end",
        "From this fraction of an image's steps on every step is whole.",
        per_run=True, bounds=(0.0, 1.0), step=0.01,
    )
    deepcache_schedule: str = option(
        deepcache.UNIFORM,
        "DeepCache schedule",
        "uniform: whole steps at equal distances. uneven: as many, close together around the center and rarer away "
        "from it (uniform where the number of steps is not known).",
        choices=deepcache.SCHEDULES,
        per_run=True,
    )
    deepcache_center: float = option(
        deepcache.CENTER,
        "DeepCache center",
        "Where the whole steps of the uneven schedule are close together, as a fraction of an image's steps.",
        per_run=True, bounds=(0.0, 1.0), step=0.01,
    )
    deepcache_power: float = option(
        deepcache.POWER,
        "DeepCache power",
        "How much rarer the whole steps of the uneven schedule become away from the center.",
        per_run=True, bounds=deepcache.POWERS, step=0.05,
    )
    deepcache_hires: str = option(
        deepcache.AS_FIRST,
        "DeepCache in the hires pass",
        "off: the second pass of Hires. fix computes the whole UNet at every step.",
        choices=deepcache.HIRES,
        per_run=True,
    )

    def __post_init__(self) -> None:
        for option_field in fields(self):
            value = getattr(self, option_field.name)
            if type(option_field.default) is float and type(value) is int:
                # JSON writes 1.0 as 1.
                object.__setattr__(self, option_field.name, float(value))
        for option_field in fields(self):
            check_value(option_field, getattr(self, option_field.name))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], base: Settings | None = None) -> Settings:
        """Settings from option names to values; what is not named keeps its value in base (or its default).

        Raises ValueError with a sentence for the user on an unknown name or a value of the wrong kind.
        """
        known = {option_field.name for option_field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"OneDiff has no option {unknown[0]!r}.{did_you_mean(unknown[0], sorted(known))}")
        kept = {name: getattr(base or cls(), name) for name in known}
        return cls(**{**kept, **values})

    def for_run(self, values: dict[str, Any]) -> Settings:
        """These settings with other values for one generation. Raises ValueError as from_mapping does, and for an
        option that only holds for the whole WebUI."""
        for option_field in fields(self):
            if option_field.name in values and not option_field.metadata["per_run"]:
                raise ValueError(f"OneDiff option {option_field.name} cannot be given for one generation.")
        return self.from_mapping(values, self)


def host_key(name: str) -> str:
    """The key under which a WebUI keeps the option called name."""
    return HOST_KEY_PREFIX + name


def markdown_table() -> str:
    """The options as .readme/options.md shows them, long explanations cut short; a test holds the page to it."""
    lines = ["| option | values | default | what it does |", "| --- | --- | --- | --- |"]
    for option_field in fields(Settings):
        label = f"{option_field.metadata['label']} (`{option_field.name}`)"
        default, explanation = format_value(option_field.default), option_field.metadata["explanation"]
        cells = label, allowed_values(option_field), default, explanation
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
