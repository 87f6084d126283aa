"""Two exceptions with a sentence for the user: Refusal, OneDiff does not serve something; NotKept, a change of the user
is lost when the process ends."""
from __future__ import annotations


class Refusal(Exception):
    """OneDiff does not serve something. The message is the reason, in one line for the user.

    It is an exception, because the reason is often found deep inside an attempt. The caller then tries another
    backend or the host, and shows the reason.
    """


def unsupported_inputs(detail: str) -> Refusal:
    """A Refusal of a call because of its inputs, such as their shapes. Extensions and scripts are the usual cause, so
    the message is this hint for users, a colon, and the detail. detail: which input is unusual, in one line that does
    not end in a period."""
    lead = "the model gets inputs that OneDiff does not support, perhaps from an extension or a script"
    return Refusal(f"{lead}: {detail}")


def unsupported_model(detail: str) -> Refusal:
    """A Refusal of a network because of its layers. detail: which layer is unusual, in one line that does not end in a
    period."""
    return Refusal(f"the model is built in a way that OneDiff does not support: {detail}")


def unsupported_lora(detail: str) -> Refusal:
    """A Refusal of a network because of LoRAs or other adapters in it. detail: what is unusual about them, in one line
    without a period."""
    return Refusal(f"a LoRA is used in a way that OneDiff does not support: {detail}")


class NotKept(Exception):
    """A user's change, such as a pinned size, works in this process, but could not be written to the disk. The message
    is a sentence for the user."""
