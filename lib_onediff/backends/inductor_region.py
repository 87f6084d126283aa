"""A region compiled or read, in the modes that its calls will have."""
from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from ..modes import our_modes
from ..ops.compiled import CompiledRegion
from ..ops.regions import Shapes
from ..ops.traced import said_by
from .inductor_cache import path_of

log = logging.getLogger("onediff")


class CannotCompile(RuntimeError):
    """Inductor has failed on a region; the message says how, in one line for the user."""


def compile_region(compiled: CompiledRegion, shapes: Shapes, digest: str | None = None) -> str | None:
    """Compile a region, or read it, where what is on the disk has this digest. Returns the digest of what is there now.
    Raises CannotCompile."""
    try:
        with our_modes(compiled.region.device), on(compiled.region.device):
            return compiled.compile(shapes, path_of(compiled.region, shapes), digest)
    except Exception as error:
        log.debug("Inductor failed", exc_info=True)
        raise CannotCompile(f"Inductor could not compile its {compiled.region.kind}: {said_by(error)}") from error


def on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
