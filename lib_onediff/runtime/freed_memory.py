"""Give the system back what an unloaded model's weights have left in the allocator."""
from __future__ import annotations

import ctypes
import os
import sys


def give_back_freed_memory() -> bool:
    """Return freed heap memory of this process to the system; False where the C library cannot.

    glibc keeps freed blocks for later, and the fused weights of one model after another leave gaps that it does not
    give back by itself: RSS of a WebUI on the CPU rises by a tenth over a dozen checkpoint switches.
    """
    if not sys.platform.startswith("linux") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
