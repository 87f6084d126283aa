"""The txt2img and img2img tabs."""
from __future__ import annotations

from typing import Any

import gradio as gr

from . import limits
from .modules import processing, sd_samplers, shared
from .modules.infotext_utils import connect_paste
from .page_job import run_on_page

# name of the attribute of StableDiffusionProcessing -> component
Inputs = dict[str, Any]
# name of the attribute -> the infotext parameter that fills its component
PASTED = {
    "prompt": "Prompt", "negative_prompt": "Negative prompt", "steps": "Steps", "sampler_name": "Sampler",
    "scheduler": "Schedule type", "cfg_scale": "CFG scale", "seed": "Seed", "width": "Size-1", "height": "Size-2",
    "denoising_strength": "Denoising strength", "mask_blur": "Mask blur",
}


def build_generation_tab(runner: Any, tab: str) -> None:
    """Build one tab inside the open gradio context; runner holds its scripts."""
    with gr.Row(elem_id=f"{tab}_toprow", elem_classes="toprow"):
        inputs = build_prompts(tab)
        with gr.Column(scale=1, min_width=160, elem_classes="actions"):
            generate = gr.Button("Generate", variant="primary", elem_id=f"{tab}_generate")
            interrupt = gr.Button("Interrupt", elem_id=f"{tab}_interrupt")
            paste = gr.Button("Read infotext", size="sm", elem_id=f"{tab}_paste")
    with gr.Row(equal_height=False):
        with gr.Column(scale=1, min_width=320, elem_id=f"{tab}_settings"):
            if tab == "img2img":
                inputs.update(build_image_inputs())
            inputs.update(build_parameters(tab))
            with gr.Column(elem_id=f"{tab}_script_container"):
                runner.setup_ui()
        with gr.Column(scale=1, min_width=320, elem_id=f"{tab}_results"):
            outputs = [
                gr.HTML(elem_id=f"{tab}_progress", elem_classes="progress-line"),
                gr.Gallery(
                    label="Output", show_label=False, elem_id=f"{tab}_gallery", columns=2, height=520,
                    object_fit="contain", format="png", preview=True,
                ),
                gr.HTML(elem_id=f"html_info_{tab}", elem_classes="infotext"),
                gr.Textbox(visible=False, elem_id=f"generation_info_{tab}"),
            ]
    # The WebUI tells its scripts of every component.
    for component in (*inputs.values(), generate, interrupt, paste, *outputs):
        runner.after_component(component, elem_id=component.elem_id, label=getattr(component, "label", None))

    kind = getattr(processing, f"StableDiffusionProcessing{tab.capitalize().replace('2i', '2I')}")
    generate.click(
        run_on_page(kind, list(inputs), runner), inputs=[*inputs.values(), *runner.inputs[1:]], outputs=outputs,
        show_progress="hidden", api_name=False,
    )
    fields = [(inputs[name], parameter) for name, parameter in PASTED.items() if name in inputs]
    connect_paste(paste, [*fields, *runner.infotext_fields], inputs["prompt"])
    interrupt.click(
        shared.state.interrupt, inputs=[], outputs=[], show_progress="hidden", queue=False, api_name=False
    )


def build_prompts(tab: str) -> Inputs:
    with gr.Column(scale=6, min_width=280):
        return {
            "prompt": gr.Textbox(
                label="Prompt", show_label=False, lines=3, placeholder="Prompt", elem_id=f"{tab}_prompt",
                elem_classes="prompt",
            ),
            "negative_prompt": gr.Textbox(
                label="Negative prompt", show_label=False, lines=2, placeholder="Negative prompt",
                elem_id=f"{tab}_neg_prompt", elem_classes="prompt",
            ),
        }


def build_image_inputs() -> Inputs:
    image = gr.Image(label="Image", type="pil", image_mode="RGBA", sources=["upload", "clipboard"],
                     elem_id="img2img_image", height=320)
    with gr.Accordion("Mask (white is repainted)", open=False, elem_id="img2img_mask_accordion"):
        mask = gr.Image(label="Mask", type="pil", image_mode="L", sources=["upload", "clipboard"],
                        elem_id="img_inpaint_mask", height=240)
        blur = gr.Slider(0, 64, value=4, step=1, label="Mask blur", elem_id="img2img_mask_blur")
    strength = gr.Slider(0, 1, value=0.75, step=0.01, label="Denoising strength",
                         elem_id="img2img_denoising_strength")
    return {"init_images": image, "mask": mask, "mask_blur": blur, "denoising_strength": strength}


def build_parameters(tab: str) -> Inputs:
    names = sd_samplers.visible_sampler_names()
    side = {
        "minimum": limits.SMALLEST_SIDE, "maximum": limits.LARGEST_SIDE, "step": limits.SIZE_STEP,
        "value": min(shared.sd_model.side, limits.LARGEST_SIDE),
    }
    with gr.Row():
        sampler = gr.Dropdown(names, value=names[0], label="Sampling method", elem_id=f"{tab}_sampling", min_width=180)
        schedule = gr.Dropdown(list(sd_samplers.SCHEDULES), value=sd_samplers.AUTOMATIC, label="Schedule type",
                               elem_id=f"{tab}_scheduler", min_width=180)
    steps = gr.Slider(1, limits.MOST_STEPS, value=20, step=1, label="Sampling steps", elem_id=f"{tab}_steps")
    with gr.Row():
        width = gr.Slider(label="Width", elem_id=f"{tab}_width", min_width=180, **side)
        height = gr.Slider(label="Height", elem_id=f"{tab}_height", min_width=180, **side)
    with gr.Row():
        batches = gr.Slider(1, limits.MOST_BATCHES, value=1, step=1, label="Batch count", min_width=180,
                            elem_id=f"{tab}_batch_count")
        batch = gr.Slider(1, limits.MOST_IMAGES_AT_ONCE, value=1, step=1, label="Batch size", min_width=180,
                          elem_id=f"{tab}_batch_size")
    with gr.Row():
        scale = gr.Slider(1, limits.LARGEST_CFG, value=7, step=0.5, label="CFG scale", elem_id=f"{tab}_cfg_scale",
                          min_width=180)
        seed = gr.Number(value=-1, precision=0, label="Seed", info="-1: a new one each time", elem_id=f"{tab}_seed",
                         min_width=180)
    return {
        "sampler_name": sampler, "scheduler": schedule, "steps": steps, "width": width, "height": height,
        "n_iter": batches, "batch_size": batch, "cfg_scale": scale, "seed": seed,
    }
