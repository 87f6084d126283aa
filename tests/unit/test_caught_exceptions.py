"""Whoever catches every exception raises it again, logs its traceback, or hands it to somebody who does."""
from __future__ import annotations

import ast
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(("body", "is_silent"), [
    ("return None", True), ("reason = str(error)", True), ("log.warning(error)", True), ("pass", True),
    ("raise", False), ("raise ValueError(str(error)) from error", False), ("log.exception('failed')", False),
    ("log.debug('failed', exc_info=True)", False), ("self.guard.note('a hook', error)", False),
    ("traceback.print_exc()", False), ("future.set_exception(error)", False),
    ("if error.errno:\n        raise\n    return 1", False),
])
def test_what_counts_as_told(body: str, is_silent: bool) -> None:
    for caught in ("except Exception as error", "except (OSError, BaseException) as error", "except"):
        assert silent(f"try:\n    work()\n{caught}:\n    {body}\n") == ([3] if is_silent else [])
    assert silent(f"try:\n    work()\nexcept OSError as error:\n    {body}\n") == []


@pytest.mark.parametrize("name", sources())
def test_no_exception_is_kept_silent(name: str) -> None:
    """To pass: name what is expected, raise it again, or log it with its traceback (exc_info)."""
    found = silent((REPOSITORY / name).read_text(encoding="utf-8"))
    assert not found, f"{name}, lines {found}"
