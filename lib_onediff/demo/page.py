"""The demo's page: the txt2img tab, the tabs that scripts add, and the settings tab."""
from __future__ import annotations

import contextlib
import html
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import gradio as gr
import torch

from ..core.guard import first_line
from ..core.refusal import Refusal
from .modules import paths, progress, script_callbacks, scripts, shared
from .modules.call_queue import queue_lock
from .modules.processing import (
    Processed,
    StableDiffusionProcessingTxt2Img,
    connect_paste,
    process_images,
    samplers_of,
)
from .modules.shared import OptionInfo

log = logging.getLogger("onediff")
# Components by the field of StableDiffusionProcessingTxt2Img that they set.
Inputs = dict[str, Any]
# The infotext parameter that fills a component, by the component's field.
PASTED = {
    "prompt": "Prompt", "negative_prompt": "Negative prompt", "steps": "Steps", "sampler_name": "Sampler",
    "cfg_scale": "CFG scale", "seed": "Seed", "width": "Size-1", "height": "Size-2",
}
# The largest width and height, in pixels.
LARGEST_SIDE = 2048
# The time between two updates of the progress line.
SECONDS_BETWEEN_LOOKS = 0.2
# The number of generations that gradio starts at once. They wait for queue_lock instead of gradio's queue, so that each
# can show what it waits for.
MOST_IMAGES_AT_ONCE = 10
# shared.state.job of the demo's generations.
TXT2IMG = "txt2img"
# Shown if a generation was withdrawn or interrupted before it had an image.
NEVER_BEGUN = "Interrupted before the first image."
# The value of an output that stays as it is.
UNCHANGED = gr.update()
# Prompts with a button each; the first one is in the text box at the start. The shipped models draw emoji.
EXAMPLES = (
    "an owl and a rocket on a blue background", "a lion on a yellow background", "a shinto shrine on a red background",
)
FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Ubuntu", "sans-serif")
MONOSPACE_FONTS = ("ui-monospace", "Consolas", "Liberation Mono", "monospace")
# HTML tags, which option_component removes from an option's explanation.
TAGS = re.compile(r"<[^>]*>")


def appearance() -> dict[str, Any]:
    """The theme, styles and scripts of the page, as keyword arguments of gr.mount_gradio_app."""
    theme = gr.themes.Default(
        primary_hue="orange", secondary_hue="orange", neutral_hue="slate", radius_size="md", font=FONTS,
        font_mono=MONOSPACE_FONTS,
    ).set(slider_color="*primary_500", slider_color_dark="*primary_500")
    # In the head, because gradio rewrites the rules of its argument css; a WebUI serves the extension's style.css as it
    # is.
    extension = Path(paths.script_path)
    scripts_of_page = "".join(f"<script>{text_of(file)}</script>" for file in sorted(extension.glob("javascript/*.js")))
    head = f"<style>{text_of(extension / 'style.css')}</style>{scripts_of_page}"
    return {"theme": theme, "css": text_of(Path(__file__).with_name("page.css")), "head": head}


def build_page() -> gr.Blocks:
    """Build the demo's page: its own tabs, and those that scripts add. The model and the scripts must be loaded, and
    the options added."""
    script_callbacks.call_all("before_ui")
    # The tabs are built outside of the page's context, as in a WebUI, and rendered inside of it.
    tabs = [tab for tabs in script_callbacks.call_all("ui_tabs") for tab in tabs or ()]
    with gr.Blocks(title="OneDiff", analytics_enabled=False) as page:
        model = " · ".join(filter(None, (shared.sd_model.name, shared.sd_model.about)))
        gr.HTML(f"<h1>OneDiff</h1><span>{html.escape(model)}</span>", elem_id="onediff_header")
        with gr.Tabs(elem_id="tabs"):
            with gr.Tab("txt2img", id="txt2img", elem_id="tab_txt2img"):
                build_generation_tab(scripts.scripts_txt2img)
            for content, title, elem_id in tabs:
                with gr.Tab(title, id=elem_id, elem_id=f"tab_{elem_id}"):
                    content.render()
            with gr.Tab("Settings", id="settings", elem_id="tab_settings"):
                build_settings_tab(page)
    return page


def text_of(file: Path) -> str:
    """The text of a file; "" if there is no such file."""
    return file.read_text(encoding="utf-8") if file.is_file() else ""


# --- txt2img ----------------------------------------------------------------------------------------------------------


def build_generation_tab(runner: Any) -> None:
    """Build the txt2img tab inside the open gradio context, with the components of the scripts, and connect its
    buttons. runner: the scripts' ScriptRunner."""
    with gr.Row(elem_id="txt2img_toprow", elem_classes="toprow"):
        inputs, examples = build_prompts()
        with gr.Column(scale=1, min_width=160, elem_classes="actions"):
            generate = gr.Button("Generate", variant="primary", elem_id="txt2img_generate")
            interrupt = gr.Button("Interrupt", elem_id="txt2img_interrupt")
            paste = gr.Button("Read infotext", size="sm", elem_id="txt2img_paste")
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=320, elem_id="txt2img_settings"):
            inputs.update(build_parameters())
            with gr.Column(elem_id="txt2img_script_container"):
                runner.setup_ui()
        with gr.Column(scale=1, min_width=320, elem_id="txt2img_results"):
            made = gr.Textbox(visible=False, elem_id="generation_info_txt2img")
            outputs = [
                gr.HTML(elem_id="txt2img_progress", elem_classes="progress-line"),
                gr.Gallery(
                    label="Output", show_label=False, elem_id="txt2img_gallery", columns=2, height=520,
                    object_fit="contain", format="png", preview=True,
                ),
                gr.HTML(elem_id="html_info_txt2img", elem_classes="infotext"),
                made,
            ]
    # WebUIs call this for every component; OneDiff's script only uses this one.
    runner.after_component(made)

    generating: dict[str, Any] = {
        "fn": making_images(list(inputs), runner), "inputs": [*inputs.values(), *runner.inputs[1:]], "outputs": outputs,
        "show_progress": "hidden", "api_visibility": "private", "concurrency_limit": MOST_IMAGES_AT_ONCE,
        "concurrency_id": "images",
    }
    generate.click(**generating)
    for button, example in zip(examples, EXAMPLES, strict=True):
        button.click(
            lambda text=example: text, inputs=[], outputs=[inputs["prompt"]], queue=False, api_visibility="private"
        ).then(**generating)
    fields = [(inputs[name], parameter) for name, parameter in PASTED.items()]
    connect_paste(paste, [*fields, *runner.infotext_fields], inputs["prompt"])
    interrupt.click(
        stop_image, inputs=[], outputs=[], show_progress="hidden", queue=False, api_visibility="private"
    )


def build_prompts() -> tuple[Inputs, list[Any]]:
    """Build the prompts' text boxes, and a button for each of EXAMPLES, inside the open gradio context. Returns (text
    boxes by field, buttons in the order of EXAMPLES)."""
    def textbox(label: str, value: str, lines: int, elem_id: str) -> gr.Textbox:
        return gr.Textbox(value, label=label, show_label=False, lines=lines, placeholder=label,
                          elem_id=f"txt2img_{elem_id}", elem_classes="prompt")

    with gr.Column(scale=6, min_width=280):
        prompt = textbox("Prompt", EXAMPLES[0], 2, "prompt")
        with gr.Row(elem_classes="examples"):
            examples = [gr.Button(text, size="sm", min_width=120) for text in EXAMPLES]
        return {"prompt": prompt, "negative_prompt": textbox("Negative prompt", "", 2, "neg_prompt")}, examples


def build_parameters() -> Inputs:
    """Build the components for the other parameters of a generation inside the open gradio context, and return them by
    field."""
    def slider(label: str, elem_id: str, least: int, most: int, value: float, step: float = 1) -> gr.Slider:
        # gradio refuses requests with values beyond these bounds.
        return gr.Slider(
            least, most, value, step=step, precision=1 if step < 1 else 0, label=label, elem_id=f"txt2img_{elem_id}",
            min_width=180,
        )

    model = shared.sd_model
    names = list(samplers_of(model.pipeline.scheduler))
    side = min(model.side, LARGEST_SIDE)
    inputs: Inputs = {}
    with gr.Row():
        inputs["sampler_name"] = gr.Dropdown(
            names, value=names[0], label="Sampling method", elem_id="txt2img_sampling", min_width=180
        )
        inputs["steps"] = slider("Sampling steps", "steps", 1, 150, model.steps)
    with gr.Row():
        inputs["width"] = slider("Width", "width", 64, LARGEST_SIDE, side, model.side_step)
        inputs["height"] = slider("Height", "height", 64, LARGEST_SIDE, side, model.side_step)
    with gr.Row():
        inputs["n_iter"] = slider("Batch count", "batch_count", 1, 100, 1)
        inputs["batch_size"] = slider("Batch size", "batch_size", 1, 8, 1)
    with gr.Row():
        inputs["cfg_scale"] = slider("CFG scale", "cfg_scale", 1, 30, model.cfg_scale, 0.5)
        inputs["seed"] = gr.Number(
            value=-1, precision=0, minimum=-1, maximum=2**53 - 1, label="Seed", info="-1: a new one each time",
            elem_id="txt2img_seed", min_width=180,
        )
    return inputs


def making_images(names: list[str], runner: Any) -> Callable[..., Iterator[tuple[Any, ...]]]:
    """A new handler for the Generate button. It makes the images in a thread, and yields values for (progress line,
    gallery, infotext, the hidden text box whose change tells scripts of new images): every SECONDS_BETWEEN_LOOKS with a
    new progress line, and at the end with the images, or with the reason why there are none.

    names: the fields of StableDiffusionProcessingTxt2Img whose values the handler gets first; the values after
    these are the scripts' arguments. runner: the scripts' ScriptRunner.
    """

    def generate(request: gr.Request, *values: Any) -> Iterator[tuple[Any, ...]]:
        """The handler; gradio passes the request besides the values."""
        started = time.perf_counter()
        worker = ThreadPoolExecutor(1)
        task = page_of(request) + secrets.token_hex(8)
        fields = dict(zip(names, values, strict=False))
        arguments = [0, *values[len(names) :]]
        p = StableDiffusionProcessingTxt2Img(**fields)
        work = worker.submit(make_images, p, runner, arguments, task)
        # wait=False: if the page is closed meanwhile, waiting for the images would block the server.
        worker.shutdown(wait=False)
        while not wait([work], SECONDS_BETWEEN_LOOKS).done:
            if task in progress.withdrawn_tasks:
                yield "", UNCHANGED, f"<p>{NEVER_BEGUN}</p>", UNCHANGED
                return
            yield progress_bar(task), UNCHANGED, UNCHANGED, UNCHANGED
        try:
            processed = work.result()
        except Refusal as refusal:
            # gradio shows the text as HTML.
            sentence = html.escape(str(refusal))
            gr.Warning(sentence)
            yield "", UNCHANGED, f"<p class='error'>{sentence}</p>", UNCHANGED
        else:
            # Any value that differs each time will do for the hidden text box.
            shown = gr.update(value=processed.images, selected_index=0 if processed.images else None)
            yield "", shown, infotext_html(processed, time.perf_counter() - started), str(started)

    return generate


def page_of(request: gr.Request) -> str:
    """The prefix of the names of all tasks that one open page starts, by which stop_image finds them."""
    return f"{request.session_hash}/"


def stop_image(request: gr.Request) -> None:
    """The handler of the Interrupt button: stop the image in progress. But if this page's images still wait while
    another page's image is in progress, withdraw those that wait instead."""
    own = page_of(request)
    waiting = [task for task in list(progress.pending_tasks) if task.startswith(own)]
    if not waiting or progress.current_task.startswith(own):
        shared.state.interrupt()
    else:
        for task in waiting:
            progress.withdraw(task)


def make_images(p: Any, runner: Any, script_args: list[Any], task: str = "") -> Processed:
    """Wait for this generation's turn, and make its images.

    p: the generation's parameters; closed afterwards. script_args: 0, then the values of the scripts' components. task:
    the generation's unique name, for progress_bar() and stop_image(). Raises Refusal, for users, for any error, and if
    the task was withdrawn.
    """
    progress.add_task_to_queue(task)
    try:
        with queue_lock, contextlib.closing(p):
            if not progress.start_task(task):
                raise Refusal(NEVER_BEGUN)
            shared.state.begin(TXT2IMG)
            try:
                p.scripts = runner
                p.script_args = tuple(script_args)
                return process_images(p)
            finally:
                shared.state.end()
                progress.finish_task()
    except Refusal:
        raise
    except Exception as error:
        if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            raise Refusal("There is not enough memory for this image; try a smaller size or batch.") from error
        log.exception("a generation failed")
        raise Refusal(f"The generation failed: {type(error).__name__}: {first_line(error)}") from error


def progress_bar(task: str) -> str:
    """The progress line of a task as HTML: what it waits for, or how many steps of which batch are done."""
    share = shared.state.share_done()
    state = shared.state
    if task in progress.pending_tasks:
        # While OneDiff pre-warms sizes, the WebUI's state has no job.
        others = {TXT2IMG: "for another image", "": "for a job of OneDiff: see the list of jobs in the OneDiff tab"}
        return bar_html(0, f"waiting {others.get(state.job, f'for {state.job}')}")
    batch = f"Batch {state.job_no + 1} out of {state.job_count}" if state.job_count > 1 else ""
    steps = f"step {state.sampling_step} of {state.sampling_steps}" if state.sampling_steps else ""
    return bar_html(share, ", ".join(filter(None, (batch, steps))) or "beginning")


def bar_html(share: float, text: str) -> str:
    """A progress line as HTML. share: the part that is done, from 0 to 1. text: shown on the line; escaped here."""
    return (
        f"<div class='progressDiv' role='progressbar' aria-valuenow='{share * 100:.0f}'>"
        f"<div class='progress' style='width: {share * 100:.1f}%'></div><span>{html.escape(text)}</span></div>"
    )


def infotext_html(processed: Processed, seconds: float) -> str:
    """The HTML under the images: the first image's infotext, or NEVER_BEGUN without images; the comments; and the
    duration."""
    lines = "<br>".join(html.escape(line) for line in processed.infotexts[0].split("\n"))
    comments = "".join(f"<p class='comment'>{html.escape(line)}</p>" for line in processed.comments.split("\n") if line)
    if not processed.images:
        lines = NEVER_BEGUN
    return f"<p>{lines}</p>{comments}<p class='performance'>Time taken: {seconds:.1f} s</p>"


# --- settings ---------------------------------------------------------------------------------------------------------


def build_settings_tab(page: gr.Blocks) -> None:
    """Build the settings tab inside the open gradio context. page: the whole page; each time it is loaded, the tab
    shows the current values."""
    with gr.Row():
        apply = gr.Button("Apply settings", variant="primary", elem_id="settings_submit", scale=0, min_width=200)
    result = gr.HTML(elem_id="settings_result")
    with gr.Column(elem_id="settings_onediff", elem_classes="settings-section"):
        components = {key: option_component(key, info) for key, info in shared.opts.data_labels.items()}
    apply.click(
        lambda *values: apply_settings(dict(zip(components, values, strict=True))), inputs=list(components.values()),
        outputs=[result], show_progress="hidden", api_visibility="private",
    )
    page.load(
        lambda: [getattr(shared.opts, key) for key in components], inputs=[], outputs=list(components.values()),
        show_progress="hidden", api_visibility="private",
    )


def option_component(key: str, info: OptionInfo) -> Any:
    """A new component for an option, with its current value. key: the option's name."""
    return info.component(
        value=getattr(shared.opts, key), label=info.label, info=html.unescape(TAGS.sub("", info.explanation)),
        elem_id=f"setting_{key}", **info.component_args,
    )


def apply_settings(values: dict[str, Any]) -> str:
    """Set options, given by name, and save them. Returns sentences as HTML: how many and which options changed, and, if
    they could not be saved, why."""
    # The option's onchange tells users why it does not accept a value.
    changed, _, trouble = shared.opts.set_and_save(values, shared.config_filename)
    count = {0: "No setting", 1: "1 setting"}.get(len(changed), f"{len(changed)} settings")
    names = f": {', '.join(changed)}" if changed else ""
    return html.escape(f"{count} changed{names}. {trouble}".strip())
