"""Two exceptions with a sentence for the user: Refusal, OneDiff does not serve something; NotKept, a change of the user
is lost when the process ends."""
from __future__ import annotations


class Refusal(Exception):
    """OneDiff does not serve something. The message is the reason, in one line for the user.

    It is an exception, because the reason is often found deep inside an attempt. The caller then tries another
    backend or the host, and shows the reason.
    """


class NotKept(Exception):
    """A user's change, such as a pinned size, works in this process, but could not be written to the disk. The message
    is a sentence for the user."""
