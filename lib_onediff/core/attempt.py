"""Turns what happens while OneDiff serves a call into an answer. No other handler of exceptions decides who serves."""
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
OUT_OF_MEMORY = "out of GPU memory: the graphs were freed"


class Outcome(enum.Enum):
    """What became of an attempt to serve. A host's own exception is none of these: it passes through."""

    OURS = enum.auto()
    REFUSED = enum.auto()
    OUT_OF_MEMORY = enum.auto()
    FAULT = enum.auto()


class HostError(BaseException):
    """Carries an exception of the host, or of another extension's function, through OneDiff's code.

    It is no Exception: no handler on the way charges it to a step policy, to a backend or to OneDiff, and nothing is
    computed again. The outermost hook raises the exception that it carries (guard.Guard.serve).
    """

    def __init__(self, error: BaseException) -> None:
        """error: is being handled by the function that the host's code was called from."""
        super().__init__(error)
        self.error = error
        # Nobody is to look for the error in our frames.
        self._where = None if error.__traceback__ is None else error.__traceback__.tb_next

    @property
    def is_out_of_memory(self) -> bool:
        return isinstance(self.error, torch.cuda.OutOfMemoryError)

    def as_raised(self) -> BaseException:
        """The exception, with the traceback that it had when it left the host's code."""
        return self.error.with_traceback(self._where)


class HostFunction(partial):  # type: ignore[type-arg]
    """A host's own function as a hook calls it. What it raises becomes a HostError."""

    # See as_host.
    raises_host_errors = True

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except HostError:
            raise
        except BaseException as error:
            raise HostError(error)  # noqa: B904


def as_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one from which the host's own exceptions come as HostErrors.

    Code of ours around a HostFunction says so by raises_host_errors: any other exception of it is a fault of ours.
    """
    return function if getattr(function, "raises_host_errors", False) else HostFunction(function)


@dataclass
class Attempt(Generic[Result]):
    """What became of an attempt. answer: where it is OURS. reason: why there is none, for the user. error: the Refusal
    or the fault. It holds none of the tensors that were computed before it was raised."""

    outcome: Outcome
    answer: Result | None = None
    reason: str = ""
    error: Exception | None = None

    @classmethod
    def of(cls, error: Exception | HostError, around: BaseException | None = None) -> Attempt[Result]:
        """What an exception says, which is being handled. A HostError is lack of memory: that is ours as well, because
        the host has computed beside what OneDiff holds, and gets another turn without that.

        around: what the host was handling when it called us.
        """
        if isinstance(error, Refusal):
            return cls(Outcome.REFUSED, None, str(error), without_frames(error))
        if isinstance(error, (torch.cuda.OutOfMemoryError, HostError)):
            return cls(Outcome.OUT_OF_MEMORY, None, OUT_OF_MEMORY)
        clear_frames(error, around)
        return cls(Outcome.FAULT, None, str(error), error)

    @property
    def is_ours(self) -> bool:
        return self.outcome is Outcome.OURS

    @property
    def fault(self) -> Exception | None:
        """The exception that is a fault of ours; None for every other outcome."""
        return self.error if self.outcome is Outcome.FAULT else None

    def given(self) -> Result:
        """The answer. Raises what stands in its way, once, for a caller that decides no more than this one."""
        if self.outcome is Outcome.OURS:
            return cast("Result", self.answer)
        error, self.error = self.error or torch.cuda.OutOfMemoryError(self.reason), None
        try:
            raise error
        finally:
            # Its traceback holds this frame.
            del error


def attempted(work: Callable[[], Result], beside_host: bool = False) -> Attempt[Result]:
    """What becomes of work(). A HostError passes through, as do KeyboardInterrupt and its like.

    beside_host: the host's own lack of memory counts as ours; see Attempt.of.
    """
    around = sys.exc_info()[1]
    try:
        return Attempt(Outcome.OURS, work())
    except HostError as passing:
        if not (beside_host and passing.is_out_of_memory):
            raise
        return Attempt.of(passing)
    except Exception as error:
        return Attempt.of(error, around)


def without_frames(refusal: Refusal) -> Refusal:
    """The refusal alone: its message is all that is needed of it."""
    refusal.__cause__ = refusal.__context__ = None
    return refusal.with_traceback(None)


def clear_frames(error: BaseException, around: BaseException | None = None) -> None:
    """Free what the functions have computed through which an exception has come. Its traceback can still be logged.

    around: an exception that was being handled before: its frames are the host's.
    """
    for one in raised_from(error, around):
        traceback.clear_frames(cast("TracebackType", one.__traceback__))


def raised_from(error: BaseException, around: BaseException | None) -> Iterator[BaseException]:
    """An exception and those that it was raised from, each once, up to around."""
    waiting, seen = [error], {id(around)}
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [before for before in (one.__cause__, one.__context__) if before is not None]
