"""PyTorch's operators: the reference, on any device; captured as CUDA graphs on NVIDIA GPUs."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core.call import UNetCall
from ...core.device import Network, Traits
from ...core.family import AttentionShapes
from ...core.operators import Operators
from ...core.refusal import Refusal
from ...options.settings import Settings
from ...weights.contents import Reader
from . import operators as torch_ops


class Eager:
    """Launches PyTorch's operators one by one. See engines.device.Device."""

    name, traits = "eager", Traits()

    def __init__(self) -> None:
        self._wide_norms = torch_ops.WideNorms()

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, waits: bool) -> None:
        """It serves everywhere."""

    def refuse_call(self, call: UNetCall) -> None:
        """It computes every call."""

    def operators(self, wide_norms: bool = False, attention: str = "") -> Operators:
        return self._wide_norms if wide_norms else torch_ops

    def prepare(self, network: Network, waits: bool, measures: bool = False) -> None:
        """PyTorch is compiled."""

    def tune(self, attentions: Sequence[AttentionShapes], call: UNetCall) -> bool:
        return False

    def runner(self, managed: Any, key: Any, call: UNetCall, waits: bool) -> Any:
        return None

    def contents_reader(self, device: torch.device) -> Reader | None:
        return None

    def measure_anew(self) -> None:
        """It measures nothing."""


class CudaGraphs(Eager):
    """The same operators, launched as one graph."""

    name, traits = "cudagraph", Traits(has_graphs=True, launches=False)

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, waits: bool) -> None:
        refuse_without_gpu(device)


def refuse_without_gpu(device: torch.device) -> None:
    """Raise Refusal unless this is an NVIDIA GPU."""
    if device.type != "cuda":
        raise Refusal(f"CUDA graphs need an NVIDIA GPU; this UNet is on the {device.type.upper()}")
