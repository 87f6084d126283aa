"""The step policies, the outermost first. A new one is a file in this folder and an entry here."""
from __future__ import annotations

from ..core.policy import StepPolicy
from .deepcache import DeepCache
from .forecast import Forecast
from .guidance_end import GuidanceEnd


def step_policies() -> tuple[StepPolicy, ...]:
    """One new object of each policy, the outermost first: the function that its answerer() returns gets the next policy
    as the Compute to call. The objects are new because each has the counts of one runtime."""
    return GuidanceEnd(), Forecast(), DeepCache()
