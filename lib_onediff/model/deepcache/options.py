"""What a user may choose of DeepCache: the settings offer it, the schedule and the step plan follow it."""
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

EARLY, UNIFORM = SCHEDULES = ("early", "uniform")
FORECAST, REUSED = FEATURES = ("forecast", "reused")
AS_FIRST, OFF = HIRES = ("as the first pass", "off")
MOST_INTERVAL, MOST_DEPTH = 20, 11


@dataclass(frozen=True)
class DeepCacheOptions:
    """interval: every so many steps the whole UNet is computed; 1: at every step, which is exact.

    depth: how many input stages, and as many output stages, run at every step. start, end: outside of these fractions
    of a sampling's steps every step is whole. schedule: UNIFORM, or EARLY: as many whole steps, close together at the
    beginning and ever rarer. feature: what stands for the deep feature of the other steps: FORECAST, a line
    through the last two computed ones (buffers.Record), or REUSED, the last one itself, as the authors have it.
    """

    interval: int = 1
    depth: int = 1
    start: float = 0.0
    end: float = 1.0
    schedule: str = EARLY
    feature: str = FORECAST

    @classmethod
    def of(cls, settings: Any, second_pass: bool) -> DeepCacheOptions:
        """What settings (see settings.Settings) say for the first or the second pass of hires fix."""
        if second_pass and settings.deepcache_hires == OFF:
            return cls()
        return cls(**{option.name: getattr(settings, f"deepcache_{option.name}") for option in fields(cls)})


def depth_of(cache_layer_id: int, cache_block_id: int, layers_per_block: int = 2) -> int:
    """OneDiff's cache_layer_id and cache_block_id as a depth.

    They name the deepest layer that runs at every step: the down block (0: the outermost), and the residual block in
    it, or its downsampler (cache_block_id = layers_per_block). Raises ValueError for what is none.
    """
    if cache_layer_id < 0 or not 0 <= cache_block_id <= layers_per_block:
        raise ValueError(
            f"cache_layer_id is 0 or more and cache_block_id 0 to {layers_per_block} for this UNet, "
            f"not {cache_layer_id} and {cache_block_id}."
        )
    # The first input stage is the convolution before all blocks.
    return 1 + cache_layer_id * (layers_per_block + 1) + cache_block_id + 1
