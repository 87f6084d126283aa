"""Other settings for one generation: from the accordion's checkbox, from the API, or from overridden options."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..accelerator import runtime
from ..settings import Settings

# What of a generation runs the model: init encodes the picture that img2img begins with.
STEPS_OF_A_RUN = ("init", "sample")


class StepWithSettings:
    """Stands in for a step of a generation and runs it with the generation's own settings, also when it fails."""

    def __init__(self, step: Callable[..., Any], settings: Settings, why_off: str) -> None:
        self.host_step = step
        self.settings = settings
        self.why_off = why_off

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with runtime.settings_for_run(self.settings, self.why_off):
            return self.host_step(*args, **kwargs)


def settings_of_run(argument: Any, standing: Settings) -> Settings:
    """The settings for a generation.

    argument: True or False (the checkbox: False switches OneDiff off, True leaves it as the settings tab says), or a
    mapping of option names to values from the API. Raises ValueError with a sentence for anything else.
    """
    if isinstance(argument, dict):
        return standing.for_run({**argument, "enabled": standing.enabled and argument.get("enabled", True)})
    if not isinstance(argument, bool):
        raise ValueError(f"OneDiff's script argument is true, false or a mapping of its options, not {argument!r}.")
    return Settings.from_mapping({"enabled": standing.enabled and argument}, standing)


def use_for_sampling(p: Any, settings: Settings, why_off: str = "") -> None:
    """Have the generation p sample with settings. why_off: why they switch OneDiff off, if the user did not ask for it.
    """
    restore_sampling(p)
    if settings != runtime.settings:
        for name in STEPS_OF_A_RUN:
            if hasattr(p, name):
                setattr(p, name, StepWithSettings(getattr(p, name), settings, why_off))


def restore_sampling(p: Any) -> None:
    """Undo use_for_sampling, but for what somebody has wrapped since."""
    for name in STEPS_OF_A_RUN:
        if isinstance(p.__dict__.get(name), StepWithSettings):
            delattr(p, name)
