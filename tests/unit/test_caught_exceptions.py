"""Reads OneDiff's source. Every handler that catches all exceptions raises again, logs the traceback, or passes the
exception on; and core/attempt.py alone decides by an exception whether OneDiff or the host serves a call."""
from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EVERYTHING = {"Exception", "BaseException"}
# log.exception, the guard's note and give_up (a traceback and a sentence), traceback.print_exc where nothing is logged
# (install.py, programs), and a Future's set_exception.
TELL = {"exception", "note", "give_up", "print_exc", "set_exception"}
# The folders of lib_onediff in which it is decided whether OneDiff or the host serves a call.
DECIDING = ("hosts", "runtime", "steps")


def sources() -> list[str]:
    """The Python files of OneDiff, as paths in the repository."""
    files = [*(REPOSITORY / "lib_onediff").rglob("*.py"), *(REPOSITORY / "scripts").glob("*.py")]
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in [*files, REPOSITORY / "install.py"])


def silent(source: str) -> list[int]:
    """The lines of handlers that catch all exceptions, and neither raise, log nor pass the exception on."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    return [
        handler.lineno for handler in handlers
        if catches_everything(handler) and not tells(handler) and not attempts(handler)
    ]


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


def test_every_handler_that_catches_all_exceptions_raises_or_logs() -> None:
    """To pass: name the expected exceptions, raise again, or log with a traceback (exc_info)."""
    assert silent("try:\n    work()\nexcept Exception:\n    pass\n") == [3]
    assert silent("try:\n    work()\nexcept Exception:\n    log.exception('failed')\n") == []
    found = {name: silent(text_of(name)) for name in sources()}
    assert {name: lines for name, lines in found.items() if lines} == {}


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def decides(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches all exceptions or OutOfMemoryError, and neither makes an Attempt of it nor raises it
    again."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id if isinstance(kind, ast.Name) else getattr(kind, "attr", None) for kind in kinds}
    takes_any = bool(names & {*EVERYTHING, "OutOfMemoryError", None})
    return takes_any and not attempts(handler) and not is_raised_again(handler)


def attempts(handler: ast.ExceptHandler) -> bool:
    """Whether a handler makes an Attempt of the exception, which its callers log."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "of" and getattr(node.value, "id", None) in ("Attempt", "cls")
        for statement in handler.body for node in ast.walk(statement)
    )


def is_raised_again(handler: ast.ExceptHandler) -> bool:
    ends = handler.body[-1]
    return isinstance(ends, ast.Raise) and ends.exc is None


def has_deciding_handler(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.ExceptHandler) and decides(node) for node in ast.walk(function))


def test_only_core_attempt_decides_by_an_exception_whether_onediff_or_the_host_serves() -> None:
    """In the folders DECIDING, other handlers of all exceptions or of OutOfMemoryError are in the functions listed here
    only. To pass: use Attempt.of or attempted, or raise again."""
    folders = tuple(f"lib_onediff/{folder}/" for folder in DECIDING)
    caught = set()
    for name in filter(lambda name: name.startswith(folders), sources()):
        for function in ast.walk(ast.parse(text_of(name))):
            if isinstance(function, ast.FunctionDef) and has_deciding_handler(function):
                caught.add(f"{name}:{function.name}")
    assert caught == {
        # The exception is replaced by one with a better reason.
        "lib_onediff/runtime/two_gpus.py:_on",
        # The host runs once more if OneDiff had used the memory; the host serves either way.
        "lib_onediff/runtime/graphs/cache.py:run_host",
        # The call has been answered.
        "lib_onediff/runtime/runtime.py:note_served",
        # No call is served here: what a release has, what a compiler is doing, why a checkpoint is not loaded, and that
        # a library for tokenizers has panicked.
        "lib_onediff/hosts/contract.py:lack_of", "lib_onediff/hosts/tracing.py:must_be_whole",
        "lib_onediff/hosts/forge/adapter.py:warm", "lib_onediff/hosts/diffusers/tokenizer.py:load_tokenizer",
    }
