"""Every option of the product, defined once.

The settings page, the REST API and compile_unet's arguments derive from the fields of Settings; a test compares the
table in .readme/speed-and-quality.md with them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from .sizes import parse_prewarm

WORD_OF_BOOL = {True: "on", False: "off"}
BOOL_OF_WORD = {word: value for value, word in WORD_OF_BOOL.items()}
# The types of options, as check_value's messages name them.
TYPE_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
HOST_KEY_PREFIX = "onediff_"
# Tells the user where to switch OneDiff on. The names are those of the settings page and of the option `enabled` below.
OFF_IN_SETTINGS = "OneDiff is switched off in the settings (Settings > OneDiff > Use OneDiff)"
# A TiB: more than any GPU has.
MOST_GRAPH_MEMORY_MIB = 1 << 20
# The headings of the settings page, in its order.
GENERAL = "General"
SPEED = "Speed and precision"
MEMORY = "Memory and pre-warm"
EXPERT = "Expert"
GROUPS = (GENERAL, SPEED, MEMORY, EXPERT)
# The largest relative error (norm of the difference over the norm of the host's output) of an output with Low-bit that
# the check of a shape accepts. Float8 has 3 bits of mantissa, int8 7 bits relative to the largest number of a row.
# Measured errors of float8: 2e-2 in SDXL, 7e-2 in very small networks. A wrong output has an error of about 1.
MOST_LOW_BIT_ERROR = 0.12
# The largest interval and depth of DeepCache. Nothing was measured beyond them, and no UNet has more stages.
MOST_INTERVAL = 20
MOST_DEPTH = 11
# How many blocks of a transformer a cached step of DeepCache computes. A second one does not bring images close enough
# to exact ones for the time that it takes (.readme/developing.md).
TRANSFORMER_DEPTH = 1
# The options of DeepCache, and the option that replaces them for transformers: see Settings.cache_options.
DEEPCACHE_OPTIONS = frozenset({"deepcache_interval", "deepcache_depth"})
TRANSFORMER_OPTIONS = frozenset({"transformer_interval"})
# The largest interval of extrapolated outputs. With a larger one, images differ too much from exact ones.
MOST_FORECAST = 4
# The value of second_gpu for computing on one GPU.
ONE_GPU = "off"
# For `no_effect_when`: the backends that do not compute in eight bits.
WITHOUT_KERNELS = {"backend": ("cudagraph", "oneflow", "eager")}


def option(
    default: Any, label: str, explanation: str, choices: tuple[str, ...] = (), *, group: str = "",
    bounds: tuple[float, float] | None = None, step: float | None = None, per_run: bool = False,
    check: Callable[[Any], object] | None = None, no_effect_when: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """A dataclass field of Settings, whose metadata has all other arguments by their names. The default's type is the
    option's type.

    label, explanation: for the user; the explanation has at most 90 characters; more is in .readme.
    group: the heading on the settings page, one of GROUPS.
    choices: the allowed words; () for a number, or for any text. bounds: the smallest and the largest number; None for
        none. step: the increment of the slider between them; None: 1.
    per_run: whether a single generation may have another value than the settings page.
    check: raises ValueError, with a sentence for the user, for a wrong value of the right type.
    no_effect_when: by the name of another option, the values of that option with which this one has no effect.
    """
    return field(default=default, metadata={
        "label": label, "explanation": explanation, "choices": choices, "bounds": bounds, "step": step or 1,
        "per_run": per_run, "check": check, "group": group, "no_effect_when": no_effect_when or {},
    })


def check_value(option_field: Field[Any], value: Any) -> None:
    """Raise ValueError with a sentence for the user unless the option can have this value: of exactly the option's
    type, one of its choices, within its bounds, and accepted by its check."""
    name = option_field.name
    kind = type(option_field.default)
    metadata = option_field.metadata
    if metadata["choices"] and (type(value) is not kind or value not in metadata["choices"]):
        raise ValueError(f"OneDiff option {name} must be one of {', '.join(metadata['choices'])}, not {value!r}.")
    if type(value) is not kind:
        raise ValueError(f"OneDiff option {name} takes {TYPE_NAMES[kind]}, not {value!r}.")
    if metadata["bounds"] is not None:
        least, most = metadata["bounds"]
        if not least <= value <= most:
            allowed = f"from {number_for_users(least)} to {number_for_users(most)}"
            raise ValueError(f"OneDiff option {name} must be {allowed}, not {value!r}.")
    if metadata["check"] is not None:
        metadata["check"](value)


def format_value(value: Any) -> str:
    """An option's value as infotext and presets contain it: "on" or "off" for a bool, otherwise str(value)."""
    return WORD_OF_BOOL[value] if isinstance(value, bool) else str(value)


def parse_value(option_field: Field[Any], word: str) -> Any:
    """The value of an option that is written as this word; the inverse of format_value. For a bool, True and False are
    words too, and case does not matter. Raises ValueError if the option cannot have the value, with a sentence for the
    user. Only for a word that is no number, the message is Python's own, and the caller adds the option's name."""
    kind: type[Any] = type(option_field.default)
    if kind is bool:
        # X/Y/Z plots pass Python's True, and users type On.
        word = {"true": "on", "false": "off"}.get(word.lower(), word.lower())
        if word not in BOOL_OF_WORD:
            raise ValueError(f"OneDiff option {option_field.name} must be on or off, not {word!r}.")
        return BOOL_OF_WORD[word]
    value = kind(word)
    check_value(option_field, value)
    return value


def words_of(option_field: Field[Any]) -> list[str]:
    """All words with which the option's values are written (see format_value); [] if it takes a number or any text."""
    return list(BOOL_OF_WORD) if isinstance(option_field.default, bool) else list(option_field.metadata["choices"])


def allowed_values(option_field: Field[Any]) -> str:
    """The values that an option can have, as one text for users: "off, int8", "1 to 20" or "on, off"; "" if it takes
    any text."""
    metadata = option_field.metadata
    if metadata["choices"]:
        return ", ".join(metadata["choices"])
    if metadata["bounds"] is not None:
        return " to ".join(map(number_for_users, metadata["bounds"]))
    return "on, off" if isinstance(option_field.default, bool) else ""


def number_for_users(value: float) -> str:
    """A number as text for users: "1" for 1.0, and six digits at most for a float."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name, beginning with a space: " Did you mean 'backend'?" with the most
    similar of `names`, or " Choose from ..." with all `names` if none is similar. Case does not matter."""
    known = list(names)
    by_lower = {other.lower(): other for other in known}
    near = get_close_matches(name.lower(), by_lower, n=1)
    if near:
        return f" Did you mean {by_lower[near[0]]!r}?"
    return f" Choose from {', '.join(known)}."


@dataclass(frozen=True)
class Settings:
    """The values of all options, by name as keyword arguments; a wrong one raises ValueError with a sentence for the
    user. Immutable, so that a running call cannot see half of a change."""

    enabled: bool = option(
        True, "Use OneDiff", "Off: every image is made by the WebUI alone.", group=GENERAL, per_run=True,
    )
    deepcache_interval: int = option(
        1, "DeepCache interval", "Computes the whole network only every Nth step. 1: off. Lossy.",
        group=SPEED, per_run=True, bounds=(1, MOST_INTERVAL),
    )
    deepcache_depth: int = option(
        1, "DeepCache depth",
        "Layers that the other steps compute. Higher: closer to exact. 0: outputs are extrapolated.",
        group=SPEED, per_run=True, bounds=(0, MOST_DEPTH),
    )
    transformer_interval: int = option(
        0, "DeepCache interval of transformers",
        "Computes all blocks only every Nth step, else a single one. 0: same as DeepCache interval.",
        group=EXPERT, per_run=True, bounds=(0, MOST_INTERVAL),
    )
    vae_precision: str = option(
        "auto", "VAE precision", "auto: the WebUI's own, or fp32 where fp16 overflows (black images).",
        group=SPEED, choices=("auto", "fp16", "bf16", "fp32"), per_run=True,
    )
    accumulation: str = option(
        "full", "Accumulation",
        "half: faster, less precise sums (float16 models sum in float16, float32 models use TF32).",
        group=SPEED, choices=("full", "half"), per_run=True,
    )
    memory_budget: int = option(
        0, "Graph memory in MiB", "Most GPU memory that CUDA graphs may take. 0: a quarter of the card.",
        group=MEMORY, bounds=(0, MOST_GRAPH_MEMORY_MIB),
    )
    prewarm: str = option(
        "", "Pre-warm list", "Made ready after a checkpoint loads. Example: 512x512, 768x512 x2, most used 4",
        group=MEMORY, check=parse_prewarm,
    )
    backend: str = option(
        "auto", "Backend", "auto: native where it runs, else cudagraph; eager without a GPU.",
        group=EXPERT, choices=("auto", "native", "cudagraph", "oneflow", "eager"), per_run=True,
    )
    low_bit: str = option(
        "off", "Low-bit", "Computes layers in 8 bits: faster, lossy. auto: only where it is faster.",
        group=EXPERT, choices=("off", "auto", "int8", "fp8"), per_run=True, no_effect_when=WITHOUT_KERNELS,
    )
    low_bit_budget: float = option(
        0.02, "Low-bit error budget", "Largest error; layers that exceed it stay 16-bit. 0.12: all layers in 8 bits.",
        group=EXPERT, per_run=True, bounds=(0.0, MOST_LOW_BIT_ERROR), step=0.005,
        no_effect_when={"low_bit": ("off",), "low_bit_only": (True,)},
    )
    low_bit_only: bool = option(
        False, "Low-bit only", "Small cards: stores weights that do not fit in VRAM as 8-bit. Lossy.",
        group=EXPERT, per_run=True, no_effect_when={**WITHOUT_KERNELS, "low_bit": ("off",)},
    )
    skip_negative_after: int = option(
        0, "Skip the negative prompt after (% of steps)",
        "Later steps ignore the negative prompt: faster, lossy. 0: never.",
        group=EXPERT, per_run=True, bounds=(0, 99),
    )
    second_gpu: str = option(
        ONE_GPU, "Second GPU", "Splits each step across two GPUs. auto: the next GPU with enough free memory.",
        group=EXPERT, choices=(ONE_GPU, "auto"),
    )

    @property
    def has_cache(self) -> bool:
        """Whether DeepCache is on for UNets, transformers, or both. With deepcache_depth 0 it is off:
        deepcache_interval then is the interval of extrapolated outputs (see forecast_interval)."""
        return self.transformer_interval > 1 or (self.deepcache_interval > 1 and self.deepcache_depth > 0)

    def cache_options(self, is_transformer: bool) -> frozenset[str]:
        """The names of the options from which cache() takes its result: TRANSFORMER_OPTIONS if is_transformer and
        transformer_interval is not 0, otherwise DEEPCACHE_OPTIONS."""
        return TRANSFORMER_OPTIONS if is_transformer and self.transformer_interval else DEEPCACHE_OPTIONS

    def cache(self, is_transformer: bool) -> tuple[int, int]:
        """DeepCache's (interval, depth) for a transformer if is_transformer, else for a UNet. If transformer_interval
        is 0, a transformer has the interval and depth of UNets. The interval is 1 if DeepCache is off, as with
        deepcache_depth 0. depth: see call.Cut.
        """
        if is_transformer and self.transformer_interval:
            return self.transformer_interval, TRANSFORMER_DEPTH
        return self.deepcache_interval if self.deepcache_depth else 1, self.deepcache_depth

    @property
    def forecast_interval(self) -> int:
        """n if the network is computed only at every nth step, and its outputs at the steps between are extrapolated:
        the deepcache_interval if deepcache_depth is 0, but at most MOST_FORECAST. 1 if no outputs are extrapolated. For
        a transformer only if transformer_interval is 0, which the caller checks."""
        return 1 if self.deepcache_depth else min(self.deepcache_interval, MOST_FORECAST)

    def __post_init__(self) -> None:
        """Convert whole numbers to the option's type where int and float differ only by it, and check all values."""
        for option_field in fields(self):
            value = getattr(self, option_field.name)
            kind = type(option_field.default)
            # JSON has 1 for 1.0, and A1111's API returns whole numbers as 1.0, which clients send back.
            if kind is float and type(value) is int:
                object.__setattr__(self, option_field.name, float(value))
            elif kind is int and type(value) is float and value.is_integer():
                object.__setattr__(self, option_field.name, int(value))
        for option_field in fields(self):
            check_value(option_field, getattr(self, option_field.name))

    @classmethod
    def from_mapping(cls, values: dict[str, Any], base: Settings | None = None) -> Settings:
        """New settings with these values, by option name. Other options have the values of base; with base None, their
        defaults. Raises ValueError, with a sentence for the user, for an unknown name or a wrong value."""
        known = sorted(option_field.name for option_field in fields(cls))
        unknown = sorted(set(values).difference(known))
        if unknown:
            raise ValueError(f"OneDiff has no option {unknown[0]!r}.{did_you_mean(unknown[0], known)}")
        return replace(base or cls(), **values)

    def changed_from(self, other: Settings) -> dict[str, Any]:
        """The values of these settings, by name, for those options whose values differ in `other`; {} for none."""
        changed = {}
        for option_field in fields(self):
            name = option_field.name
            value = getattr(self, name)
            if value != getattr(other, name):
                changed[name] = value
        return changed

    def for_run(self, values: dict[str, Any]) -> Settings:
        """New settings for one generation: these, with other values by option name. Raises ValueError as from_mapping
        does, and for any value of an option that cannot differ between generations (see option, per_run)."""
        for option_field in fields(self):
            if option_field.name in values and not option_field.metadata["per_run"]:
                name = option_field.name
                raise ValueError(f"OneDiff option {name} cannot be set for a single image: use Settings > OneDiff.")
        return self.from_mapping(values, self)


def options_of_a_run() -> dict[str, Field[Any]]:
    """The fields of the options that can differ between generations, by name, in the order of Settings."""
    return {option_field.name: option_field for option_field in fields(Settings) if option_field.metadata["per_run"]}


def host_key(name: str) -> str:
    """The key of the option of this name in the WebUI's own settings: "onediff_backend" for "backend"."""
    return HOST_KEY_PREFIX + name
