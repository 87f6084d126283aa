"""Compile regions in a process of its own, for Inductor's caches on the disk: they come pickled by the standard input.

Only backends.inductor starts this, with what it has made itself.
"""
from __future__ import annotations

import os
import pickle
import sys

from ..ops.compiled import CompiledRegion, Compiler
from .inductor import LOW_PRIORITY, compile_all, switch


def main() -> int:
    """0 if everything was compiled."""
    if hasattr(os, "nice"):
        os.nice(LOW_PRIORITY)
    compiler = Compiler()
    switches, share = pickle.load(sys.stdin.buffer)
    switch(switches)
    work = [(CompiledRegion(region, compiler), size) for region, size in share]
    compile_all(work)
    return 0 if all(one.is_ready for one, _ in work) else 1


if __name__ == "__main__":
    sys.exit(main())
