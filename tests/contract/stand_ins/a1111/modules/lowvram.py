"""The option --lowvram: the network, or the block of a UNet, that is on the GPU now."""
from __future__ import annotations

from typing import Any

module_in_gpu: Any = None


def send_everything_to_cpu() -> None:
    global module_in_gpu
    if module_in_gpu is not None:
        module_in_gpu.to("cpu")
    module_in_gpu = None


def send_me_to_gpu(module: Any, given: Any) -> None:
    global module_in_gpu
    if module_in_gpu is not module:
        send_everything_to_cpu()
        module_in_gpu = module
