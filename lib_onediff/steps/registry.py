"""The step policies, outermost first. A new one is a file beside this and a line here."""
from __future__ import annotations

from ..core.policy import StepPolicy
from .deepcache import DeepCache
from .forecast import Forecast
from .guidance_end import GuidanceEnd


def step_policies() -> tuple[StepPolicy, ...]:
    """One of each, with counts of its own."""
    return GuidanceEnd(), Forecast(), DeepCache()
