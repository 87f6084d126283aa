"""The base class of scripts, and loading them."""
from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from . import errors, paths, script_callbacks, script_loading
from .script_arguments import OnComponent, PostprocessBatchListArgs, PostprocessImageArgs, PostSampleArgs
from .script_runner import AlwaysVisible, ScriptRunner

__all__ = [
    "AlwaysVisible", "OnComponent", "PostSampleArgs", "PostprocessBatchListArgs", "PostprocessImageArgs", "Script",
    "ScriptClassData", "ScriptRunner", "basedir", "load_scripts", "scripts_data", "scripts_img2img", "scripts_txt2img",
]


class Script:
    """A script: subclasses say where they show and which moments of a generation they take part in."""

    name: str | None = None
    section: str | None = None
    filename: str | None = None
    args_from: int | None = None
    args_to: int | None = None
    alwayson = False
    is_txt2img = False
    is_img2img = False
    tabname: str | None = None
    group: Any = None
    create_group = True
    infotext_fields: list | None = None
    paste_field_names: list[str] | None = None
    api_info: dict[str, Any] | None = None
    on_before_component_elem_id: list | None = None
    on_after_component_elem_id: list | None = None
    setup_for_ui_only = False
    controls: list | None = None
    sorting_priority = 0

    def title(self) -> str:
        """The name that users and the API know the script by."""
        raise NotImplementedError

    def ui(self, is_img2img: bool) -> list | None:
        """Create the script's gradio components; the values of those returned become the arguments of its hooks.

        Called again to read the API's defaults, so it must have no other effect.
        """

    def show(self, is_img2img: bool) -> Any:
        """AlwaysVisible for a script that takes part in every generation; this host shows no other kind."""
        return True

    def setup(self, p: Any, *args: Any) -> None:
        """The generation has got its scripts and arguments."""

    def before_process(self, p: Any, *args: Any) -> None:
        """Before options are overridden and anything is computed."""

    def process(self, p: Any, *args: Any) -> None:
        """Before the first batch; seeds and prompts are known."""

    def before_process_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Before a batch's prompts are encoded; kwargs: batch_number, prompts, seeds, subseeds."""

    def process_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Before a batch; kwargs as before_process_batch."""

    def process_before_every_sampling(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """Right before the sampler runs; kwargs: x, noise, c, uc."""

    def post_sample(self, p: Any, samples: PostSampleArgs, *args: Any) -> None:
        """After the sampler, before the VAE decodes."""

    def postprocess_batch(self, p: Any, *args: Any, **kwargs: Any) -> None:
        """After a batch; kwargs: images (batch, 3, height, width) from 0 to 1, batch_number."""

    def postprocess_image(self, p: Any, image: PostprocessImageArgs, *args: Any) -> None:
        """After each picture."""

    def postprocess(self, p: Any, processed: Any, *args: Any) -> None:
        """After the last batch. Not called when the generation failed."""

    def before_component(self, component: Any, **kwargs: Any) -> None:
        """Before a component of the page is created."""

    def after_component(self, component: Any, **kwargs: Any) -> None:
        """After a component of the page was created; kwargs: elem_id, label."""

    def on_before_component(self, callback: Callable[[OnComponent], None], *, elem_id: str) -> None:
        """Have callback called before the component elem_id is created."""
        self.on_before_component_elem_id = [*(self.on_before_component_elem_id or []), (elem_id, callback)]

    def on_after_component(self, callback: Callable[[OnComponent], None], *, elem_id: str) -> None:
        """Have callback called after the component elem_id was created."""
        self.on_after_component_elem_id = [*(self.on_after_component_elem_id or []), (elem_id, callback)]

    def elem_id(self, item_id: str) -> str:
        """An element id made of the tab, the script's title and item_id."""
        tab = "img2img_" if self.is_img2img else "txt2img_"
        prefix = tab if self.show(True) == self.show(False) else ""
        title = re.sub(r"[^a-z_0-9]", "", re.sub(r"\s", "_", self.title().lower()))
        return f"script_{prefix}{title}_{item_id}"


class ScriptClassData(NamedTuple):
    """A script class that was found, and where."""

    script_class: type[Script]
    path: str
    basedir: str
    module: ModuleType


scripts_data: list[ScriptClassData] = []
scripts_txt2img: ScriptRunner | None = None
scripts_img2img: ScriptRunner | None = None


def basedir() -> str:
    """The folder of the extension whose script is being loaded."""
    return paths.script_path


def load_scripts() -> None:
    """Load the extension's scripts and make the runners of both tabs; a script that fails is logged and left out."""
    global scripts_txt2img, scripts_img2img
    scripts_data.clear()
    script_callbacks.clear_callbacks()
    if paths.script_path not in sys.path:
        sys.path.insert(0, paths.script_path)
    for path in sorted(Path(paths.script_path, "scripts").glob("*.py")):
        try:
            module = script_loading.load_module(str(path))
        except Exception:
            errors.report(f"Error loading script: {path.name}", exc_info=True)
            continue
        classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Script)]
        own = [found for found in classes if found is not Script]
        scripts_data.extend(ScriptClassData(found, str(path), paths.script_path, module) for found in own)
    scripts_txt2img, scripts_img2img = ScriptRunner(), ScriptRunner()
    scripts_txt2img.initialize_scripts(False, scripts_data)
    scripts_img2img.initialize_scripts(True, scripts_data)
