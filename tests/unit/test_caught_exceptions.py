"""Whoever catches every exception raises it again, logs its traceback, or hands it to somebody who does."""
from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EVERYTHING = {"Exception", "BaseException"}
# log.exception, the guard's note and give_up (a traceback and a sentence), traceback.print_exc where nothing is logged
# (install.py, programs), and a Future's set_exception.
TELL = {"exception", "note", "give_up", "print_exc", "set_exception"}


def sources() -> list[str]:
    files = [*(REPOSITORY / "lib_onediff").rglob("*.py"), *(REPOSITORY / "scripts").glob("*.py")]
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in [*files, REPOSITORY / "install.py"])


def silent(source: str) -> list[int]:
    """The lines of the handlers that catch everything and keep it to themselves."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    return [handler.lineno for handler in handlers if catches_everything(handler) and not tells(handler)]


def catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in EVERYTHING) for kind in kinds)


def tells(handler: ast.ExceptHandler) -> bool:
    return any(
        isinstance(node, ast.Raise)
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TELL)
        or (isinstance(node, ast.keyword) and node.arg == "exc_info")
        for statement in handler.body for node in ast.walk(statement)
    )


def test_no_exception_is_kept_silent() -> None:
    """To pass: name what is expected, raise it again, or log it with its traceback (exc_info)."""
    assert silent("try:\n    work()\nexcept Exception:\n    pass\n") == [3]
    assert silent("try:\n    work()\nexcept Exception:\n    log.exception('failed')\n") == []
    found = {name: silent((REPOSITORY / name).read_text(encoding="utf-8")) for name in sources()}
    assert {name: lines for name, lines in found.items() if lines} == {}
