"""Calls other extensions' functions inside of our forward: keeps their exceptions apart from ours, and can restore the
random numbers and counters that they have used."""
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

# The packages of code that calls the functions, and belongs to no extension.
CALLERS = frozenset({package(__name__), "torch"})


class FunctionCalls(EveryPoint):
    """The patch points of one call, whose functions may have to be called several times for it.

    An exception raised in an extension's code becomes a HostError.
    """

    def __init__(self, patches: Points, device: torch.device) -> None:
        """device: the functions may draw random numbers on it."""
        super().__init__(patches)
        self._device = device
        self._rewind: Callable[[], None] | None = None

    def at(self, point: str, *arguments: Any) -> Any:
        if self._rewind is None and self.has_function(point, *arguments):
            # Save the states just before the first function of the call runs: by then, the GPU is busy with the first
            # part of a replay, and saving them costs no time.
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
        """Restore the random states, and the functions' own state, from before the first function was called."""
        if self._rewind is not None:
            self._rewind()

    @contextlib.contextmanager
    def rewound_on_failure(self) -> Iterator[None]:
        """A context that rewinds if the code inside fails, because another backend, or the host, then computes the call
        and calls the functions again. It does not rewind after a HostError, which ends the call, unless memory ran
        out."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, HostError) or error.is_out_of_memory:
                self.rewind()
            raise


def is_an_extensions(error: BaseException) -> bool:
    """Whether an exception has passed through code that is neither ours nor torch's."""
    where: TracebackType | None = error.__traceback__
    while where is not None:
        if package(where.tb_frame.f_globals.get("__name__", "")) not in CALLERS:
            return True
        where = where.tb_next
    return False
