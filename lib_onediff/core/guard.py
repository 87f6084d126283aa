"""The outermost line of every hook: an exception of our code (a fault) is logged, and the host's own code runs instead.

serve, attempt and hook use no other code of OneDiff but core.attempt. If logging a fault fails, only the log line is
lost.
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
# The largest number of different faults that are logged, so that a log cannot grow without end.
MOST_FAULTS = 50
A_FAULT_IN = "a fault of OneDiff in "


class Here(threading.local):
    """State of one thread. hooks: how many nested calls of Guard.serve() the thread is inside of; 0 outside of any."""

    hooks = 0


class Guard:
    """Runs hooks, and handles their faults: one traceback in the log for each different one, and a sentence for the
    user.

    After a fault, the host computes the rest of the generation. That needs a host that calls resume() at the beginning
    of each generation. If resume() is never called, as in diffusers, the host computes only the call that failed.

    generation: how many times resume() has run, also by forget().
    suspended: the reason why serve() leaves all calls to the host until the next generation; "" while OneDiff serves.
        attempt() and hook() run their functions also while it is set.
    """

    def __init__(self) -> None:
        self._faults: dict[str, str] = {}
        self._logged: set[str] = set()
        self._given_up = ""
        self.suspended = ""
        self.generation = 0
        self._has_generations = False
        self._here = Here()

    @property
    def faults(self) -> list[str]:
        """The latest fault of each hook since forget(), as sentences for the user."""
        return list(self._faults.values())

    def note(self, hook: str, error: BaseException) -> str:
        """Remember a fault for `faults`, and return its sentence for the user. It is logged with its traceback, unless
        the same sentence was logged before or MOST_FAULTS were. hook: words that complete "a fault of OneDiff in ...".
        """
        sentence = f"{A_FAULT_IN}{hook}, please report it: {first_line(error)}"
        self._faults[hook] = sentence
        if sentence not in self._logged and len(self._logged) < MOST_FAULTS:
            self._logged.add(sentence)
            log.error("%s", sentence, exc_info=error)
        return sentence

    def give_up(self, hook: str, error: BaseException) -> str:
        """note() for code that has caught a fault itself, and returns the host's answer to its caller instead.

        Inside of serve(), the host also serves the rest of the generation, from the next call on, as after a fault that
        serve() catches. In two cases the fault is noted and nothing else happens: outside of serve(), as in a call
        without hooks; and if resume() was never called.
        """
        sentence = self.note(hook, error)
        if self._here.hooks:
            self._given_up = sentence
        return sentence

    def forget(self) -> None:
        """Forget all faults, for a reload of the WebUI's page: they are no longer shown, and are logged if they recur.
        OneDiff serves again. Until the next resume(), a fault suspends nothing, as if resume() had never been called.
        """
        self._faults.clear()
        self._logged.clear()
        self.resume()
        self._has_generations = False

    def resume(self) -> None:
        """Begin a generation: OneDiff serves again after a fault in the last one."""
        self.suspended = ""
        self._given_up = ""
        self.generation += 1
        self._has_generations = True

    def serve(
        self, hook: str, ours: Callable[..., Result], original: Callable[..., Result],
        declined: Callable[[str], object], /, *args: Any, **kwargs: Any,
    ) -> Result:
        """The result of ours(host, *args, **kwargs), where host is original as a HostFunction. If ours fails, or while
        the guard is suspended, the result of original(*args, **kwargs).

        An exception that original raises inside of ours is raised here, with the host's own traceback. Any other
        Exception of ours is a fault, also a Refusal and a lack of memory: it is noted, and suspends the guard for the
        rest of the generation, if resume() has begun one. But if original then raises as well, its exception is raised
        and no fault is noted, because the arguments are wrong.

        hook: words for note(). declined: called with the reason, for statistics, when original answers instead of ours.
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
                    self.suspended = self._given_up if self._has_generations else ""
                    self._given_up = ""
                return answer
            except HostError as passing:
                theirs = passing.as_raised()
            except Exception as error:
                tried: Attempt[Result] = Attempt.of(error, around)
                # ours should have handled a Refusal or lack of memory itself, so here these count as faults.
                fault = tried.error or MemoryError(tried.reason)
            finally:
                self._here.hooks -= 1
            if theirs is not None:
                # Raised outside of the handler, so that our HostError does not become its __context__.
                try:
                    raise theirs
                finally:
                    # Break the cycle: its traceback refers to this frame.
                    del theirs
        else:
            self._decline(declined, reason)
        answer = original(*args, **kwargs)
        if fault is not None:
            reason = A_FAULT_IN + hook
            with contextlib.suppress(Exception):
                reason = self.note(hook, fault)
            if self._has_generations:
                self.suspended = reason
            self._decline(declined, reason)
            # Break the cycle: its traceback refers to this frame.
            del fault
        return answer

    def _decline(self, declined: Callable[[str], object], reason: str) -> None:
        """Call declined(reason). Its exceptions are logged and not passed on."""
        with contextlib.suppress(Exception):
            self.attempt("the fallback to the host", lambda: declined(reason))

    def as_raised(self, work: Callable[[], Result]) -> Result:
        """The result of work(), for code that may run without a hook around it. A HostError is raised as the host's own
        exception. Inside of serve() it passes unchanged, because serve() converts it. Other exceptions pass."""
        if self._here.hooks:
            return work()
        try:
            return work()
        except HostError as passing:
            theirs = passing.as_raised()
        try:
            raise theirs
        finally:
            # Break the cycle: its traceback refers to this frame.
            del theirs

    def attempt(
        self, hook: str, work: Callable[[], Result], otherwise: Result | None = None, in_generation: bool = False
    ) -> Result | None:
        """The result of work(), or `otherwise` if it raises an Exception, which is noted as a fault. A HostError and
        KeyboardInterrupt, which are no Exceptions, are raised.

        in_generation: after a fault, the host computes everything until the next resume(). Only for work that belongs
        to a generation which began with resume().
        """
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
        """A context that enters `context`, such as a timer, and protects the code inside from the faults of `context`:
        they are noted, and the code inside runs as without it. Exceptions of that code pass, and `context` is left as
        after a success."""
        entered = self.attempt(hook, lambda: (context.__enter__(),))
        try:
            yield
        finally:
            if entered is not None:
                self.attempt(hook, lambda: context.__exit__(None, None, None))

    def hook(
        self, name: str, otherwise: Any = None, in_generation: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator for functions that the host calls: the function runs in attempt(), so that it never raises an
        Exception into the host. name: the hook's, for note(). otherwise, in_generation: see attempt."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def guarded(*args: Any, **kwargs: Any) -> Any:
                return self.attempt(name, lambda: function(*args, **kwargs), otherwise, in_generation)

            return guarded

        return decorate


def outcome_of(work: Callable[[], Result]) -> Future[Result]:
    """Run work() now, and return its result or Exception as a finished Future, which another thread can read. A
    HostError and KeyboardInterrupt, which are no Exceptions, are raised.

    For work that must run in a host's own thread: the host's thread class may print an exception and return None.
    """
    future: Future[Result] = Future()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    try:
        return future
    finally:
        # Break the cycle from the exception's traceback to this frame: it would keep every tensor on the way alive.
        del future


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; the name of its class if the message is empty. A message that begins
    with a position in the source ("at 3:4:"), as Triton's do, gives its last line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[-1] if re.match(r"at \d+:\d+:$", lines[0]) else lines[0]
