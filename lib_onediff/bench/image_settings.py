"""The options that whole images are timed and judged with, by the names in the tables."""
from __future__ import annotations

from typing import Any

from ..options.presets import FAST, PRESETS

ONEDIFF = "onediff"
INTERVALS, DEPTHS = (2, 3, 4, 5), (1, 2, 3)
GUIDANCE_ENDS = 0.3, 0.5, 0.75
FORECASTS = (2, 3, 4)
FAST_VALUES = PRESETS[FAST].values


def deepcache(interval: int, depth: int, **others: Any) -> dict[str, Any]:
    return {"deepcache_interval": interval, "deepcache_depth": depth, **others}


IMAGE_SETTINGS: dict[str, dict[str, Any]] = {
    ONEDIFF: {},
    **{f"onediff, VAE {name}": {"vae_precision": name} for name in ("fp16", "bf16", "fp32")},
    "onediff, half sums": {"matmul_accumulation": "half"},
    **{f"onediff + {kind}": {"low_bit": kind} for kind in ("fp8", "int8")},
    "onediff + low-bit auto": {"low_bit": "auto"},
    **{f"onediff + {kind} only": {"low_bit": kind, "low_bit_only": True} for kind in ("fp8", "int8")},
    **{
        f"onediff + DeepCache {interval}, depth {depth}": deepcache(interval, depth)
        for interval in INTERVALS for depth in DEPTHS
    },
    **{f"onediff, guidance end {end}": {"guidance_end": end} for end in GUIDANCE_ENDS},
    **{
        f"onediff + DeepCache {interval}, depth 1, guidance end 0.75": deepcache(interval, 1, guidance_end=0.75)
        for interval in INTERVALS
    },
    **{f"onediff, forecast {interval}": deepcache(interval, 0) for interval in FORECASTS},
    **{
        f"onediff, forecast {interval}, guidance end 0.75": deepcache(interval, 0, guidance_end=0.75)
        for interval in FORECASTS
    },
    "onediff + fp8 + DeepCache 3, depth 1": {"low_bit": "fp8", **deepcache(3, 1)},
    # What the presets were chosen from.
    **{
        f"preset {FAST}, {kind}, DeepCache {interval}": {**FAST_VALUES, "low_bit": kind, **deepcache(interval, 1)}
        for kind in ("off", "fp8", "int8") for interval in INTERVALS
    },
    **{f"preset {preset.name}": dict(preset.values) for preset in PRESETS.values() if preset.values},
}
# What --images times unless --settings says otherwise.
TIMED = (
    ONEDIFF, "onediff + DeepCache 3, depth 1", "onediff + DeepCache 3, depth 3", "onediff, half sums",
    "onediff + fp8", "onediff + fp8 + DeepCache 3, depth 1",
)
