"""The step policies, the outermost first. A new one is a file in this folder and an entry here."""
from __future__ import annotations

from ..core.policy import StepPolicy
from .deepcache import DeepCache
from .forecast import Forecast
from .guidance_end import GuidanceEnd


def step_policies() -> tuple[StepPolicy, ...]:
    """A new object of each policy, the outermost first. Each has counts of its own."""
    return GuidanceEnd(), Forecast(), DeepCache()
