"""Guards from the disk: numbers are compared, and nothing else happens."""
from __future__ import annotations

import pytest

from lib_onediff.ops.inductor.artifact import Artifact, Order
from lib_onediff.ops.inductor.regions import NeedsAnotherGraph
from lib_onediff.ops.inductor.size_guard import LONGEST, SizeGuard


@pytest.mark.parametrize("text, sizes, passes", [
    ("2 <= L['t0']", (2,), True),
    ("2 <= L['t0']", (1,), False),
    ("2 <= L['t0'] and 2 <= L['t1']", (2, 1), False),
    ("2 <= L['t0'] and L['t1'] <= 4096 and L['t0'] != L['t1']", (2, 4096), True),
    ("2 <= L['t0'] < 9 < L[\"t1\"]", (8, 10), True),
    ("2 <= L['t0'] < 9 < L[\"t1\"]", (8, 9), False),
    ("L['t0'] % 8 == 0 or L['t0'] * 2 - -1 == L['t1'] // 3 + 5", (16, 0), True),
    ("L['t0'] % 8 == 0 or L['t0'] * 2 - -1 == L['t1'] // 3 + 5", (3, 6), True),
    ("L['t0'] % 8 == 0 or L['t0'] * 2 - -1 == L['t1'] // 3 + 5", (3, 9), False),
])
def test_what_torch_writes_is_read(text: str, sizes: tuple[int, ...], passes: bool) -> None:
    assert SizeGuard(text, len(sizes)).passes(sizes) is passes


@pytest.mark.parametrize("text", [
    "__import__('os').system('true') == 0", "print(1) == 1", "2 <= L['t0'] or __import__('os')",
    "False and __import__('os').abort() == 0", "1 == 2 == __import__('os').getpid()", "(lambda: 1)() == 1",
    "L.__class__ == 1", "L['t0'].__class__ == 1", "L['t1'] == 1", "L['t0'", "L[0] == 1", "t0 == 1",
    "torch.ones(1) == 1", "[1 for _ in 'a'] == 1", "'a' * 9 == 1", "2 ** 9 ** 9 == 1", "1 << 9 == 1", "9 is 9",
    "1.5 < L['t0']", "True == 1", "1", "not 1", "", "L['t0'] == 1\nimport os", "L['t0'] == 1 if 1 else 2",
    f"L['t0'] == {'(' * 500}1{')' * 500}", "1" * (LONGEST + 1), "1 // (L['t0'] - 1) == 1", f"{1 << 62} == 1", None, 7,
])
def test_nothing_else_is(text: str) -> None:
    with pytest.raises(ValueError, match="guard"):
        SizeGuard(text, 1)


def test_code_is_not_called_with_sizes_that_its_guard_forbids() -> None:
    import torch

    calls = []
    code = Artifact(lambda *given: calls.append(given) or [1], Order([[0, 0], [0, None]], 0, "2 <= L['t0']"))
    with pytest.raises(NeedsAnotherGraph, match="2 <= "):
        code(torch.zeros(1, 3))
    assert not calls and code(torch.zeros(2, 3)) == 1
    with pytest.raises(ValueError, match="guard"):
        Artifact(lambda: None, Order([[0, 0]], 0, "__import__('os').abort()"))
