"""Which GPUs and models have products in int8."""
from __future__ import annotations

import torch

from ..requirements import written

# Since its release 3.3, Triton multiplies int8 on the tensor cores of these and newer GPUs.
OLDEST_INT8_CAPABILITY = (8, 0)


def why_no_int8(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why products in int8 are not for this device and this dtype, in one sentence; None if they are."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        return f"INT8 is for models in float16 or bfloat16, and this one is in {name}"
    if device.type == "cuda" and not torch.version.hip:
        return too_old(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    return None


def too_old(capability: tuple[int, int], name: str) -> str | None:
    """Why a GPU has no products in int8; None if it has."""
    if capability >= OLDEST_INT8_CAPABILITY:
        return None
    return (
        f"INT8 needs a GPU of compute capability {written(OLDEST_INT8_CAPABILITY)} or higher, such as RTX 30 and A100, "
        f"and the {name} has {written(capability)}"
    )
