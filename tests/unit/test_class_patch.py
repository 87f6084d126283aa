"""Replacing a method of a class and taking the replacement off again, with others patching the same method."""
from __future__ import annotations

from typing import Any

import pytest

from lib_onediff.core.guard import Guard
from lib_onediff.hosts.hooks import ClassPatch


@pytest.fixture
def owner() -> type:
    class Owner:
        def forward(self, x: int) -> int:
            """Adds one."""
            return x + 1

    return Owner


def doubled(original: Any, module: Any, x: int) -> int:
    return 2 * original(module, x)


def test_a_replacement_gets_the_original_and_is_taken_off_again(owner: type) -> None:
    before = owner.__dict__["forward"]
    patch = ClassPatch(owner, "forward", doubled, Guard(), "a method")
    patch.apply()
    assert owner().forward(3) == 8
    assert owner.forward.__doc__ == "Adds one."
    patch.undo()
    assert owner.__dict__["forward"] is before
    assert owner().forward(3) == 4


def test_somebody_elses_later_patch_survives_and_ours_sleeps_below_it(owner: type) -> None:
    patch = ClassPatch(owner, "forward", doubled, Guard(), "a method")
    patch.apply()
    ours = owner.__dict__["forward"]

    def theirs(self: Any, x: int) -> int:
        return ours(self, x) + 100

    owner.forward = theirs
    assert owner().forward(3) == 108
    patch.undo()
    assert owner.__dict__["forward"] is theirs
    assert owner().forward(3) == 104
    patch.apply()
    assert owner().forward(3) == 108
