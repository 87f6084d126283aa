"""The card that computes: whoever launches makes it torch's current one, and what was measured on it carries its name.

Kernels, CUDA graphs and events go to the current card; a model may lie on another.
"""
from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

NONE = -1


def on_card(device: torch.device) -> AbstractContextManager[object]:
    """Inside, this card is torch's current one; afterwards, the one that was. Microseconds; nothing for what is none.
    """
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def current_card() -> int:
    """The index of the card that computes here; NONE where no GPU is in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else NONE


def card_name(device: torch.device) -> str:
    """What tells kinds of cards apart, such as "NVIDIA H200"; of what is none, the kind of device ("cpu")."""
    is_card = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if is_card else device.type


def named(choice: str) -> str:
    """The name of a choice that was measured on the card that computes here, and holds on cards of its kind alone."""
    card = current_card()
    return f"{choice}, {'cpu' if card == NONE else card_name(torch.device('cuda', card))}"
