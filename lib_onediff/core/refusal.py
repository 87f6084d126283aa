"""The one form of "no", and of "yes, but"."""
from __future__ import annotations


class Refusal(Exception):
    """OneDiff does not do something here; the message is the reason, in one line for the user.

    An exception, because the reason is often found deep inside of what is being tried. Whoever tries takes it for the
    reason why something else serves: another backend, or the host.
    """


class NotKept(Exception):
    """What a user asked for holds in this process, and is not on the disk; the message is a sentence for the user."""
