"""Records the functions of lib_onediff that some work calls, and the calls between files."""
from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lib_onediff

PACKAGE = str(Path(lib_onediff.__file__).parent)


@dataclass
class Frames:
    """The functions of lib_onediff that were called, as "file function", in order.

    moves: those that were called from another file of lib_onediff, or from outside.
    """

    calls: list[str] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)

    @property
    def files(self) -> set[str]:
        """The files whose functions were called."""
        return {call.split()[0] for call in self.calls}

    def __str__(self) -> str:
        files = sorted(self.files)
        return "\n".join([f"{len(files)} files:", *files, f"{len(self.calls)} frames:", *self.calls])


def frames_of(work: Callable[[], object], closed: Collection[CodeType] = ()) -> Frames:
    """The frames of lib_onediff during work(). closed: functions that count as one frame each, with everything that
    they call. Comprehensions do not count, as in Python 3.12."""
    found = Frames()
    outermost: FrameType | None = None

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal outermost
        if outermost is not None:
            if event == "return" and frame is outermost:
                outermost = None
            return
        if event != "call":
            return
        if frame.f_code in closed:
            outermost = frame
        file = frame.f_code.co_filename
        function = frame.f_code.co_name
        if not file.startswith(PACKAGE) or (function.startswith("<") and function != "<lambda>"):
            return
        named = f"{file.removeprefix(PACKAGE)} {function}"
        found.calls.append(named)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != file:
            found.moves.append(named)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found
