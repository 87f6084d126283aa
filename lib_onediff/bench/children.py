"""Measure in a fresh process, where nothing is loaded, compiled or allocated yet."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import models
from .clock import give_back_memory
from .options import DTYPES, Size
from .variants import Arguments

LIMIT_S = 400


@dataclass(frozen=True)
class Task:
    """What a process is to measure. path: of a model file or folder, "" for random weights.

    cache_folder: where OneDiff may remember, "" for nowhere. loaded_before: see cold.child.
    """

    job: str
    model: str
    path: str
    dtype: str
    batch: int
    tokens: int
    variant: str
    sizes: list[Size]
    verify: bool = False
    cache_folder: str = ""
    loaded_before: bool = False

    @classmethod
    def of(
        cls, job: str, model: str, variant: str, sizes: list[Size], options: argparse.Namespace, **more: Any
    ) -> Task:
        """A job for a process of its own, with everything else as this process was asked for it."""
        path = str(options.model) if options.model else ""
        return cls(job, model, path, options.dtype, options.batch, options.tokens, variant, sizes, **more)

    @classmethod
    def from_text(cls, text: str) -> Task:
        values = json.loads(text)
        return cls(**{**values, "sizes": [tuple(size) for size in values["sizes"]]})

    def unet(self, device: torch.device) -> nn.Module:
        """The UNet in the task's dtype, with no memory behind it that its float32 weights once had."""
        unet = models.load_unet(Path(self.path), device) if self.path else models.random_unet(self.model, device)
        if device.type == "cuda":
            unet.to("cpu", DTYPES[self.dtype])
            give_back_memory()
            torch.cuda.reset_peak_memory_stats(device)
        return unet.to(device, DTYPES[self.dtype])

    def inputs(self, unet: nn.Module, size: Size) -> Arguments:
        return models.inputs(unet, *size, self.batch, self.tokens, DTYPES[self.dtype])


def ask(task: Task, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the task's job returns in a fresh process; {"problem": a line} where it returns nothing."""
    command = [sys.executable, "-m", "lib_onediff.bench", "--child", json.dumps(asdict(task))]
    try:
        finished = subprocess.run(
            command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=LIMIT_S
        )
        return json.loads(finished.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"problem": f"not done after {LIMIT_S} s"}
    except (ValueError, IndexError):
        said = (finished.stderr.strip() or finished.stdout.strip()).splitlines()
        return {"problem": said[-1] if said else f"the process ended with {finished.returncode}"}
