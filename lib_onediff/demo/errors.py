"""A model that cannot be loaded, and what goes wrong on the console."""
from __future__ import annotations

import sys
import textwrap
import traceback

from ..logs import debug_wanted, one_line


class ModelProblem(Exception):
    """A model cannot be loaded; the message says which and why."""


def report(message: str, *, exc_info: bool = False) -> None:
    """Print message to stderr; with exc_info also what the exception being handled says."""
    for line in message.splitlines():
        print("***", one_line(line), file=sys.stderr)
    if exc_info and debug_wanted():
        print(textwrap.indent(traceback.format_exc(), "    "), file=sys.stderr, flush=True)
    elif exc_info:
        error = sys.exc_info()[1]
        told = one_line(f"{type(error).__name__}: {error} (ONEDIFF_DEBUG=1 shows where)")
        print(f"***   {told}", file=sys.stderr, flush=True)
