"""What is freed is given back to the system, where the C library can."""
from __future__ import annotations

import os
import sys

import pytest
import torch

from lib_onediff.runtime.freed_memory import give_back_freed_memory


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc_trim")
def test_freed_blocks_between_others_go_back() -> None:
    blocks = [torch.ones(16 * 1024) for _ in range(4096)]  # 64 KiB each: below what glibc maps one by one
    kept = blocks[::16]
    del blocks
    before = resident_bytes()
    if not give_back_freed_memory():
        pytest.skip("this C library gives nothing back")
    assert before - resident_bytes() > 50 * 2**20
    assert all(float(block[0]) == 1.0 for block in kept)
