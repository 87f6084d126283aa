"""Single images through the WebUI's own txt2img, with OneDiff's settings for each.

Only our script takes part, with arguments of its own: what other extensions are set to in the txt2img tab is left out.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...core.settings import Settings
from ..infotext import options_of_a_run

JOB = "OneDiff comparison"


@dataclass(frozen=True)
class ImageRequest:
    """An image to make, in the names of the WebUI's own txt2img. width, height: pixels."""

    prompt: str
    negative_prompt: str
    seed: int
    width: int
    height: int
    steps: int
    cfg_scale: float
    sampler_name: str
    scheduler: str = "Automatic"


@dataclass(frozen=True)
class GeneratedImage:
    """An image (a PIL image) and how it came about. seconds: all of the WebUI's txt2img. status: runtime.status()
    right after it."""

    image: Any
    infotext: str
    seconds: float
    status: dict[str, Any]


class TextToImage:
    """Makes one image after the other. Call make through the adapter's exclusively()."""

    def __init__(self, make_script: Callable[[], Any], status: Callable[[], dict[str, Any]]) -> None:
        """make_script: our script's class, as the WebUI calls it. status: runtime.status."""
        self._make_script, self._status = make_script, status

    def make(self, request: ImageRequest, settings: Settings) -> GeneratedImage | None:
        """Make an image with these settings; none where the user stops it. Raises whatever the WebUI raises."""
        from modules import processing, shared

        p = processing.StableDiffusionProcessingTxt2Img(
            **vars(request), batch_size=1, n_iter=1, do_not_save_samples=True, override_settings={},
        )
        p.do_not_save_grid = True
        # Our script alone is there, and none of those that fill in what a tab's components say.
        p.is_api = True
        p.scripts = self._scripts()
        p.script_args = ({name: getattr(settings, name) for name in options_of_a_run()},)
        shared.state.begin(job=JOB)
        try:
            with contextlib.closing(p):
                began = time.perf_counter()
                processed = processing.process_images(p)
                seconds = time.perf_counter() - began
                if shared.state.interrupted or shared.state.skipped or not processed.images:
                    return None
        finally:
            shared.state.end()
        return GeneratedImage(processed.images[0], processed.infotexts[0], seconds, self._status())

    def _scripts(self) -> Any:
        """A runner of the WebUI's with our script in it."""
        from modules import scripts

        script, runner = self._make_script(), scripts.ScriptRunner()
        script.filename, script.is_txt2img, script.is_img2img, script.tabname = __file__, True, False, "txt2img"
        script.alwayson, script.args_from, script.args_to = True, 0, 1
        runner.scripts, runner.alwayson_scripts = [script], [script]
        return runner

    def interrupt(self) -> None:
        """Stop the image that is being made, if it is one of ours."""
        from modules import shared

        if shared.state.job == JOB:
            shared.state.interrupt()
