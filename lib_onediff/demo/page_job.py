"""Making images from the page: progress while it runs, images and infotext after, errors as a message."""
from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import gradio as gr

from . import rest
from .jobs import make_images
from .modules.processing import Processed
from .refusal import Refusal

SECONDS_BETWEEN_LOOKS = 0.2
UNCHANGED = gr.update()
Shown = tuple[Any, Any, Any, Any]


def run_on_page(kind: type, names: list[str], runner: Any) -> Callable[..., Iterator[Shown]]:
    """A handler of the Generate button.

    kind: the class of the generation; names: which of its arguments the first components are; the values of the
    remaining components go to the scripts. Yields what to show in (progress line, gallery, infotext, and the hidden
    text box that tells scripts of new images).
    """

    def generate(*values: Any) -> Iterator[Shown]:
        started = time.perf_counter()
        script_arguments = [0, *values[len(names) :]]
        worker = ThreadPoolExecutor(1)
        work = worker.submit(lambda: start(kind, dict(zip(names, values, strict=False)), runner, script_arguments))
        # Not to be waited for where the page is closed meanwhile: that would keep the server from answering.
        worker.shutdown(wait=False)
        while not wait([work], SECONDS_BETWEEN_LOOKS).done:
            yield progress_bar(), UNCHANGED, UNCHANGED, UNCHANGED
        try:
            processed = work.result()
        except Refusal as refusal:
            # gradio shows it as markup.
            gr.Warning(html.escape(refusal.detail))
            yield "", UNCHANGED, f"<p class='error'>{html.escape(refusal.detail)}</p>", UNCHANGED
            return
        yield "", processed.images, infotext_html(processed, time.perf_counter() - started), processed.js()

    return generate


def start(kind: type, inputs: dict[str, Any], runner: Any, script_arguments: list[Any]) -> Processed:
    """Make the images. Raises Refusal with a sentence."""
    if "init_images" in inputs:
        image = inputs["init_images"]
        inputs["init_images"] = [] if image is None else [image]
    for name in ("steps", "width", "height", "n_iter", "batch_size", "mask_blur"):
        if name in inputs:
            inputs[name] = whole_number(name, inputs[name])
    inputs["seed"] = -1 if inputs["seed"] is None else int(inputs["seed"])
    if inputs["cfg_scale"] is None:
        raise Refusal("cfg_scale is empty.")
    return make_images(kind(**inputs), runner, script_arguments)


def whole_number(name: str, value: Any) -> int:
    """A slider's value, into which users can type anything."""
    if value is None or value != int(value):
        raise Refusal(f"{name} must be a whole number.")
    return int(value)


def progress_bar() -> str:
    """The progress line while something is made."""
    done = rest.progress()
    share = done["progress"]
    state = done["state"]
    seconds = f", {done['eta_relative']:.0f} s left" if share > 0 and done["eta_relative"] >= 1 else ""
    steps = f"step {state['sampling_step']} of {state['sampling_steps']}{seconds}" if state["sampling_steps"] else ""
    text = ", ".join(part for part in (state["job"] if "Batch" in state["job"] else "", steps) if part) or "waiting"
    return (
        f"<div class='progressDiv' role='progressbar' aria-valuenow='{share * 100:.0f}'>"
        f"<div class='progress' style='width: {share * 100:.1f}%'></div><span>{html.escape(text)}</span></div>"
    )


def infotext_html(processed: Processed, seconds: float) -> str:
    """What is shown under the images."""
    lines = "<br>".join(html.escape(line) for line in processed.info.split("\n"))
    comments = "".join(f"<p class='comment'>{html.escape(line)}</p>" for line in processed.comments.split("\n") if line)
    if not processed.images:
        lines = "Interrupted before the first image."
    return f"<p>{lines}</p>{comments}<p class='performance'>Time taken: {seconds:.1f} s</p>"
