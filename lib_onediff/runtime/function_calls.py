"""Calls other extensions' functions inside of our forward: tells their exceptions from ours, and can restore the states
of random generators and counters that the functions have used, before they are called again."""
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

# The packages whose code may be between our forward and an extension's function, and is no extension's: ours and torch.
CALLERS = frozenset({package(__name__), "torch"})


class FunctionCalls(EveryPoint):
    """The Points of one call: the points in our forward at which other extensions' functions are called. Wraps the
    call's own Points, so that the functions can be called several times for one call with the same results.

    An exception raised in an extension's code becomes a HostError.
    """

    def __init__(self, patches: Points, device: torch.device) -> None:
        """patches: the call's own Points. device: the one on which the functions may draw random numbers."""
        super().__init__(patches)
        self._device = device
        self._rewind: Callable[[], None] | None = None

    def at(self, point: str, *arguments: Any) -> Any:
        """The result of the call's own Points at the point of this name; they call the extension's function there, if
        there is one. Before the first function of this call, the random states are saved for rewind(). Raises HostError
        if an extension's code raises; exceptions of our code pass unchanged."""
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
        """Restore the states of random generators, and the functions' own state, from before the first function of this
        call ran. Does nothing if none has run. Call it before the functions are called again."""
        if self._rewind is not None:
            self._rewind()

    @contextlib.contextmanager
    def rewound_on_failure(self) -> Iterator[None]:
        """A context that calls rewind() if the code inside raises, because another backend, or the host, then computes
        the call and calls the functions again. The exception is raised again. A HostError does not rewind, because it
        ends the call, except one for a lack of memory: then the call is computed again too."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, HostError) or error.is_out_of_memory:
                self.rewind()
            raise


def is_an_extensions(error: BaseException) -> bool:
    """Whether an exception was raised in, or has passed through, code that is neither ours nor torch's; the host's code
    counts like an extension's."""
    where: TracebackType | None = error.__traceback__
    while where is not None:
        if package(where.tb_frame.f_globals.get("__name__", "")) not in CALLERS:
            return True
        where = where.tb_next
    return False
