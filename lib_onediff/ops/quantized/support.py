"""Which GPUs and models have products in int8."""
from __future__ import annotations

import torch

from ..requirements import LAST_TRITON_FOR_TURING, TURING, oldest_int8_capability, triton_here, written


def why_no_int8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products in int8 are not for this device and this dtype, in one sentence; None if they are."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return f"INT8 is for models in float16 or bfloat16, and this one is in {name}"
    if device.type == "cuda" and not torch.version.hip:
        return too_old(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device), triton_here())
    return None


def too_old(capability: tuple[int, int], name: str, triton: str | None) -> str | None:
    """Why a GPU has no products in int8 by a release of Triton; None if it has."""
    oldest = oldest_int8_capability(triton)
    if capability >= oldest:
        return None
    needed = f"INT8 needs a GPU of compute capability {written(oldest)} or higher"
    if capability >= TURING:
        needed += f" with Triton {triton} ({written(TURING)} with {written(LAST_TRITON_FOR_TURING)})"
    return f"{needed}, and the {name} has {written(capability)}"
