"""OneDiff's log on the console: a line whenever the way in which calls are computed changes. With the environment
variable ONEDIFF_DEBUG=1, every detail, with timestamps."""
from __future__ import annotations

import logging
import os
import sys

DEBUG_VARIABLE = "ONEDIFF_DEBUG"
FALSE_VALUES = ("", "0", "false", "off", "no")
# In characters; see readable().
LONGEST_SENTENCE = 300
# The name of our handler, which show_on_console replaces after a reload of the WebUI.
CONSOLE = "onediff-console"
log = logging.getLogger("onediff")


def one_line(text: str) -> str:
    """The text with "?" in place of every unprintable character, such as line breaks and escape codes, with which a
    file's name or a request could forge lines of the log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def readable(sentence: str) -> str:
    """The sentence on one line (see one_line), and with "..." after LONGEST_SENTENCE characters if it is longer. For
    sentences that quote text from a client."""
    shown = one_line(sentence)
    return shown if len(shown) <= LONGEST_SENTENCE else f"{shown[:LONGEST_SENTENCE]}..."


class OneLineFormatter(logging.Formatter):
    """Formats the message of a log record on one line (see one_line); a traceback follows below it."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The formatted message. The format begins with "OneDiff: ", which is left out if the message itself begins
        with "OneDiff": "OneDiff is off" is not written as "OneDiff: OneDiff is off"."""
        return one_line(super().formatMessage(record)).replace("OneDiff: OneDiff", "OneDiff", 1)


def debug_wanted() -> bool:
    """Whether the environment variable ONEDIFF_DEBUG is set, and not to one of FALSE_VALUES."""
    return os.environ.get(DEBUG_VARIABLE, "").strip().lower() not in FALSE_VALUES


def show_on_console() -> None:
    """Write our log to stderr from now on, and to no handler of the WebUI: lines of level INFO and above; all lines,
    with timestamps, if debug_wanted(). Another call, after a reload of the WebUI, replaces the handler of the earlier
    call, so that no line is written twice."""
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
