"""Turns an exception that is raised while OneDiff serves a call into an outcome: refused, out of memory, or our fault.

No other exception handler decides whether OneDiff or the host serves a call.
"""
from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

import torch

from .refusal import Refusal

Result = TypeVar("Result")
# The reason, for users. The caller that gets an Attempt with it frees our memory.
OUT_OF_MEMORY = "the GPU memory was full: OneDiff freed what it held (its CUDA graphs)"


class Outcome(enum.Enum):
    """How an attempt to serve ended. An exception of the host has no outcome: it passes through as a HostError.

    OURS: OneDiff has the answer. REFUSED: OneDiff does not serve this (a Refusal). OUT_OF_MEMORY: the GPU is full.
    FAULT: any other exception of our code. The caller does what follows: after OUT_OF_MEMORY it frees our memory, a
    FAULT it logs, and without an answer the host serves.
    """

    OURS = enum.auto()
    REFUSED = enum.auto()
    OUT_OF_MEMORY = enum.auto()
    FAULT = enum.auto()


class HostError(BaseException):
    """Carries an exception of the host, or of another extension's function, through OneDiff's code.

    It is a BaseException, so that `except Exception` on the way neither blames a step policy, a backend or OneDiff for
    it, nor computes anything again. The outermost hook raises the exception that it carries (guard.Guard.serve).
    """

    def __init__(self, error: BaseException) -> None:
        """error: the exception that the host's code raised. Create the HostError in the except block around the call of
        that code: as_raised() leaves out the traceback's first frame, which is the one with this except block."""
        super().__init__(error)
        self.error = error
        # So that the traceback in the user's log begins in the host's code.
        self._where = None if error.__traceback__ is None else error.__traceback__.tb_next

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the host's exception is torch.cuda.OutOfMemoryError."""
        return isinstance(self.error, torch.cuda.OutOfMemoryError)

    def as_raised(self) -> BaseException:
        """The exception, with the traceback that it had when it left the host's code."""
        return self.error.with_traceback(self._where)


class HostFunction(partial):  # type: ignore[type-arg]
    """A host's own function, as a hook calls it: every exception of the function, KeyboardInterrupt included, is raised
    as a HostError; one that is a HostError already is not wrapped again."""

    # A mark for as_host, which functions of ours may have as well.
    raises_host_errors = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except HostError:
            raise
        except BaseException as error:
            raise HostError(error)  # noqa: B904


def as_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """A host's function as a HostFunction, so that its exceptions become HostErrors.

    A function with the attribute raises_host_errors = True is returned as it is. It is a HostFunction already, or a
    function of ours around one: then its other exceptions are faults of ours, and must not become HostErrors.
    """
    return function if getattr(function, "raises_host_errors", False) else HostFunction(function)


@dataclass
class Attempt(Generic[Result]):
    """The outcome of an attempt, as attempted() returns it.

    answer: the result of the work if the outcome is OURS, otherwise None.
    reason: why there is no answer, for the user; "" if the outcome is OURS. Of a FAULT it is the exception's message,
        which may be empty too: only the outcome tells whether there is an answer.
    error: the Refusal or the fault, None for OURS and OUT_OF_MEMORY. Its traceback keeps no tensors alive.
    """

    outcome: Outcome
    answer: Result | None = None
    reason: str = ""
    error: Exception | None = None

    @classmethod
    def of(cls, error: Exception | HostError, around: BaseException | None = None) -> Attempt[Result]:
        """The Attempt for an exception. Call it in the except block that caught it. The Attempt keeps no tensors alive:
        a Refusal loses its traceback, an OutOfMemoryError is not kept, and the frames of a fault's traceback lose their
        local variables.

        A HostError given here must carry the host's own OutOfMemoryError (see attempted, host_oom_is_ours). OneDiff may
        hold the memory that the host lacked, so the outcome is OUT_OF_MEMORY: the caller frees our memory and runs the
        host again. around: the exception that the host was handling when it called us, if any; its frames are the
        host's, and are not cleared.
        """
        if isinstance(error, Refusal):
            return cls(Outcome.REFUSED, None, str(error), without_frames(error))
        if isinstance(error, (torch.cuda.OutOfMemoryError, HostError)):
            return cls(Outcome.OUT_OF_MEMORY, None, OUT_OF_MEMORY)
        clear_frames(error, around)
        return cls(Outcome.FAULT, None, str(error), error)

    @property
    def is_ours(self) -> bool:
        """Whether there is an answer."""
        return self.outcome is Outcome.OURS

    @property
    def fault(self) -> Exception | None:
        """The exception that is a fault of ours; None for every other outcome."""
        return self.error if self.outcome is Outcome.FAULT else None

    def given(self) -> Result:
        """The answer. Without one, raises the Refusal, the fault, or an OutOfMemoryError.

        Raising sets `error` to None, and so `fault`, because the traceback refers to frames that refer to this Attempt:
        read `error` before. Another call raises a new exception with the same reason, a RuntimeError for a fault.
        """
        if self.outcome is Outcome.OURS:
            return cast("Result", self.answer)
        error = self.error or self._raised_anew()
        self.error = None
        try:
            raise error
        finally:
            # Break the cycle: the traceback refers to this frame.
            del error

    def _raised_anew(self) -> Exception:
        """A new exception with this reason: a Refusal, an OutOfMemoryError, or for a fault a RuntimeError. For given(),
        when `error` is None."""
        if self.outcome is Outcome.REFUSED:
            return Refusal(self.reason)
        if self.outcome is Outcome.OUT_OF_MEMORY:
            return torch.cuda.OutOfMemoryError(self.reason)
        return RuntimeError(self.reason)


def attempted(work: Callable[[], Result], host_oom_is_ours: bool = False) -> Attempt[Result]:
    """Run work() once, and return its result or exception as an Attempt. HostErrors are raised, not returned, and so
    are KeyboardInterrupt and SystemExit. Nothing is logged.

    host_oom_is_ours: return a HostError with the host's OutOfMemoryError as OUT_OF_MEMORY too; see Attempt.of.
    """
    around = sys.exc_info()[1]
    try:
        return Attempt(Outcome.OURS, work())
    except HostError as passing:
        if not (host_oom_is_ours and passing.is_out_of_memory):
            raise
        return Attempt.of(passing)
    except Exception as error:
        return Attempt.of(error, around)


def without_frames(refusal: Refusal) -> Refusal:
    """The same refusal. Its traceback, cause and context, which would keep tensors alive, are removed from it."""
    refusal.__cause__ = None
    refusal.__context__ = None
    return refusal.with_traceback(None)


def clear_frames(error: BaseException, around: BaseException | None = None) -> None:
    """Clear the local variables in the frames of an exception's traceback, and of its causes' and contexts', so that
    their tensors are freed. The traceback can still be logged. Frames that still run are not affected.

    around: an exception that the host was handling when it called us: its frames are the host's, and are left alone.
    """
    for one in raised_from(error, around):
        traceback.clear_frames(cast("TracebackType", one.__traceback__))


def raised_from(error: BaseException, around: BaseException | None) -> Iterator[BaseException]:
    """An exception, its __cause__ and __context__, theirs, and so on, each once. `around` is left out, and so are the
    exceptions that can only be reached through it."""
    waiting = [error]
    seen = {id(around)}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [before for before in (one.__cause__, one.__context__) if before is not None]
