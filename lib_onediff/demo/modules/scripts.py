"""Scripts: their base class, loading them, and calling their hooks during a generation.

Exceptions of a script are logged and not passed on. The demo only loads OneDiff's own script, so it has only the hooks
that this one uses; hosts/contract.py lists those of WebUIs.
"""
from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.guard import first_line
from ...core.logs import debug_wanted
from . import paths, script_callbacks

log = logging.getLogger("onediff")
# The result of Script.show() for scripts that take part in every generation. OneDiff's does, so show() is not called.
AlwaysVisible = object()


class Script:
    """The base class of scripts.

    Subclasses have title(), ui(is_img2img), which creates gradio components and returns those whose values the hooks
    get, and the hooks that they need: process and postprocess for each generation, process_before_every_sampling and
    postprocess_batch for each batch, after_component for a component of the page. infotext_fields: pairs of a component
    and its source (see processing.connect_paste); ui() fills them. ScriptRunner.setup_ui sets the rest: name, the title
    in lower case; args_from, args_to: the script's range of the script arguments. is_img2img: always False here.
    """

    name = ""
    args_from = args_to = 0
    is_img2img = False
    infotext_fields: Sequence[Any] = ()


class ScriptRunner:
    """The scripts of the txt2img tab.

    alwayson_scripts: the scripts.
    inputs: the components whose values are the script arguments, in their order; the first is None, since argument 0
        belongs to no script. infotext_fields: those of all scripts (see Script). Both are filled by setup_ui().
    """

    def __init__(self, classes: Iterable[type[Any]] = ()) -> None:
        """classes: of the scripts; one object of each is made."""
        self.alwayson_scripts: list[Any] = [script_class() for script_class in classes]
        self.infotext_fields: list[Any] = []
        # Position 0 of the arguments is the selectable script, of which there is none.
        self.inputs: list[Any] = [None]

    def setup_ui(self) -> None:
        """Create the components of all scripts inside the open gradio context, assign each script its range of the
        script arguments (args_from to args_to), and fill inputs and infotext_fields."""
        import gradio as gr

        for script in self.alwayson_scripts:
            with gr.Group():
                controls = script.ui(script.is_img2img)
            script.name = script.title().lower()
            script.args_from = len(self.inputs)
            self.infotext_fields += script.infotext_fields
            self.inputs += controls
            script.args_to = len(self.inputs)

    def in_generation(self, hook: str, p: Any, *objects: Any) -> None:
        """Call a hook of every script for the generation p, with `objects` and the script's own part of p.script_args.
        Scripts without this hook are skipped, and exceptions are logged."""
        for script in self.alwayson_scripts:
            call_hook(script, hook, p, *objects, *p.script_args[script.args_from : script.args_to])

    def after_component(self, component: Any) -> None:
        """Call the hook after_component of every script, with a component of the page that was just created."""
        for script in self.alwayson_scripts:
            call_hook(script, "after_component", component)


def call_hook(script: Any, hook: str, *arguments: Any) -> None:
    """Call a script's method with the name `hook`, if the script has one. Exceptions are logged."""
    if hasattr(script, hook):
        try:
            getattr(script, hook)(*arguments)
        except Exception:
            log.exception("%s of the script %s failed", hook, type(script).__name__)


# WebUIs have their scripts here, among them the X/Y/Z plot. The demo has none.
scripts_data = ()
scripts_txt2img = ScriptRunner()


def load_scripts() -> None:
    """Run the files of the extension's folder "scripts", and make a new scripts_txt2img of the Script classes in them.
    All callbacks are removed before. A file that raises an exception is left out, and the exception is logged."""
    global scripts_txt2img
    script_callbacks.callback_map.clear()
    if paths.script_path not in sys.path:
        sys.path.insert(0, paths.script_path)
    classes: list[type[Script]] = []
    for path in sorted(Path(paths.script_path, "scripts").glob("*.py")):
        try:
            named = vars(load_module(str(path))).values()
        except Exception as error:
            log.error("the script %s failed: %s", path.name, first_line(error), exc_info=debug_wanted())
            continue
        classes += [value for value in named if inspect.isclass(value) and issubclass(value, Script)]
    scripts_txt2img = ScriptRunner(classes)


def load_module(path: str) -> ModuleType:
    """Run a Python file as a new module and return it; it is not entered in sys.modules. Raises what the file raises.
    """
    spec = importlib.util.spec_from_file_location(Path(path).name, path)
    assert spec is not None and spec.loader is not None, "scripts are .py files"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
