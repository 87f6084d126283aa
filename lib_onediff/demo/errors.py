"""What the host does not do, and what goes wrong on the console."""
from __future__ import annotations

import sys
import traceback

from ..core.logs import debug_wanted, one_line


class Refusal(Exception):
    """A model cannot be loaded, or the host does not do what was asked; the message is a sentence for the user."""


def report(message: str, *, exc_info: bool = False) -> None:
    """Print message to stderr; with exc_info also what the exception being handled says."""
    for line in message.splitlines():
        print("***", one_line(line), file=sys.stderr)
    if exc_info and debug_wanted():
        traceback.print_exc()
    elif exc_info:
        error = sys.exc_info()[1]
        print("***  ", one_line(f"{type(error).__name__}: {error} (ONEDIFF_DEBUG=1 shows where)"), file=sys.stderr)
