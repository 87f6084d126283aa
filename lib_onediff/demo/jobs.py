"""Making pictures on request, for the REST API and the page: checks, the queue, and errors as sentences."""
from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from . import limits, saving
from .modules import errors, shared
from .modules.call_queue import queue_lock
from .modules.devices import NansException, torch_gc
from .modules.processed import Processed
from .modules.processing import process_images
from .modules.shared_state import STOP
from .refusal import Refusal


def make_pictures(
    p: Any, runner: Any, script_args: list[Any], is_api: bool, served: AbstractContextManager[None] | None = None
) -> Processed:
    """Wait for the queue and make the pictures of p, a StableDiffusionProcessing.

    served: stands around the making, and may refuse it. Raises Refusal with a sentence for the user, whatever goes
    wrong.
    """
    limits.check(p)
    try:
        with queue_lock, contextlib.closing(p), job(runner), served or contextlib.nullcontext():
            p.sd_model = shared.sd_model
            p.is_api = is_api
            p.scripts, p.script_args = runner, tuple(script_args)
            runner.setup_scrips(p, is_ui=not is_api)
            processed = process_images(p)
            if shared.opts.samples_save and not p.do_not_save_samples:
                saving.save(processed, kind=type(p).__name__.removeprefix("StableDiffusionProcessing").lower())
            return processed
    except Refusal:
        raise
    except Exception as error:
        raise explain(error) from error


@contextlib.contextmanager
def job(runner: Any):
    """Mark the host as busy. Raises Refusal when it stops."""
    if shared.state.server_command == STOP:
        raise Refusal("The server stops.", status=503)
    shared.state.begin(job="img2img" if any(script.is_img2img for script in runner.scripts) else "txt2img")
    try:
        yield
    finally:
        shared.state.end()


def explain(error: Exception) -> Refusal:
    """What a failed generation says to the user."""
    if isinstance(error, NansException):
        return Refusal(str(error), status=500)
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
        torch_gc()
        return Refusal("There is not enough memory for this picture; try a smaller size or batch.", status=500)
    errors.report("A generation failed", exc_info=True)
    first_line = (str(error).strip() or "no details").splitlines()[0]
    return Refusal(f"The generation failed: {type(error).__name__}: {first_line}", status=500)
