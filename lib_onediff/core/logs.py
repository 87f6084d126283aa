"""OneDiff's log on the console: a line whenever the route changes; with ONEDIFF_DEBUG=1 every detail, timestamped."""
from __future__ import annotations

import logging
import os
import sys

DEBUG_VARIABLE = "ONEDIFF_DEBUG"
FALSE_VALUES = ("", "0", "false", "off", "no")
LONGEST_SENTENCE = 300
# The name of our handler, which show_on_console replaces after a reload of the WebUI.
CONSOLE = "onediff-console"
log = logging.getLogger("onediff")


def one_line(text: str) -> str:
    """The text with "?" for every unprintable character, such as line breaks and escape codes: names of files and words
    of requests may contain some."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def readable(sentence: str) -> str:
    """The sentence on one line, cut to LONGEST_SENTENCE characters: it may quote text from a client."""
    shown = one_line(sentence)
    return shown if len(shown) <= LONGEST_SENTENCE else f"{shown[:LONGEST_SENTENCE]}..."


class OneLineFormatter(logging.Formatter):
    """Formats a log record on one line, so that a name of a file cannot forge lines; a traceback follows below."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Some of our sentences begin with "OneDiff".
        return one_line(super().formatMessage(record)).replace("OneDiff: OneDiff", "OneDiff", 1)


def debug_wanted() -> bool:
    """Whether the environment variable ONEDIFF_DEBUG is set, and not to one of FALSE_VALUES."""
    return os.environ.get(DEBUG_VARIABLE, "").strip().lower() not in FALSE_VALUES


def show_on_console() -> None:
    """Write our log to the console, in detail if ONEDIFF_DEBUG is set. Safe to call twice."""
    detailed = debug_wanted()
    for known in [handler for handler in log.handlers if handler.name == CONSOLE]:
        log.removeHandler(known)
    # A handler of our own, so that the WebUI's log level does not hide our lines.
    handler = logging.StreamHandler(sys.stderr)
    timestamp = "%(asctime)s.%(msecs)03d " if detailed else ""
    handler.setFormatter(OneLineFormatter(f"{timestamp}OneDiff: %(message)s", "%H:%M:%S"))
    handler.name = CONSOLE
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if detailed else logging.INFO)
    log.propagate = False
