"""Whether this torch computes float16 on a CPU: torch 2.1 and 2.2 do not, and tests that need it are skipped."""
from __future__ import annotations

import torch

REASON = "this torch computes no float16 on a CPU"
NOT_IMPLEMENTED = "not implemented for 'Half'"


def can_compute() -> bool:
    try:
        torch.ones((1, 1), dtype=torch.float16) @ torch.ones((1, 1), dtype=torch.float16)
    except RuntimeError:
        return False
    return True


CAN_COMPUTE = can_compute()
