"""The outermost line of every hook: an error of ours is noted, and the host goes on as if we were not there.

serve, attempt and hook call no other code of OneDiff but core.attempt: if noting a fault fails, only the note is lost.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from .attempt import Attempt, HostError, HostFunction

log = logging.getLogger("onediff")
Result = TypeVar("Result")
# The largest number of different errors that are logged.
MOST_FAULTS = 50
A_FAULT_IN = "a fault of OneDiff in "


class Here(threading.local):
    """State of one thread. hooks: the number of our hooks that it is inside of."""

    hooks = 0


class Guard:
    """Runs hooks and notes their faults: one traceback in the log for each, and a sentence for the user.

    generation: how many generations have begun.
    suspended: why the host serves every call until the next generation begins; "" where OneDiff serves. A fault in one
    hook leaves the rest of its generation to the host. Until resume() was called once, no host announces generations:
    then a fault costs its own call alone.
    """

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}
        self._logged: set[str] = set()
        self._given_up = ""
        self.suspended = ""
        self.generation = 0
        self._hears_of_generations = False
        self._here = Here()

    @property
    def faults(self) -> list[str]:
        """One sentence for each hook that has failed: the latest fault of each."""
        return list(self._faults.values())

    def note(self, hook: str, error: BaseException) -> str:
        """Log a fault, and return the sentence for the user. hook: words that complete "a fault of OneDiff in ..."."""
        sentence = f"{A_FAULT_IN}{hook}, please report it: {first_line(error)}"
        self._faults[hook] = sentence
        if sentence not in self._logged and len(self._logged) < MOST_FAULTS:
            self._logged.add(sentence)
            log.error("%s", sentence, exc_info=error)
        return sentence

    def give_up(self, hook: str, error: BaseException) -> str:
        """Note a fault of a hook that returns the host's answer by itself, and returns the sentence for the user.

        When the hook around it (serve) has returned, the host serves the rest of the generation, as after any other
        fault. Outside of serve, as in a call that is made without hooks, the fault is noted and nothing else follows.
        """
        sentence = self.note(hook, error)
        if self._here.hooks:
            self._given_up = sentence
        return sentence

    def forget(self) -> None:
        """Forget all faults, as when the page is reloaded: they are no longer shown, and logged if they come again."""
        self._faults.clear()
        self._logged.clear()
        self.resume()
        self._hears_of_generations = False

    def resume(self) -> None:
        """Begin a generation: OneDiff serves again after a fault in the last one."""
        self.suspended = ""
        self._given_up = ""
        self.generation += 1
        self._hears_of_generations = True

    def serve(
        self, hook: str, ours: Callable[..., Result], original: Callable[..., Result],
        declined: Callable[[str], object], /, *args: Any, **kwargs: Any,
    ) -> Result:
        """What ours(host, *args, **kwargs) returns, or original(*args, **kwargs) where ours fails.

        host is original as a HostFunction: what it raises is raised here as the host has raised it. Where original
        raises too after ours has failed, that is the answer: the arguments are to blame, and no fault is noted.
        declined is called with the reason whenever original answers instead of ours.
        """
        reason = self.suspended
        fault: Exception | None = None
        theirs: BaseException | None = None
        if not reason:
            around = sys.exc_info()[1]
            self._here.hooks += 1
            try:
                answer = ours(HostFunction(original), *args, **kwargs)
                if self._given_up:
                    self.suspended = self._given_up if self._hears_of_generations else ""
                    self._given_up = ""
                return answer
            except HostError as passing:
                theirs = passing.as_raised()
            except Exception as error:
                tried: Attempt[Result] = Attempt.of(error, around)
                # A Refusal or lack of memory should have been handled inside of ours; here it counts as a fault.
                fault = tried.error or MemoryError(tried.reason)
            finally:
                self._here.hooks -= 1
            if theirs is not None:
                # Outside of the handler: an exception of ours is no part of the host's.
                try:
                    raise theirs
                finally:
                    # It holds this frame.
                    del theirs
        else:
            self._decline(declined, reason)
        answer = original(*args, **kwargs)
        if fault is not None:
            reason = A_FAULT_IN + hook
            with contextlib.suppress(Exception):
                reason = self.note(hook, fault)
            if self._hears_of_generations:
                self.suspended = reason
            self._decline(declined, reason)
            # It holds this frame.
            del fault
        return answer

    def _decline(self, declined: Callable[[str], object], reason: str) -> None:
        with contextlib.suppress(Exception):
            self.attempt("the fallback to the host", lambda: declined(reason))

    def as_raised(self, work: Callable[[], Result]) -> Result:
        """What work() returns. The host's own exceptions are raised as the host has raised them; inside of serve they
        pass as HostErrors, because serve does this for all of its hook."""
        if self._here.hooks:
            return work()
        try:
            return work()
        except HostError as passing:
            theirs = passing.as_raised()
        try:
            raise theirs
        finally:
            # It holds this frame.
            del theirs

    def attempt(
        self, hook: str, work: Callable[[], Result], otherwise: Result | None = None, in_generation: bool = False
    ) -> Result | None:
        """What work() returns, or otherwise where it fails. in_generation: a fault leaves the generation in progress to
        the host."""
        try:
            return work()
        except Exception as error:
            sentence = A_FAULT_IN + hook
            with contextlib.suppress(Exception):
                sentence = self.note(hook, error)
            if in_generation:
                self.suspended = sentence
            return otherwise

    @contextlib.contextmanager
    def beside(self, hook: str, context: AbstractContextManager[object]) -> Iterator[None]:
        """Enter a context that only observes the code inside. A fault of the context costs neither the work inside nor
        its answer."""
        entered = self.attempt(hook, lambda: (context.__enter__(),))
        try:
            yield
        finally:
            if entered is not None:
                self.attempt(hook, lambda: context.__exit__(None, None, None))

    def hook(
        self, name: str, otherwise: Any = None, in_generation: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator for functions that the host calls: see attempt."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                return self.attempt(name, lambda: function(*args, **kwargs), otherwise, in_generation)

            return guarded

        return decorate


def outcome_of(work: Callable[[], Result]) -> Future[Result]:
    """What work() returns or raises, as a Future for the thread that waits for it: a host's own class of threads may
    print an exception and return None instead."""
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    try:
        return future
    finally:
        # The traceback holds this frame, which would hold the exception, and with it every tensor on the way.
        del future


def first_line(error: BaseException) -> str:
    """The message of an exception, in one line. Triton's begins with a line of its source, and ends with the reason."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[-1] if re.match(r"at \d+:\d+:$", lines[0]) else lines[0]
