"""torch.compile and our hooks: the compiler does not trace our hooks, at the price of a graph break. If the compiler's
graph must not have breaks (fullgraph=True), it traces the host's method in place of the hook, and the compiled code
runs without OneDiff.
"""
from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import torch

log = logging.getLogger("onediff")

# Whether torch.compile is tracing the calling code. Always False with versions of torch that do not tell.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)


def is_compiler_here() -> bool:
    """Whether torch.compile's tracer (torch._dynamo) is imported already; if not, nothing can be tracing. Does not
    import it, which would take seconds."""
    return "torch._dynamo" in sys.modules


def must_be_whole() -> bool:
    """Whether the graph that torch.compile traces now must not have breaks (fullgraph=True), so that the compiler
    cannot leave out our hook; True too if this version of torch does not show that. If True, logs a warning for the
    user that OneDiff does not compute the compiled code.

    Only code that torch.compile is tracing may call this. The compiler runs this function while it traces, and takes
    the result as a constant.
    """
    try:
        tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
        whole = bool(tracer.one_graph or getattr(tracer, "error_on_graph_break", False))
    except Exception:
        log.debug("this version of torch does not show whether graph breaks are allowed", exc_info=True)
        whole = True
    if whole:
        log.warning(
            "The model is compiled by torch.compile with fullgraph=True, so OneDiff cannot speed it up; the images are "
            "the same as without OneDiff. To use OneDiff, compile the model without fullgraph=True."
        )
    return whole


# The mark that the decorator torch.compiler.assume_constant_result sets: torch.compile calls the function while it
# traces. The decorator itself would import the compiler.
vars(must_be_whole)["_dynamo_marked_constant"] = True
