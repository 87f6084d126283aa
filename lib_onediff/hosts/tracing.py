"""torch.compile and our hooks: it steps over them, and traces the host's own method where its graph must be whole."""
from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import torch

log = logging.getLogger("onediff")

# Older torch has none, and does not tell whether somebody traces.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def is_compiler_here() -> bool:
    """Whether somebody has imported torch.compile's tracer: the import alone takes seconds."""
    return "torch._dynamo" in sys.modules


def must_be_whole() -> bool:
    """Asked by the compiler while it traces: whether it may not leave its graph for a call (fullgraph=True)."""
    try:
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        whole = bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except Exception:
        log.debug("another torch, or another tracer: this cannot be told", exc_info=True)
        whole = True
    if whole:
        log.warning("OneDiff leaves this call to torch.compile, whose graph must be whole (fullgraph=True).")
    return whole


# torch.compile runs it while it traces, as torch.compiler.assume_constant_result has it do.
vars(must_be_whole)["_dynamo_marked_constant"] = True
