"""Calls of other extensions' functions within a call of ours: their exceptions are their own, and what they have drawn
and counted can be set back."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from ..core.attempt import HostError
from ..core.origins import package
from ..core.points import EveryPoint, Points
from .verify import rewinder_of_all

# Code that calls functions and is nobody's extension.
CALLERS = frozenset({package(__name__), "torch"})


class FunctionCalls(EveryPoint):
    """The patch points of one call, however often its functions have to be called for it.

    An exception that comes out of an extension's code becomes a HostError.
    """

    def __init__(self, patches: Points, device: torch.device) -> None:
        """device: whose random numbers the functions draw."""
        super().__init__(patches)
        self._device = device
        self._rewind: Callable[[], None] | None = None

    def at(self, point: str, *arguments: Any) -> Any:
        if self._rewind is None and self.has_function(point, *arguments):
            # A function is about to be called at this point, the first of the call. The states are taken no earlier:
            # the GPU is computing the first part of a replay meanwhile.
            self._rewind = rewinder_of_all(self._device, self.functions)
        try:
            return super().at(point, *arguments)
        except HostError:
            raise
        except BaseException as error:
            if is_an_extensions(error):
                raise HostError(error)  # noqa: B904
            raise

    def rewind(self) -> None:
        """Set random numbers and functions back to what they were before the first function was called."""
        if self._rewind is not None:
            self._rewind()

    @contextlib.contextmanager
    def rewound_on_failure(self) -> Iterator[None]:
        """Rewind if the code inside fails: another backend, or the host, computes the call then, and calls the
        functions again. Not after a HostError, unless of lack of memory: that ends the call."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, HostError) or error.is_out_of_memory:
                self.rewind()
            raise


def is_an_extensions(error: BaseException) -> bool:
    """Whether an exception comes out of code that is neither ours nor torch's."""
    where: TracebackType | None = error.__traceback__
    while where is not None:
        if package(where.tb_frame.f_globals.get("__name__", "")) not in CALLERS:
            return True
        where = where.tb_next
    return False
