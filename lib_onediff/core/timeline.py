"""Which step of a sampling a timestep belongs to.

Timesteps fall while an image is made. The step is never counted in calls: a host may call the UNet once for the prompt
and once for the negative prompt, a sampler (Heun, DPM2, DPM++ SDE) may call it twice a step, and an extension may keep
calls to itself.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# With fewer steps, each of them changes the whole image.
FEWEST_STEPS = 10
FEW_STEPS = f"the sampling has fewer than {FEWEST_STEPS} steps"
# Models and LoRAs that are distilled for few steps are published with 1 to 8 of them and a guidance scale of 0 to 2
# (LCM 1 to 2; Lightning, Turbo, Hyper-SD and DMD2 0 to 1). People give them more steps, and they stay what they are.
FEWEST_UNGUIDED_STEPS, LITTLE_GUIDANCE = 16, 2.0
FEW_STEP_MODEL = (
    f"the sampling has fewer than {FEWEST_UNGUIDED_STEPS} steps at a CFG scale of {LITTLE_GUIDANCE:g} or less, "
    "as few-step models have (LCM, Lightning, Turbo, Hyper, DMD2)"
)
# Of the distance to the next step: so far may a timestep be from where its step begins.
NEAR = 0.05


@dataclass(frozen=True)
class Step:
    """index: from the first step of this sampling. total: how many steps it has. fraction: how much of the sampling was
    done when the step began. is_last: whether the sampling ends with it."""

    index: int
    total: int
    fraction: float
    is_last: bool

    def why_too_few(self, guidance_scale: float | None) -> str:
        """Why its sampling has too few steps to leave anything out, in one line for the user; "" where it has enough.
        guidance_scale: the sampling's CFG scale, or None where that is unknown."""
        if self.total >= FEWEST_UNGUIDED_STEPS:
            return ""
        if self.total < FEWEST_STEPS:
            return FEW_STEPS
        return FEW_STEP_MODEL if guidance_scale is not None and guidance_scale <= LITTLE_GUIDANCE else ""


class Timeline:
    """The timesteps at which the steps of a sampling begin: what lies between two of them belongs to the earlier."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = sorted({float(time) for time in times}, reverse=True)
        self._rising = [-time for time in self._times]
        self._first: int | None = None
        self._last: int = -1

    def step(self, time: float) -> tuple[Step, bool]:
        """The step of a timestep, and whether time has jumped back. img2img begins in the middle of the times; then
        its first step is the one that comes first."""
        place = self._place(time)
        jumped = place < self._last
        self._last = place
        if self._first is None or place < self._first:
            self._first = place
        index, total = place - self._first, len(self._times) - self._first
        return Step(index, total, index / total, place == len(self._times) - 1), jumped

    def _place(self, time: float) -> int:
        after = bisect_right(self._rising, -time)
        before = max(after - 1, 0)
        if after < len(self._times):
            gap = self._times[before] - self._times[after]
            if abs(self._times[after] - time) <= NEAR * gap and time < self._times[before]:
                return after
        return before
