"""How the host reports what went wrong in a script: one line; the traceback only with ONEDIFF_DEBUG=1."""
from __future__ import annotations

import os
import sys
import textwrap
import traceback


def debugging() -> bool:
    """Whether the user asked for the details."""
    return os.environ.get("ONEDIFF_DEBUG", "0") not in ("", "0")


def report(message: str, *, exc_info: bool = False) -> None:
    """Print message to stderr; with exc_info also what the exception being handled says."""
    for line in message.splitlines():
        print("***", line, file=sys.stderr)
    if not exc_info:
        return
    if debugging():
        print(textwrap.indent(traceback.format_exc(), "    "), file=sys.stderr, flush=True)
        return
    error = sys.exc_info()[1]
    print(f"***   {type(error).__name__}: {error} (ONEDIFF_DEBUG=1 shows where)", file=sys.stderr, flush=True)
