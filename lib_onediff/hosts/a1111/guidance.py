"""Which rows of a call A1111's CFGDenoiser means for the prompt.

It puts the prompts' rows first and the negative prompts' last, one of each for an image unless AND joins several
prompts, and tells callbacks which they are before every step. Skipping the negative prompt (NGMS), calling for each by
itself, and edit models with three rows an image come after that, so the call itself has to fit.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...model.rows import APART, OTHER_ROWS, half_of
from ...weights.watch import no_object

NOT_TOLD = "the WebUI's denoiser does not make this call"
SEVERAL_PROMPTS = "AND joins several prompts"
OTHER_PROMPTS = "an extension calls with other prompts than the WebUI's denoiser"


class DenoiserStep:
    """What CFGDenoiser has said of the step that it is in."""

    def __init__(self) -> None:
        self._said: Callable[[], Any] = no_object

    def note(self, params: Any) -> None:
        """params: the host's CFGDenoiserParams, which live as long as the step; other callbacks may change them."""
        self._said = weakref.ref(params)

    def prompt_rows(self, context: Tensor) -> slice | str:
        """The prompts' rows of a call with this context, (batch, tokens, width); or why they are not known."""
        said = self._said()
        if said is None:
            return NOT_TOLD
        prompt, negative = (crossattn(cond) for cond in (said.text_cond, said.text_uncond))
        images, batch = negative.shape[0], context.shape[0]
        if prompt.shape[0] != images:
            return SEVERAL_PROMPTS if batch != images else APART
        if batch != 2 * images:
            return APART if batch == images else OTHER_ROWS
        rows = half_of(batch, is_first=True)
        # Which waits for the GPU, as reading the timestep has.
        same = begins_with(context[rows], prompt) and begins_with(context[images:], negative)
        return rows if same else OTHER_PROMPTS


def crossattn(cond: Any) -> Tensor:
    """(prompts, tokens, width); SDXL's are a dictionary with the labels beside it."""
    return cond["crossattn"] if isinstance(cond, dict) else cond


def begins_with(context: Tensor, prompt: Tensor) -> bool:
    """Whether these rows are a prompt's, which the host may have made longer, or cut, to the other one's length."""
    tokens = min(context.shape[1], prompt.shape[1])
    return torch.equal(context[:, :tokens], prompt[:, :tokens].to(context.device, context.dtype))
