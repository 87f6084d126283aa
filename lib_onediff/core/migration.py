"""Options of earlier versions, as config files, pasted infotext, scripts and clients of the API still name them.

What has a meaning today is mapped; the rest is dropped without an error.
"""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

GONE = frozenset({
    "attention_upcast", "cache_folder", "convolution_accumulation", "forecast_interval", "fp8", "guidance_end",
    "idle_prewarm", "low_bit_attention", "matmul_accumulation", "own_presets", "prewarm_most_used",
    "reduced_precision_reduction", "tf32", "verify",
    *(f"deepcache_{name}" for name in ("center", "end", "feature", "hires", "power", "schedule", "start")),
    *(f"deepcache_hires_{name}" for name in ("center", "depth", "end", "interval", "power", "schedule", "start")),
})
# (option, value): what it is called today.
VALUES = {("backend", "inductor"): "auto"}
SWITCHED_ON = ("True", "on")


def migrate_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Today's options for those of any version. values: by name, as values or as words; so is the answer."""
    found = {name: value for name, value in values.items() if name not in GONE}
    for name, value in VALUES:
        if found.get(name) == value:
            found[name] = VALUES[name, value]
    if "matmul_accumulation" in values:
        found.setdefault("accumulation", values["matmul_accumulation"])
    if "fp8" in values:
        found.setdefault("low_bit", "fp8" if str(values["fp8"]) in SWITCHED_ON else "off")
    with contextlib.suppress(KeyError, TypeError, ValueError):
        # It was a share of the steps, and 1 was never.
        share = float(values["guidance_end"])
        percent = max(1, round(100 * share)) if share < 1 else 0
        found.setdefault("skip_negative_after", str(percent) if isinstance(values["guidance_end"], str) else percent)
    forecast = str(values.get("forecast_interval", 1))
    if forecast != "1" and str(values.get("deepcache_interval", 1)) == "1":
        # An output forecast is DeepCache that computes nothing in the steps between.
        number = isinstance(values["forecast_interval"], int)
        found.update(deepcache_interval=values["forecast_interval"], deepcache_depth=0 if number else "0")
    most_used = str(values.get("prewarm_most_used", 0))
    if most_used not in ("", "0"):
        found["prewarm"] = ", ".join(filter(None, (found.get("prewarm"), f"most used {most_used}")))
    return found
