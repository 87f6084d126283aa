"""Replacing a method of a class and taking the replacement off again, with others patching the same method."""
from __future__ import annotations

from typing import Any

from lib_onediff.core.guard import Guard
from lib_onediff.hosts.hooks import ClassPatch


def test_somebody_elses_later_patch_survives_and_ours_sleeps_below_it() -> None:
    class Owner:
        def forward(self, x: int) -> int:
            """Adds one."""
            return x + 1

    def doubled(original: Any, module: Any, x: int) -> int:
        return 2 * original(module, x)

    def theirs(self: Any, x: int) -> int:
        return ours(self, x) + 100

    patch = ClassPatch(Owner, "forward", doubled, Guard(), "a method")
    patch.apply()
    ours: Any = Owner.__dict__["forward"]
    assert Owner.forward.__doc__ == "Adds one."
    Owner.forward = theirs
    assert Owner().forward(3) == 108
    patch.undo()
    assert Owner.__dict__["forward"] is theirs and Owner().forward(3) == 104
    patch.apply()
    assert Owner().forward(3) == 108
