"""What the sizes of a call have to fulfil, as torch writes it: read as data, and never evaluated by Python.

torch joins comparisons of integers by "and", such as 2 <= L['t0'] and L['t0'] <= 4096, where t0 is the first size.
"""
from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# torch's own are shorter.
LONGEST, MOST = 10_000, 1 << 62
SIZE = re.compile(r"t(\d{1,3})")


class SizeGuard:
    """A guard. count: of how many sizes. Raises ValueError for any other text."""

    def __init__(self, text: str, count: int) -> None:
        if not isinstance(text, str) or len(text) > LONGEST:
            raise ValueError("it is no guard")
        self._count = count
        try:
            self._tree = ast.parse(text, mode="eval").body
            # Every part of it is one that we know.
            self.passes([1] * count)
        except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError) as problem:
            raise ValueError(f"{text[:80]!r} is no guard that OneDiff knows") from problem

    def passes(self, sizes: Sequence[int]) -> bool:
        """Whether sizes fulfil it. Raises ZeroDivisionError where it divides by one that is 0."""
        return self._truth(self._tree, sizes)

    def _truth(self, node: ast.expr, sizes: Sequence[int]) -> bool:
        if isinstance(node, ast.BoolOp):
            # A list: what comes after the one that decides is looked at too.
            found = [self._truth(each, sizes) for each in node.values]
            return all(found) if isinstance(node.op, ast.And) else any(found)
        if isinstance(node, ast.Compare):
            numbers = [self._number(each, sizes) for each in (node.left, *node.comparators)]
            comparisons = [COMPARISONS[type(each)] for each in node.ops if type(each) in COMPARISONS]
            if len(comparisons) < len(node.ops):
                raise ValueError("a comparison that is not of numbers")
            return all(compare(*pair) for compare, *pair in zip(comparisons, numbers, numbers[1:], strict=False))
        raise ValueError(type(node).__name__)

    def _number(self, node: Any, sizes: Sequence[int]) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < MOST:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand, sizes)
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
            return ARITHMETIC[type(node.op)](self._number(node.left, sizes), self._number(node.right, sizes))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "L":
            name = node.slice.value if isinstance(node.slice, ast.Constant) else None
            found = SIZE.fullmatch(name) if isinstance(name, str) else None
            if found and int(found[1]) < self._count:
                return sizes[int(found[1])]
        raise ValueError(type(node).__name__)
