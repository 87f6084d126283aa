"""What a user may choose of DeepCache: the settings offer it, the schedule and the step plan follow it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOST_INTERVAL, MOST_DEPTH = 20, 11


@dataclass(frozen=True)
class DeepCacheOptions:
    """interval: every so many steps the whole UNet is computed; 1: at every step, which is exact.

    depth: how many input stages, and as many output stages, run at every step.
    """

    interval: int = 1
    depth: int = 1

    @classmethod
    def of(cls, settings: Any) -> DeepCacheOptions:
        """What settings say, see settings.Settings."""
        return cls(settings.cache_interval, settings.deepcache_depth)


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
