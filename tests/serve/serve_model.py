"""A small SD 1.5 pipeline for Ray Serve that records which process makes which image."""
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tiny_model import tiny_sd15_pipeline

from lib_onediff.serving.ray_serve import Config

LOADING_SECONDS = 2.0


class Load:
    """Loads the pipeline of a replica; this takes LOADING_SECONDS. made: a file to which the pipeline appends a line
    "pid seed width height" when it begins an image."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __call__(self, config: Config) -> Any:
        time.sleep(LOADING_SECONDS)
        pipe = tiny_sd15_pipeline()
        made = self.made

        class Recorded(type(pipe)):  # type: ignore[misc]
            def __call__(self, *args: Any, **options: Any) -> Any:
                seed = options["generator"].initial_seed()
                with made.open("a") as lines:
                    lines.write(f"{os.getpid()} {seed} {options['width']} {options['height']}\n")
                return super().__call__(*args, **options)

        pipe.__class__ = Recorded
        return pipe
