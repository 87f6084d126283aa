"""A line through what was computed last, which says what a step between would give."""
from __future__ import annotations

import math

import torch
from torch import Tensor


class Line:
    """The last two tensors that the same weights have computed, each with its step: Liu et al. 2025, "From Reusing to
    Forecasting" (TaylorSeer, arXiv 2503.06923). edition: of the weights (BoundUNet.edition)."""

    def __init__(self) -> None:
        self._points: list[tuple[int, Tensor]] = []
        self.edition = -1

    def note(self, step: int, computed: Tensor, edition: int) -> None:
        """A step has computed this. Of two at one step the later counts."""
        known = self._points if edition == self.edition else []
        # Whose tensor it is may go on computing in it.
        self._points = [*[point for point in known if point[0] != step][-1:], (step, computed.detach().clone())]
        self.edition = edition

    def at(self, step: int, damping: float = 1.0, farthest: float = math.inf) -> Tensor | None:
        """The tensor of a later step, computed in float32; None before two are known.

        damping: how far it goes along the line, of the whole way. farthest: in distances between the two; beyond, it
        stays where it is then.
        """
        if len(self._points) < 2:
            return None
        (step_before, before), (step_last, last) = self._points
        distance = min((step - step_last) / (step_last - step_before), farthest)
        return torch.lerp(before.float(), last.float(), 1 + damping * distance).to(last.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps, the last one last."""
        return [tensor for _, tensor in self._points]
