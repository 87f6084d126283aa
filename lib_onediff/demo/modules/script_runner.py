"""Runs the scripts of one tab at each moment of a generation. What a script raises is logged and goes no further."""
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import errors
from .script_arguments import OnComponent

# What a script's show() answers to take part in every generation.
AlwaysVisible = object()


class ScriptRunner:
    """The always-visible scripts of the txt2img or the img2img tab."""

    def __init__(self) -> None:
        self.scripts: list[Any] = []
        self.alwayson_scripts: list[Any] = []
        self.selectable_scripts: list[Any] = []
        self.infotext_fields: list[Any] = []
        self.inputs: list[Any] = [None]
        self.default_arguments: list[Any] = [0]

    def initialize_scripts(self, is_img2img: bool, scripts_data: Sequence[Any]) -> None:
        """Make one object of each script class."""
        for data in scripts_data:
            try:
                script = data.script_class()
                script.filename = data.path
                script.is_txt2img, script.is_img2img = not is_img2img, is_img2img
                script.tabname = "img2img" if is_img2img else "txt2img"
                visible = script.show(is_img2img) is AlwaysVisible
            except Exception:
                errors.report(f"Error initializing script of {data.path}", exc_info=True)
                continue
            if visible:
                script.alwayson = True
                self.scripts.append(script)
                self.alwayson_scripts.append(script)

    def prepare_ui(self) -> None:
        """Start a new page: position 0 of the arguments is the selectable script, of which there is none."""
        self.inputs = [None]

    def setup_ui(self) -> None:
        """Create the components of every script inside the gradio context that is open."""
        import gradio as gr

        for script in sorted(self.alwayson_scripts, key=lambda script: script.sorting_priority):
            if not script.create_group:
                self.create_script_ui(script)
                continue
            with gr.Group() as group:
                self.create_script_ui(script)
            script.group = group

    def create_script_ui(self, script: Any) -> None:
        """Call the script's ui() and give its components their place among the arguments."""
        script.args_from = script.args_to = len(self.inputs)
        try:
            controls = script.ui(script.is_img2img)
            name = script.title().lower()
        except Exception:
            errors.report(f"Error creating UI for {script.filename}", exc_info=True)
            return
        script.controls, script.name = controls, name
        if controls is None:
            return
        script.api_info = {
            "name": name,
            "is_alwayson": True,
            "is_img2img": script.is_img2img,
            "args": [describe_control(control) for control in controls],
        }
        for control in controls:
            control.custom_script_source = os.path.basename(script.filename)
        self.infotext_fields += script.infotext_fields or []
        self.inputs += controls
        script.args_to = len(self.inputs)

    def read_default_arguments(self) -> None:
        """Note the arguments of a generation that says nothing about scripts: what a fresh ui() shows."""
        import gradio as gr

        arguments: list[Any] = [0, *[None] * (len(self.inputs) - 1)]
        with gr.Blocks(analytics_enabled=False):
            for script in self.scripts:
                try:
                    controls = script.ui(script.is_img2img) or []
                except Exception:
                    errors.report(f"Error creating UI for {script.filename}", exc_info=True)
                    continue
                arguments[script.args_from : script.args_to] = [control.value for control in controls]
        self.default_arguments = arguments

    def run_hook(self, hook: str, p: Any, *objects: Any, **kwargs: Any) -> None:
        """Call a hook of every script with the script's own arguments."""
        for script in self.alwayson_scripts:
            arguments = p.script_args[script.args_from : script.args_to]
            try:
                getattr(script, hook)(p, *objects, *arguments, **kwargs)
            except Exception:
                errors.report(f"Error running {hook}: {script.filename}", exc_info=True)

    def setup_scrips(self, p: Any, *, is_ui: bool = True) -> None:
        self.run_hook("setup", p)

    def before_process(self, p: Any) -> None:
        self.run_hook("before_process", p)

    def process(self, p: Any) -> None:
        self.run_hook("process", p)

    def before_process_batch(self, p: Any, **kwargs: Any) -> None:
        self.run_hook("before_process_batch", p, **kwargs)

    def process_batch(self, p: Any, **kwargs: Any) -> None:
        self.run_hook("process_batch", p, **kwargs)

    def process_before_every_sampling(self, p: Any, **kwargs: Any) -> None:
        self.run_hook("process_before_every_sampling", p, **kwargs)

    def post_sample(self, p: Any, samples: Any) -> None:
        self.run_hook("post_sample", p, samples)

    def postprocess_batch(self, p: Any, images: Any, **kwargs: Any) -> None:
        self.run_hook("postprocess_batch", p, images=images, **kwargs)

    def postprocess_image(self, p: Any, image: Any) -> None:
        self.run_hook("postprocess_image", p, image)

    def postprocess(self, p: Any, processed: Any) -> None:
        self.run_hook("postprocess", p, processed)

    def after_component(self, component: Any, **kwargs: Any) -> None:
        """Tell every script that a component of the page was created."""
        for script in self.scripts:
            calls: list[Callable[[], None]] = [
                partial(callback, OnComponent(component=component))
                for elem_id, callback in script.on_after_component_elem_id or []
                if elem_id == component.elem_id
            ]
            calls.append(partial(script.after_component, component, **kwargs))
            for call in calls:
                try:
                    call()
                except Exception:
                    errors.report(f"Error running after_component: {script.filename}", exc_info=True)


def describe_control(control: Any) -> dict[str, Any]:
    """A script argument as /sdapi/v1/script-info shows it."""
    described = {"label": control.label or ""}
    for field in ("value", "minimum", "maximum", "step"):
        if getattr(control, field, None) is not None:
            described[field] = getattr(control, field)
    choices = getattr(control, "choices", None)
    if choices is not None:
        described["choices"] = [choice[0] if isinstance(choice, tuple) else choice for choice in choices]
    return described
