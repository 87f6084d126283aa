"""The option --lowvram, with which A1111 keeps one network, or one block of the UNet, on the GPU at a time."""
from __future__ import annotations

from typing import Any

module_in_gpu: Any = None


def send_everything_to_cpu() -> None:
    global module_in_gpu
    if module_in_gpu is not None:
        module_in_gpu.to("cpu")
    module_in_gpu = None


def send_me_to_gpu(module: Any, given: Any) -> None:
    """A1111's pre-hook of these modules: record `module` as the one on the GPU, and move the previous one to the CPU.
    given: the inputs of its forward, not used. Nothing moves to a GPU here."""
    global module_in_gpu
    if module_in_gpu is not module:
        send_everything_to_cpu()
        module_in_gpu = module
