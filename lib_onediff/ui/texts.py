"""What users read on the page, but for what stands in options/settings.py: labels and explanations of options."""
from __future__ import annotations

from typing import Any

from ..core.table import ENOUGH
from ..options.settings import OFF_IN_SETTINGS
from ..options.sizes import Size
from .amounts import counted, memory, milliseconds, seconds

# --- fields -----------------------------------------------------------------------------------------------------------


def wrong_number(name: str, value: Any, kind: str) -> str:
    """kind: "a number" or "a whole number"."""
    return f"{name} is empty; type {kind}." if value in (None, "") else f"{name} must be {kind}, not {value!r}."


def out_of_range(name: str, value: float, least: float, most: float) -> str:
    return f"{name} is from {least:g} to {most:g}, not {value:g}."


# --- the settings page: for javascript/onediff_settings.js -----------------------------------------------------------

SETTINGS_PAGE = {
    "reset": "Reset", "reset_all": "Reset all to defaults", "default": "Default: {}", "none": "empty", "speed": "Speed",
}

# --- the accordion ----------------------------------------------------------------------------------------------------

USE = "Use OneDiff for this run"
PRESET, ADVANCED, CHANGES = "Speed", "Expert", "Extra options"
NOTHING_HERE_COUNTS = f"{OFF_IN_SETTINGS}."
PREWARM = "Pre-warm this size"
NO_IMAGE_YET, OFF = "no image yet", "off in the settings"
UNREADABLE = "OneDiff cannot show its status: see the console."
WHOLE_SIZES = "Width, height and batch size must be whole numbers."
# Routes, in the title and inside.
SHORT_ROUTES = {"graph": "graph", "plain": "no graph", "blocks": "blocks", "host": "WebUI's UNet"}
ROUTES = {
    "graph": "CUDA graph", "plain": "without CUDA graphs", "blocks": "blocks inside the WebUI's loop",
    "host": "the WebUI's UNet",
}
# Shown instead beside a model that OneDiff does not serve.
SHORT_NOT_SERVED, NOT_SERVED = "not served", "the WebUI's UNet"
STEPS = {
    "whole": "whole", "cached": "cached", "prompt alone": "without negative prompt", "forecast": "extrapolated",
    "host": "by the WebUI's UNet",
}


def this_run(described: str) -> str:
    return f"This run: {described}."


def set_here(words: str) -> str:
    return f"Set here: {words}"


def an_image(seconds_an_image: float, host: float | None) -> str:
    """host: what the WebUI takes for a like image, where that is known."""
    beside = "" if host is None else f" (WebUI alone: {seconds(host)})"
    return f"{seconds(seconds_an_image)}{beside}"


def mean_step(step_ms: float | None, steps: dict[str, int]) -> str:
    """steps: how many there were of each kind."""
    kinds = ", ".join(f"{count} {STEPS.get(kind, kind)}" for kind, count in steps.items())
    mixed = f" (mean of {kinds})" if step_ms is not None and len(steps) > 1 else ""
    return f"{milliseconds(step_ms)}{mixed}"


def not_compared(host_ms: float | None) -> str:
    """Why a step is not compared with the WebUI's."""
    return "the WebUI was not timed for these steps" if host_ms is None else "too few steps timed yet"


def no_effect_here(options: list[str]) -> str:
    return f"No effect on this machine: {', '.join(options)}."


def off_for_this_run(problem: Exception) -> str:
    return f"{problem} Fix this, or the image is made without OneDiff."


def warming(size: Size, share: float) -> str:
    return f"{size}: {100 * share:.0f} %"


def is_ready(size: Size) -> str:
    return f"✓ {size} is ready"


# --- the Cache page ---------------------------------------------------------------------------------------------------

PREWARM_SIZES, EVERY_FAMILY = "Pre-warm sizes", "Sizes for other models too"
NO_ROWS = "Nothing yet. Generate an image, or pre-warm a size: click one above."
SELECT_FIRST = "Select at least one resolution in the table first."
CHOOSE_MODEL = "Choose a model in the list above the table first."
TYPE_A_SIZE = "Type at least one size, for example 512x512."
NOTHING_QUEUED, NOTHING_TO_PURGE = "Nothing is being pre-warmed.", "There is nothing to purge."
NOTHING_PURGED, PURGED_NOTHING = "Nothing was purged.", "There was nothing to purge."
RELEASED_NOTHING, DELETED = "No graph held memory, so none was released.", "The cache folder is empty now."
# By what a shape's state is called in the API: what users read, where it is another word, and what it means.
STATE_NAMES = {"cold": "not checked yet", "proved": "checked"}
STATES = {
    "cold": "seen, but not compared with the WebUI's UNet yet",
    "proved": "agrees with the WebUI's UNet; runs without CUDA graphs",
    "ready": "the next call replays a graph",
    "failed": "the WebUI's UNet serves it",
    "on disk": "used on this machine before the WebUI was started",
    "queued": "waits in the pre-warm queue",
    "warming": "is being pre-warmed now",
}
WORDS = {
    "Computed by": "the backend and, with DeepCache, the kind of step: full or cached",
    "pinned": "its graph stays when memory runs short",
    "Step": "mean over all steps of the last image; of a shape, its own calls",
    "Ratio": f"how many times faster than the WebUI, after {ENOUGH} calls of each; below, its range",
    "Memory": "what its graphs need; all graphs share one pool: below, what purging this row frees",
    "Error": "relative difference from the WebUI's output when it was checked",
    "Error alone": "as Error, with only these layers in 8 bits",
}
TOTALS = {
    "Graph memory": "GPU memory of all graphs, and its limit",
    "Low-bit weights": "GPU memory of the 8-bit weights",
    "OneFlow": "graphs that OneFlow has compiled since the WebUI was started, and their limit",
    "Disk": "what is remembered and tuned, in the cache folder",
    "Served by a graph": "share of the UNet calls since the start that replayed a graph",
    "Queue": "sizes that are being pre-warmed, or wait for it",
    "Calls": "UNet calls since the start",
}
COMPUTED_IN = {True: "8 bits", False: "16 bits"}


def more_rows(rows: int) -> str:
    return f"{rows} more: choose a model above to see fewer."


def whole_step(error: str, budget: str) -> str:
    """error: "" where no layer is in 8 bits."""
    return f"Whole step: {error} of at most {budget}." if error else f"No layer is in 8 bits within {budget}."


def cancelled(sizes: int) -> str:
    return f"{counted(sizes, 'size')} cancelled." if sizes else NOTHING_QUEUED


def pinned(resolutions: int, pinned: bool) -> str:
    return f"{counted(resolutions, 'resolution')} {'pinned' if pinned else 'unpinned'}."


def released(freed: int) -> str:
    return f"Released {memory(freed)} of VRAM; graphs are recorded again when needed." if freed else RELEASED_NOTHING


def waits(work: str) -> str:
    return f"{work} waits until no image is being made."


def failed(work: str, reason: str) -> str:
    return f"{work} failed: {reason}."


def purge_question(what: str, freed: int) -> str:
    frees = f"This frees about {memory(freed)} of VRAM" if freed else "This frees no VRAM"
    return f"Purge {what}? {frees}; the history on disk goes too."


def disk_question(size: int) -> str:
    frees = f"This frees about {memory(size)} of disk" if size else "The cache folder is empty"
    return f"Delete everything in the cache folder? {frees}; what is ready stays ready until the WebUI ends."


def deleted(freed: int) -> str:
    return f"Freed {memory(freed)} of disk." if freed else DELETED


def purged(resolutions: int, freed: int, had_graphs: bool) -> str:
    what = f"{counted(resolutions, 'resolution')} purged"
    if freed:
        return f"{what}, {memory(freed)} freed."
    if had_graphs:
        return f"{what}; larger graphs share their memory, so nothing was freed."
    return f"{what}; they held no graph memory."


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
IDENTICAL, EQUALLY_FAST = "Identical: every pixel of every image is the same.", "Neither side is measurably faster."
MEANINGS = {
    "PSNR": "peak signal-to-noise ratio: above 48 dB no difference is seen",
    "SSIM": "structural similarity: 1 is the same image",
    "Largest": "the largest difference of a pixel's channel, of 255",
    "Lightness": "change of the mean lightness L*, from 0 to 100",
    "Contrast": "change of the standard deviation of L*",
    "Saturation": "change of the root mean square of the chroma C*ab",
    "Left": "how long the left image took", "Right": "how long the right image took",
}
NOTHING_TO_SAVE = "There is nothing to save yet. Click Compare first."
PASTE_HERE = "Paste it here."
REPORT_FILES = "Download: the report, and each seed's images"
REPORT_EXPLAINED = (
    "The report names what an image depends on to its last digit; no paths, no secrets.",
    "Copy it and paste it on the other machine, or the other way round.",
)
NOTHING_DIFFERS = "Nothing differs: both machines should make the same image."
# What differs, by what it does to an image: see consistency/report.py.
RANKS = (
    "These change images", "These change the last digits of an image", "These change no image by themselves",
)


def no_settings(name: str, did_you_mean: str) -> str:
    return f"There are no settings called {name!r}.{did_you_mean}"


def not_made(reason: str) -> str:
    return f"The image could not be made: {reason}"


def paler(pale: int, seeds: int) -> str:
    return f"The right images are paler, in {pale} of {counted(seeds, 'seed')}."


def differs_most(seed: int, verdict: str) -> str:
    return f"Seed {seed} differs most. {verdict}"


def more_images(images: int) -> str:
    return f"To compare times too, set Images to {images} or more."


def faster(faster: str, slower: str, ratio: tuple[float, float, float], images: int) -> str:
    """ratio: median, least and most."""
    spread = "{:.2f} to {:.2f}".format(*ratio[1:])
    count = f"{counted(images, 'image')} of each"
    return f"The {faster} side is {ratio[0]:.2f} times as fast as the {slower} ({spread}, {count})."


def saved(page: str, images: int) -> str:
    beside = "a PNG" if images == 1 else f"{images} PNGs"
    return f"Saved {page}, and {beside}, in the WebUI's output folder."


def not_saved(reason: str | None) -> str:
    return f"The report could not be saved: {reason or 'the folder cannot be used'}."


def facts_differ(number: int) -> str:
    return "1 fact differs." if number == 1 else f"{number} facts differ."
