"""torch.compile and our hooks: the compiler skips our hooks; if its graph must be whole, it traces the
host's method."""
from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import torch

log = logging.getLogger("onediff")

# Older versions of torch do not have it.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def is_compiler_here() -> bool:
    """Whether torch.compile's tracer is imported already. Importing it takes seconds."""
    return "torch._dynamo" in sys.modules


def must_be_whole() -> bool:
    """Whether the compiler, which calls this while it traces, must not break its graph (fullgraph=True)."""
    try:
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        whole = bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except Exception:
        log.debug("this version of torch does not show whether graph breaks are allowed", exc_info=True)
        whole = True
    if whole:
        log.warning("torch.compile compiles this call without OneDiff: its graph must be whole (fullgraph=True).")
    return whole


# The mark of torch.compiler.assume_constant_result: torch.compile calls the function while it traces.
vars(must_be_whole)["_dynamo_marked_constant"] = True
