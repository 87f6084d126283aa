"""The settings of one generation, from the settings tab and our script's arguments, and how its infotext names them."""
from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..core.image import PROMPT_ALONE, ImageRecord
from ..core.key import LATENT_PIXEL, Lossy
from ..core.settings import DEEPCACHE_OPTIONS, OFF_IN_SETTINGS, TRANSFORMER_OPTIONS, Settings, options_of_a_run
from ..runtime.runtime import runtime
from ..runtime.vae.route import OURS
from . import infotext
from .effects import why_no_effect
from .infotext import KEY, PROBLEM, read_changes
from .presets import AS_IN_SETTINGS, with_preset

log = logging.getLogger("onediff")
# An example of extra options, for the page and messages.
EXAMPLE = "low_bit fp8; backend eager"
# Generations that are equal in these attributes take the WebUI equally long, unless other extensions differ.
MAKE_IMAGES_ALIKE = (
    "width", "height", "batch_size", "n_iter", "steps", "sampler_name", "cfg_scale", "denoising_strength", "enable_hr",
    "hr_upscaler", "hr_scale", "hr_resize_x", "hr_resize_y", "hr_second_pass_steps",
)
# The mark in ImageRecord.backends of the option low_bit_only: weights that the GPU holds in eight bits alone.
ONLY = str(Lossy("int8", only=True))
# All options of DeepCache, for UNets and for transformers.
CACHE_OPTIONS = DEEPCACHE_OPTIONS | TRANSFORMER_OPTIONS
# The values of our script's arguments in a new accordion: the checkbox, the preset and the extra options.
AS_AT_FIRST = (True, AS_IN_SETTINGS, "")


def settings_of_run(arguments: Sequence[Any], standing: Settings) -> Settings:
    """The settings for a generation: those of the settings tab (standing), changed by our script's arguments.

    arguments: the first three count; missing ones have the values of a new accordion. The first is True or False (False
    switches OneDiff off), or a mapping of option names to values from an API client, which overrides the second and the
    third. The second is a preset's name; None, "" or AS_IN_SETTINGS for no preset. The third is a text of options, see
    infotext.read_changes; None for none.
    Raises ValueError with a sentence for other or wrong values; not if the first argument is False, since OneDiff is
    off then.
    """
    used, preset, changes = filled(arguments)
    if not isinstance(used, bool | dict):
        raise ValueError(f"OneDiff's script argument is true, false or a mapping of its options, not {used!r}.")
    try:
        return settings_of_parts(used, preset, changes, standing)
    except ValueError:
        if used is False:
            # OneDiff is off, so wrong options do not matter.
            return replace(standing, enabled=False)
        raise


def settings_of_parts(used: bool | dict[str, Any], preset: Any, changes: Any, standing: Settings) -> Settings:
    """settings_of_run with its three arguments by name. OneDiff is on only if it is on in the settings tab and no
    argument switches it off. Raises ValueError with a sentence for a wrong type or value of preset or changes, and of
    an option in a mapping."""
    settings = standing
    if not isinstance(preset, str | None):
        raise ValueError(f"OneDiff's second script argument is the name of a preset, not {preset!r}.")
    if preset and preset != AS_IN_SETTINGS:
        settings = with_preset(settings, preset)
    if not isinstance(changes, str | None):
        raise ValueError(
            f"OneDiff's third script argument, the extra options, is a text such as {EXAMPLE!r}, not {changes!r}."
        )
    changed = [read_changes(changes or ""), used if isinstance(used, dict) else {"enabled": used}]
    for values in changed:
        settings = settings.for_run(values)
    # Each of them can switch OneDiff off. None can switch it on while it is off in the settings tab.
    return replace(settings, enabled=standing.enabled and all(values.get("enabled", True) for values in changed))


def refusal_while_off(arguments: Sequence[Any]) -> str:
    """The sentence for a run while OneDiff is switched off in the settings tab: its options have no effect. "" if the
    first argument is True with neither preset nor changes, or if the first argument switches OneDiff off; any other
    mapping gets the sentence, also {"enabled": True}. arguments: see settings_of_run."""
    used, preset, changes = filled(arguments)
    off = used is False or (isinstance(used, dict) and used.get("enabled") is False)
    nothing = used is True and preset in ("", None, AS_IN_SETTINGS) and not changes
    return "" if off or nothing else f"{OFF_IN_SETTINGS}: the options of this run have no effect."


def tell(p: Any, problem: str) -> None:
    """Report a problem of the generation p (a sentence for users) in the log, below its images and in its infotext."""
    log.warning("%s", problem)
    p.comment(problem)
    p.extra_generation_params[PROBLEM] = problem


def describe(p: Any, settings: Settings, is_served: bool, image: ImageRecord | None = None) -> None:
    """Write the settings of the generation p into its infotext parameters, without options that had no effect. Called
    before a generation and again after each batch.

    is_served: whether OneDiff serves the model. image: the record of the images that are made; None before the first:
    then, of a served model, only options without effect on this machine are left out.
    """
    changed = settings.changed_from(Settings()) if settings.enabled else {}
    of_a_run = options_of_a_run()
    inactive = [name for name, value in changed.items() if name in of_a_run and why_no_effect(name, value)]
    if not is_served:
        image = ImageRecord() if image is None else ImageRecord(vae=image.vae)
    of_other_models: frozenset[str] = frozenset()
    if settings.enabled and image is not None:
        inactive += inactive_options(settings, image)
        if image.cache_options:
            of_other_models = CACHE_OPTIONS - image.cache_options
    has_our_vae = image is not None and image.vae[0] == OURS
    p.extra_generation_params[KEY] = infotext.describe(settings, inactive, is_served, has_our_vae, of_other_models)


def inactive_options(settings: Settings, image: ImageRecord) -> Iterator[str]:
    """The names of options that had no effect on the images of this record, also of options that are at their defaults.
    settings: those of the run."""
    if PROMPT_ALONE not in image.steps:
        yield "skip_negative_after"
    if not image.cache_options:
        yield from CACHE_OPTIONS
    lossy = {lossy for _, lossy in image.backends}
    if lossy <= {""}:
        yield from ("low_bit", "low_bit_budget")
    if ONLY not in lossy:
        yield "low_bit_only"
    if settings.backend not in {backend for backend, _ in image.backends}:
        yield "backend"
    if image.vae[0] != OURS:
        yield "vae_precision"


def resolution_of(p: Any) -> str | None:
    """The resolution in pixels of the next sampling of the generation p, for example "512x768"; in the second pass of
    hires fix, its target size. Rounded down to the pixels of whole latents; None if p has no width or height."""
    names = ("width", "height")
    if getattr(p, "is_hr_pass", False):
        names = ("hr_upscale_to_x", "hr_upscale_to_y")
    sides: list[Any] = [getattr(p, name, None) for name in names]
    if not all(isinstance(side, int) and side >= LATENT_PIXEL for side in sides):
        return None
    width, height = (side // LATENT_PIXEL * LATENT_PIXEL for side in sides)
    return f"{width}x{height}"


def filled(arguments: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Our three script arguments: the checkbox or mapping, the preset and the text of options. Missing ones get the
    values of a new accordion; further ones are dropped."""
    return (*arguments, *AS_AT_FIRST[len(arguments):])[:3]


def end_image(p: Any, checkpoint: str, is_whole: bool) -> None:
    """Close the generation p in the runtime and make the record of its images, which the status shows as the last
    image's. Does nothing if no generation was begun for p, because OneDiff is off in the settings tab, and if p is a
    copy of the processing object whose generation goes on. checkpoint: the name of the loaded checkpoint. is_whole:
    False if the generation was interrupted."""
    generation = runtime.generations.end(p)
    if generation is None:
        return
    # The WebUI may have stopped before all images were made.
    images = generation.log.images or getattr(p, "n_iter", 1) * getattr(p, "batch_size", 1)
    like = checkpoint, *(str(getattr(p, name, "")) for name in MAKE_IMAGES_ALIKE)
    runtime.call_stats.end_image(generation, like, images, is_whole)
