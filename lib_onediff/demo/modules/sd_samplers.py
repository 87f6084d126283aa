"""The names of the samplers, as scripts ask for them."""
from __future__ import annotations

from .. import samplers


def visible_sampler_names() -> list[str]:
    """What the sampler list of the page offers."""
    return [sampler.name for sampler in samplers.available()]
