"""torch.compile and our hooks: the compiler skips our hooks; if its graph must be whole, it traces the
host's method."""
from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import torch

log = logging.getLogger("onediff")

# Whether torch.compile is tracing the calling code. Older versions of torch do not tell; False then.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def is_compiler_here() -> bool:
    """Whether torch.compile's tracer is imported already; if not, nothing can be tracing. Asking the tracer itself
    would import it, which takes seconds."""
    return "torch._dynamo" in sys.modules


def must_be_whole() -> bool:
    """Whether the graph that torch.compile traces now must not have breaks (fullgraph=True); True too if this torch
    does not tell. If True, logs a warning for the user that the call is compiled without OneDiff.

    Only code that is being traced may call this. torch.compile runs it at that moment, and takes its result as a
    constant.
    """
    try:
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        whole = bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except Exception:
        log.debug("this version of torch does not show whether graph breaks are allowed", exc_info=True)
        whole = True
    if whole:
        log.warning("torch.compile compiles this call without OneDiff: its graph must be whole (fullgraph=True).")
    return whole


# The mark that the decorator torch.compiler.assume_constant_result sets: torch.compile calls the function while it
# traces. The decorator itself would import the compiler.
vars(must_be_whole)["_dynamo_marked_constant"] = True
