"""What users read on the page, but for what stands in options/settings.py: labels and explanations of options."""
from __future__ import annotations

from typing import Any

from ..options.settings import OFF_IN_SETTINGS
from ..shapes.sizes import Size
from ..shapes.table import ENOUGH
from .amounts import counted, memory, milliseconds, seconds

# --- fields -----------------------------------------------------------------------------------------------------------


def wrong_number(name: str, value: Any, kind: str) -> str:
    """kind: "a number" or "a whole number"."""
    return f"{name} is empty; type {kind}." if value in (None, "") else f"{name} must be {kind}, not {value!r}."


def out_of_range(name: str, value: float, least: float, most: float) -> str:
    return f"{name} is from {least:g} to {most:g}, not {value:g}."


# --- the settings page: for javascript/onediff_settings.js -----------------------------------------------------------

SETTINGS_PAGE = {
    "reset": "Reset", "reset_all": "Reset all to defaults", "default": "Default: {}", "none": "empty",
    "changed_one": "1 setting differs from its default.", "changed": "{} settings differ from their defaults.",
    "unchanged": "All settings are at their defaults.",
}

# --- the accordion ----------------------------------------------------------------------------------------------------

USE = "Use OneDiff for this run"
PRESET, ADVANCED, CHANGES = "Preset", "Advanced", "Changed options for this run"
NOTHING_HERE_COUNTS = f"{OFF_IN_SETTINGS}."
PREWARM = "Pre-warm this size"
NO_IMAGE_YET, OFF = "no image yet", "off in the settings"
UNREADABLE = "OneDiff cannot show its status: see the console."
WHOLE_SIZES = "Width, height and batch size must be whole numbers."
# Routes, in the title and inside.
SHORT_ROUTES = {"graph": "graph", "plain": "no graph", "blocks": "blocks", "host": "WebUI's UNet"}
ROUTES = {
    "graph": "CUDA graph", "plain": "plain launches", "blocks": "blocks inside the host's loop",
    "host": "the WebUI's own UNet",
}
# In their place beside a model that OneDiff does not serve.
SHORT_NOT_SERVED, NOT_SERVED = "not served", "the WebUI's own"
STEPS = {
    "whole": "whole", "cached": "cached", "prompt alone": "of the prompt alone", "forecast": "forecast",
    "host": "by the WebUI's own UNet",
}


def this_run(described: str) -> str:
    return f"This run: {described}."


def an_image(seconds_an_image: float, host: float | None) -> str:
    """host: what the WebUI's own takes for one like it, where that is known."""
    beside = "" if host is None else f" (the WebUI's own: {seconds(host)})"
    return f"{seconds(seconds_an_image)}{beside}"


def mean_step(step_ms: float | None, steps: dict[str, int]) -> str:
    """steps: how many were of which kind."""
    kinds = ", ".join(f"{count} {STEPS.get(kind, kind)}" for kind, count in steps.items())
    mixed = f" (mean of {kinds})" if step_ms is not None and len(steps) > 1 else ""
    return f"{milliseconds(step_ms)}{mixed}"


def not_compared(host_ms: float | None) -> str:
    """Why a step is not compared with the WebUI's own."""
    why = "the WebUI's own was not timed for these steps" if host_ms is None else "too few steps were timed yet"
    return f"not compared: {why}"


def no_effect_here(options: list[str]) -> str:
    return f"No effect on this machine: {', '.join(options)}."


def off_for_this_run(problem: Exception) -> str:
    return f"{problem} OneDiff would be off for this run."


def warming(size: Size, share: float) -> str:
    return f"{size}: {100 * share:.0f} %"


def is_ready(size: Size) -> str:
    return f"✓ {size} is ready"


# --- the Cache page ---------------------------------------------------------------------------------------------------

MORE_FAMILIES, FEWER_FAMILIES = "Sizes of other models", "Sizes of this model alone"
NO_ROWS = "Nothing yet. Generate an image, or pre-warm a size: click one above."
SELECT_FIRST = "Select at least one resolution in the table first."
CHOOSE_MODEL = "Choose a model in the list above the table first."
TYPE_A_SIZE = "Type at least one size, for example 512x512."
NOTHING_QUEUED, NOTHING_TO_PURGE = "Nothing is being pre-warmed.", "There is nothing to purge."
NOTHING_PURGED, PURGED_NOTHING = "Nothing was purged.", "There was nothing to purge."
RELEASED_NOTHING, DELETED = "No graph held memory, so none was released.", "Deleted what was kept on disk."
STATES = {
    "cold": "seen, not checked yet",
    "proved": "agrees with the WebUI's own UNet; runs with plain launches",
    "ready": "the next call replays a graph",
    "failed": "the WebUI's own UNet serves it",
    "on disk": "used by an earlier process on this machine",
    "queued": "waits in the pre-warm queue",
    "warming": "is being made ready now",
}
WORDS = {
    "Computed by": "the backend and, with DeepCache, the pass: full, or cached between two full ones",
    "pinned": "its graph stays when memory runs short",
    "Step": "mean over all steps of the last image; of a shape, its own calls",
    "Ratio": f"times as fast as the WebUI's own after {ENOUGH} calls of each; below, its spread",
    "Memory": "what its graphs need; they share one pool: below, what purging this row alone frees",
    "Error": "relative distance from the WebUI's own output when it was checked",
    "Error alone": "as Error, with only these layers in eight bits, from the exact step",
}
TOTALS = {
    "Graph memory": "GPU memory that all graphs hold, of what they may hold",
    "Low-bit weights": "GPU memory of the weights in eight bits, beside the WebUI's own or in their place",
    "OneFlow": "graphs that OneFlow has compiled in this process, of those that it may",
    "Disk": "history, verdicts, measured choices and compiled kernels in the cache folder",
    "Served by a graph": "share of the UNet calls of this process that replayed a graph",
    "Queue": "sizes that are being pre-warmed, or wait for it",
    "Calls": "UNet calls of this process by route",
}
COMPUTED_IN = {True: "eight bits", False: "exact"}


def whole_step(error: str, budget: str) -> str:
    """error: "" where all is exact."""
    return f"Whole step: {error} of at most {budget}." if error else f"All is exact: no layers keep within {budget}."


def in_queue(sizes: int) -> str:
    return f"{counted(sizes, 'size')} in the queue."


def cancelled(sizes: int) -> str:
    return f"{counted(sizes, 'size')} cancelled." if sizes else NOTHING_QUEUED


def pinned(resolutions: int, pinned: bool) -> str:
    return f"{counted(resolutions, 'resolution')} {'pinned' if pinned else 'not pinned any more'}."


def released(freed: int) -> str:
    return f"Released {memory(freed)} of VRAM; each size is recorded anew when needed." if freed else RELEASED_NOTHING


def waits(work: str) -> str:
    return f"{work} waits until no image is being made."


def failed(work: str, reason: str) -> str:
    return f"{work} failed: {reason}."


def purge_question(what: str, freed: int) -> str:
    frees = f"This frees about {memory(freed)} of VRAM" if freed else "No VRAM comes back by that"
    return f"Purge {what}? {frees}; the history on disk goes too."


def disk_question(held: int) -> str:
    frees = f"This frees about {memory(held)} of disk" if held else "The disk holds none now"
    return (
        f"Delete history, verdicts, measured choices and compiled kernels? {frees}; "
        "what is ready stays ready until the WebUI ends."
    )


def deleted(freed: int) -> str:
    return f"Freed {memory(freed)} of disk." if freed else DELETED


def purged(resolutions: int, freed: int, had_graphs: bool) -> str:
    forgotten = f"{counted(resolutions, 'resolution')} forgotten"
    if freed:
        return f"{forgotten}, freed {memory(freed)}."
    if had_graphs:
        return f"{forgotten}; larger graphs share their memory, so none came back."
    return f"{forgotten}; no graph memory was held."


# --- the Presets page -------------------------------------------------------------------------------------------------

PRESETS_EXPLAINED = (
    "Seconds: SDXL 1024x1024, 30 steps, on an H100, where the WebUI's own takes 3.26 s.",
    "Distance from the exact image: 0 is the same image, 4.4 another prompt's.",
    "A preset chosen in the accordion holds for that image.",
    "<i>Use these settings</i> puts it into the settings to stay.",
)
DEFAULTS = "every option at its default"


def preset_used(name: str, changed: list[str], enabled: bool) -> str:
    """changed: labels of options."""
    if not changed:
        return f"The settings were those of {name!r} already."
    off = "" if enabled else f" {OFF_IN_SETTINGS}."
    return f"The settings are those of {name!r} now. Changed: {', '.join(changed)}.{off}"


# --- the Compare and Consistency pages --------------------------------------------------------------------------------

COMPARE_FIRST = "Choose two settings, type a prompt, then click Compare."
SWITCHED_OFF = "OneDiff is switched off in the settings. Switch it on there to compare."
NOTHING_COMPARED, STOPPING, STOPPED = "Nothing is being compared.", "Stopping.", "Stopped."
STOPPED_EARLY = "Stopped before all images were made."
EQUALLY_FAST = "Neither side is measurably faster."
MEANINGS = {
    "PSNR": "peak signal-to-noise ratio: above 48 dB no difference can be seen",
    "SSIM": "structural similarity: 1 is the same image",
    "Largest": "the largest difference of a pixel's channel, of 255",
    "ΔE": "mean distance of colours in CIELAB: from 2.3 on, people tell two patches apart",
    "Saturation": "change of the chroma in CIELAB", "Contrast": "change of the spread of L* in CIELAB",
    "Left": "how long the left image took", "Right": "how long the right image took",
}
PASTE_HERE = "Paste it here."
REPORT_EXPLAINED = (
    "The report names what an image depends on to its last digit; no paths, no secrets.",
    "Copy it and paste it on the other machine, or the other way round.",
)
NOTHING_DIFFERS = "Nothing differs: both machines should make the same image."
# What differs, by what it does to an image: see runtime/consistency.py.
RANKS = (
    "These change images", "These change the last digits of an image", "These change no image by themselves",
)


def no_settings(name: str, did_you_mean: str) -> str:
    return f"There are no settings called {name!r}.{did_you_mean}"


def not_made(reason: str) -> str:
    return f"The image could not be made: {reason}"


def differs_most(seed: int, verdict: str) -> str:
    return f"Seed {seed} differs most. {verdict}"


def more_images(images: int) -> str:
    return f"To compare times too, set Images to {images} or more."


def faster(faster: str, slower: str, ratio: tuple[float, float, float], images: int) -> str:
    """ratio: median, least and most."""
    spread = "{:.2f} to {:.2f}".format(*ratio[1:])
    count = f"{counted(images, 'image')} of each"
    return f"The {faster} side is {ratio[0]:.2f} times as fast as the {slower} ({spread}, {count})."


def facts_differ(number: int) -> str:
    return "1 fact differs." if number == 1 else f"{number} facts differ."
