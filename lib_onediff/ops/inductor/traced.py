"""Functions that torch.compile compiles, and finds in its caches in the next process.

For torch 2.4 to 2.7, which cannot keep compiled code as a file of its own."""
from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..requirements import release
from .regions import NeedsAnotherGraph

log = logging.getLogger("onediff")


class Traced:
    """A function compiled once, and never while an image waits."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._may = threading.local()
        self._function = torch.compile(function, fullgraph=True, dynamic=False, backend=self._compile)

    def compile(self, inputs: list[Tensor]) -> None:
        """With the dimensions of any size that these are marked with. Raises what Inductor raises."""
        with self._at_work():
            self._function(*inputs)

    def __call__(self, *tensors: Tensor) -> Any:
        """Raises NeedsAnotherGraph."""
        try:
            return self._function(*tensors)
        except Exception as error:
            if NeedsAnotherGraph.__name__ not in f"{type(error)} {error}":
                raise
        raise NeedsAnotherGraph(self._guard_against(tensors))

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._may.now = True
        try:
            yield
        finally:
            self._may.now = False

    def _compile(self, graph: Any, inputs: Any) -> Any:
        if not getattr(self._may, "now", False):
            raise NeedsAnotherGraph(NeedsAnotherGraph.__name__)
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with autograd_cache(config):
            return compile_fx(graph, inputs)

    def _guard_against(self, tensors: tuple[Tensor, ...]) -> str:
        """Which guard stands against a call with these."""
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                self._function(*tensors)
        except Exception as error:
            log.debug("Inductor's code does not take these", exc_info=True)
            return guard_in(error)
        return "torch does not say why"


def autograd_cache(config: Any) -> contextlib.AbstractContextManager[Any]:
    """What torch derives from a graph before Inductor sees it, kept on the disk too, where torch can do that."""
    # torch 2.4 and 2.5 have it, and lose graphs of any size by it.
    if release(torch.__version__) < (2, 6) or not hasattr(config, "enable_autograd_cache"):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[Any] = config.patch(enable_autograd_cache=True)
    return patched


def guard_in(error: Exception) -> str:
    """The guard in torch's message on what it would compile anew."""
    failed = [line.strip() for line in str(error).splitlines() if line.strip().startswith("- ")]
    if not failed:
        return said_by(error)
    # What follows is a place in the source. Newer versions begin with a number of theirs.
    guard = failed[0][2:].split("  #")[0].strip()
    return guard.split(": ", 1)[1] if guard[:1].isdigit() and ": " in guard else guard


def said_by(error: Exception) -> str:
    """What an exception says, in one line, without what torch puts around it."""
    inner = getattr(error, "inner_exception", error)
    return (str(inner).strip().splitlines() or [type(inner).__name__])[0]
