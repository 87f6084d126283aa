"""The backends with PyTorch's operators: eager, the reference, on any device; cudagraph, as CUDA graphs."""
from __future__ import annotations

import torch

from ...core.device import Device, Traits
from ...core.operators import Operators
from ...core.refusal import Refusal
from ...core.settings import Settings
from . import operators as torch_ops


class Eager(Device):
    """Launches PyTorch's operators one by one, on any device. It is the reference: it serves all calls that no other
    backend serves, and refuses none."""

    name = "eager"

    def __init__(self) -> None:
        self._wide_norms = torch_ops.WideNorms()

    def operators(self, wide_norms: bool = False) -> Operators:
        """PyTorch's operators. wide_norms: those whose group norms compute in float32 (torch_ops.WideNorms), for a host
        that does so, because PyTorch's group norms compute in the dtype of their input."""
        return self._wide_norms if wide_norms else torch_ops


class CudaGraphs(Eager):
    """PyTorch's operators, captured as CUDA graphs. For GPUs on which our own kernels cannot run. It computes nothing
    without a graph."""

    name = "cudagraph"
    traits = Traits(has_graphs=True, serves_ungraphed=False)

    def refuse(self, settings: Settings, device: torch.device, dtype: torch.dtype, is_warm_up: bool) -> None:
        """Raise Refusal unless the device is an NVIDIA or AMD GPU. The other arguments make no difference here."""
        refuse_without_gpu(device)


def refuse_without_gpu(device: torch.device) -> None:
    """Raise Refusal unless this is an NVIDIA GPU or, with torch for ROCm, an AMD GPU."""
    if device.type != "cuda":
        raise Refusal(f"CUDA graphs need an NVIDIA or AMD GPU, and this is the {device.type.upper()}")
