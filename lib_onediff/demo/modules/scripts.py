"""Scripts: their base class, loading them, and running them at each moment of a generation.

What a script raises is logged and goes no further. The host loads OneDiff's own scripts alone, so it has the hooks that
these use; hosts.contract says which hooks others have.
"""
from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .. import errors
from . import paths, script_callbacks

# What a script's show() answers to take part in every generation.
AlwaysVisible = object()


class Script:
    """A script: subclasses say where they show and which moments of a generation they take part in."""

    name: str | None = None
    filename: str | None = None
    args_from: int | None = None
    args_to: int | None = None
    is_img2img = False
    infotext_fields: list | None = None
    api_info: dict[str, Any] | None = None

    def title(self) -> str:
        """The name that users and the API know the script by."""
        raise NotImplementedError

    def ui(self, is_img2img: bool) -> list | None:
        """Create the script's gradio components; the values of those returned become the arguments of its hooks."""

    def show(self, is_img2img: bool) -> Any:
        """AlwaysVisible for a script that takes part in every generation; this host shows no other kind."""
        return True

    def process(self, p: Any, *args: Any) -> None:
        """Before the first batch; seeds and prompts are known."""

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Right before the sampler runs; kwargs: x, noise, c, uc."""

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:
        """After the last batch. Not called when the generation failed."""

    def after_component(self, component: Any, **kwargs: Any) -> None:
        """After a component of the page was created; kwargs: elem_id, label."""


class ScriptRunner:
    """The always-visible scripts of the txt2img or the img2img tab."""

    def __init__(self) -> None:
        self.scripts: list[Any] = []
        self.alwayson_scripts: list[Any] = []
        self.infotext_fields: list[Any] = []
        # Position 0 of the arguments is the selectable script, of which there is none.
        self.inputs: list[Any] = [None]

    def initialize_scripts(self, is_img2img: bool, scripts_data: Sequence[ScriptClassData]) -> None:
        """Make one object of each script class."""
        for data in scripts_data:
            try:
                script = data.script_class()
                script.filename, script.is_img2img = data.path, is_img2img
                visible = script.show(is_img2img) is AlwaysVisible
            except Exception:
                errors.report(f"Error initializing script of {data.path}", exc_info=True)
                continue
            if visible:
                self.scripts.append(script)
                self.alwayson_scripts.append(script)

    def setup_ui(self) -> None:
        """Create the components of every script inside the gradio context that is open."""
        import gradio as gr

        self.inputs = [None]
        for script in self.alwayson_scripts:
            with gr.Group():
                self.create_script_ui(script)

    def create_script_ui(self, script: Any) -> None:
        """Call the script's ui() and give its components their place among the arguments."""
        script.args_from = script.args_to = len(self.inputs)
        try:
            controls = script.ui(script.is_img2img)
            script.name = script.title().lower()
        except Exception:
            errors.report(f"Error creating UI for {script.filename}", exc_info=True)
            return
        if controls is None:
            return
        script.api_info = {
            "name": script.name,
            "is_alwayson": True,
            "is_img2img": script.is_img2img,
            "args": [describe_control(control) for control in controls],
        }
        self.infotext_fields += script.infotext_fields or []
        self.inputs += controls
        script.args_to = len(self.inputs)

    @property
    def default_arguments(self) -> list[Any]:
        """The arguments of a generation that says nothing about scripts: what their components show at first."""
        return [0, *(control.value for control in self.inputs[1:])]

    def process(self, p: Any) -> None:
        self.run_hook("process", p)

    def process_before_every_sampling(self, p: Any, **kwargs: Any) -> None:
        self.run_hook("process_before_every_sampling", p, **kwargs)

    def postprocess(self, p: Any, processed: Any) -> None:
        self.run_hook("postprocess", p, processed)

    def run_hook(self, hook: str, p: Any, *objects: Any, **kwargs: Any) -> None:
        """Call a hook of every script with the script's own arguments."""
        for script in self.alwayson_scripts:
            arguments = p.script_args[script.args_from : script.args_to]
            report_failure(script, hook, lambda: getattr(script, hook)(p, *objects, *arguments, **kwargs))  # noqa: B023

    def after_component(self, component: Any, **kwargs: Any) -> None:
        """Tell every script that a component of the page was created."""
        for script in self.scripts:
            report_failure(script, "after_component", lambda: script.after_component(component, **kwargs))  # noqa: B023


def report_failure(script: Any, hook: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except Exception:
        errors.report(f"Error running {hook}: {script.filename}", exc_info=True)


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


class ScriptClassData(NamedTuple):
    """A script class that was found, and where."""

    script_class: type[Script]
    path: str
    module: ModuleType


scripts_data: list[ScriptClassData] = []
scripts_txt2img: ScriptRunner | None = None
scripts_img2img: ScriptRunner | None = None


def load_scripts() -> None:
    """Load the extension's scripts and make the runners of both tabs; a script that fails is logged and left out."""
    global scripts_txt2img, scripts_img2img
    scripts_data.clear()
    script_callbacks.clear_callbacks()
    if paths.script_path not in sys.path:
        sys.path.insert(0, paths.script_path)
    for path in sorted(Path(paths.script_path, "scripts").glob("*.py")):
        try:
            module = load_module(str(path))
        except Exception:
            errors.report(f"Error loading script: {path.name}", exc_info=True)
            continue
        classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Script)]
        scripts_data.extend(ScriptClassData(found, str(path), module) for found in classes if found is not Script)
    scripts_txt2img, scripts_img2img = ScriptRunner(), ScriptRunner()
    scripts_txt2img.initialize_scripts(False, scripts_data)
    scripts_img2img.initialize_scripts(True, scripts_data)


def load_module(path: str) -> ModuleType:
    """Run the script at path and return it as a module named after its file; what it raises is raised."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path), path)
    assert spec is not None and spec.loader is not None, "scripts are .py files"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
