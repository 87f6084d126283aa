"""Compares the first output of a shape with the host's own forward."""
from __future__ import annotations

import contextlib
import functools
import logging
import random
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.key import LOSSLESS
from ..core.origins import origin, package, underlying
from ..core.refusal import Refusal
from ..core.settings import MOST_LOW_BIT_ERROR
from ..core.table import ENOUGH, Entry, State
from ..store.history import History
from .rounding import limit_for, no_question, rounding_limit

log = logging.getLogger("onediff")
# See time_host. The user's image waits for the timed runs, once for every shape on a machine.
SECONDS_TO_TIME_THE_HOST = 0.5
# A result of why_it_differs: why our output cannot be compared with the host's, in one line for the user.
HOST_NOT_FINITE = (
    "the output without OneDiff has NaN or infinite values: the weights are damaged, or the model needs float32 (in a "
    "WebUI: --no-half)"
)
# The largest number of an extension's objects that are searched for state.
MOST_OBJECTS = 4096
# Classes whose instances refer to no other objects of interest.
HOLD_NOTHING = frozenset({int, float, bool, str, bytes, type(None), Tensor, nn.Parameter})
# The types of attributes that may be counters.
COUNTERS = (bool, int, float)
# Modules whose names end so are scripts of the WebUI, which names them by their files.
SCRIPT = ".py"


def prove(
    entry: Entry, output: Tensor, history: History, host: Callable[[], Tensor],
    yardstick: Callable[[], Tensor] | None, is_warm_up: bool, functions: Iterable[Any] = (), times_host: bool = True,
    allowed: float = 0.0, spread: Callable[[], float] | None = None, rounds_inputs: bool = False,
) -> bool:
    """Prove a shape: compare its first output with the host's, unless the history has its verdict from before. If the
    two outputs agree, the entry becomes PROVED (READY stays). Calls with functions of other extensions are always
    compared. In a warm-up, the host is timed also if nothing is compared.

    output: ours.
    host: the host's own forward of this call. yardstick, is_warm_up, spread, rounds_inputs: see why_it_differs.
    functions: those of other extensions (Points.functions); their state is restored after a failed comparison, because
    the host calls them again for the answer. times_host: whether host() computes this call and nothing else, so that
    its time can be compared. allowed: the relative error that the backend may have, if it is more than rounding
    explains.

    Returns whether the caller should write the verdict to the history (History.keep_verdict): True if the two outputs
    were compared and agree, in an image's call without functions of other extensions. Raises Refusal if our output must
    not be used; the entry becomes FAILED then, except if neither output was finite. If only the host's output is not
    finite, a warning is logged, and the entry becomes PROVED, so that ours is used. Raises what host() raises.
    """
    is_news = False
    # Patched calls are compared anew, because the extension's code may have changed.
    known = not entry.key.patches and history.recall(entry)
    if known and is_warm_up and times_host and entry.host.settled_ms is None:
        time_host(entry, output.device, host, often=True)
    if not known:
        rewind = rewinder_of_all(entry.key.device, functions)
        miss = why_it_differs(
            entry, output, host, yardstick, is_warm_up, times_host, allowed, False, spread, rounds_inputs
        )
        if miss is not None:
            # The host runs once more, for the answer.
            rewind()
        if miss == HOST_NOT_FINITE:
            if not bool(torch.isfinite(output).all()):
                raise Refusal(miss)
            # The host's output would give a black image, and ours gives a good one.
            log.warning("OneDiff's output is used without a comparison, because %s.", miss)
        elif miss is not None:
            raise Refusal(entry.mark_failed(miss))
        else:
            log.debug("checked %s: relative error %.1e", entry.key, entry.relative_error)
            is_news = not (entry.key.patches or is_warm_up)
    if entry.state is not State.READY:
        entry.state = State.PROVED
    entry.verdict.failures = 0
    entry.verdict.of_image |= known or not is_warm_up
    return is_news


def why_it_differs(
    entry: Entry, output: Tensor, host: Callable[[], Tensor], yardstick: Callable[[], Tensor] | None = None,
    is_warm_up: bool = False, times_host: bool = True, allowed: float = 0.0, same_type: bool = False,
    spread: Callable[[], float] | None = None, rounds_inputs: bool = False,
) -> str | None:
    """Compare our output with the host's, and time the host if it has no settled time yet. Returns None if the two
    outputs agree, HOST_NOT_FINITE if the host's output has NaN or infinite values, otherwise the difference in words
    for the user. Sets entry.relative_error if the host's output is finite and the shapes (and dtypes) agree; leaves the
    entry's state to the caller.

    yardstick: the host's forward with its approximations (such as 8-bit attention) switched off; if given, its output
    is compared in place of the host's. is_warm_up: time the host in any case, and ENOUGH times, however long that
    takes. times_host: False: do not time the host; calls with functions of other extensions are never timed. allowed:
    see prove. same_type: whether our output must have the host's dtype; under autocast, a UNet's
    may differ. spread: measures how far rounding moves this output (rounding.spread); called only for errors between
    the two limits that need no measurement (see rounding.limit_for). rounds_inputs: the host rounds the inputs of
    layers to int8 or float8. Two correct outputs then differ by more, because values near the middle between two steps
    may be rounded in different directions.
    """
    with torch.no_grad():
        # This run is not timed: the first run at a size loads kernels and picks algorithms.
        expected = (yardstick or host)()
        if not bool(torch.isfinite(expected).all()):
            return HOST_NOT_FINITE
        if output.shape != expected.shape or (same_type and output.dtype != expected.dtype):
            found = f"{tuple(output.shape)} in {output.dtype}"
            return f"OneDiff's output is {found}, not {tuple(expected.shape)} in {expected.dtype}"
        entry.relative_error = relative_error(output, expected)
        if times_host and not entry.key.patches and (is_warm_up or entry.host.settled_ms is None):
            # Not with functions of other extensions, which may count their calls.
            time_host(entry, output.device, host, is_warm_up)
    least = no_question(entry.key.dtype, output.device, entry.key.precision)
    most = rounding_limit(entry.key.dtype, output.device, entry.key.precision)
    most = max(most, MOST_LOW_BIT_ERROR) if rounds_inputs else most
    allowed = max(allowed, MOST_LOW_BIT_ERROR if entry.key.lossy != LOSSLESS else 0.0)
    limit = max(allowed, limit_for(entry.relative_error, max(least, allowed), most, spread))
    if entry.relative_error <= limit:
        return None
    return (
        f"OneDiff's output differs too much from the one without OneDiff (relative error {entry.relative_error:.1e}; "
        f"rounding explains {limit:.1e})"
    )


def time_host(entry: Entry, device: torch.device, host: Callable[[], object], often: bool = False) -> None:
    """Add times of the host's forward to entry.host: ENOUGH runs, or fewer if SECONDS_TO_TIME_THE_HOST have passed, but
    at least one. host: must have run once, since the first run takes longer. often: ENOUGH runs, however long that
    takes.
    """
    began = time.perf_counter()
    for _ in range(ENOUGH):
        entry.host.time(device, host)
        if often:
            continue
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if time.perf_counter() - began > SECONDS_TO_TIME_THE_HOST:
            break


def why_cached_pass_differs(entry: Entry, output: Tensor, cached: Callable[[], Tensor]) -> str | None:
    """Compare a cached pass of a step policy with a full pass of the same call, which has just written the memory that
    the cached pass reads, so that the two outputs must be equal within rounding error.

    entry: of the cached pass. output: of the full pass. cached: computes the cached pass.
    Returns None if the two are equal; the entry becomes PROVED. Returns None too if the full pass's output is not
    finite; the entry stays as it is. Otherwise returns the difference in words for the user, and the caller sets the
    entry's state. Sets entry.relative_error unless the full pass's output is not finite.
    """
    again = cached()
    if not bool(torch.isfinite(output).all()):
        return None
    entry.relative_error = relative_error(again, output)
    # The same operators compute the same numbers in both passes, so no measured spread is needed.
    limit = no_question(entry.key.dtype, output.device)
    if entry.relative_error <= limit:
        entry.state = State.PROVED
        return None
    return (
        f"the cached step differs too much from the full one (relative error {entry.relative_error:.1e}; rounding "
        f"explains {limit:.1e})"
    )


def computed_twice(entry: Entry, compute: Callable[[], Tensor], functions: Iterable[Any] = ()) -> Tensor | None:
    """The output of a forward that calls functions of other extensions, which is run twice with the same random
    numbers. None if the two outputs differ by more than rounding, because a function keeps state that rewinder_of does
    not find, or writes to its inputs. At the end, also after an exception, the random states and the functions' state
    are as before, because the host runs after this."""
    rewind = rewinder_of_all(entry.key.device, functions)
    try:
        output = compute()
        rewind()
        again = compute()
    finally:
        rewind()
    limit = no_question(entry.key.dtype, entry.key.device, entry.key.precision)
    # Values that are not finite are found in the comparison with the host.
    return output if relative_error(again.nan_to_num(), output.nan_to_num()) <= limit else None


def rewinder_of_all(device: torch.device, functions: Iterable[Any] = ()) -> Callable[[], None]:
    """A function that can be called later to restore the random states of now: those of torch (CPU and device), Python
    and NumPy, and the state that rewinder_of finds in these functions of other extensions."""
    rewind_functions = rewinder_of(functions)
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    drawn = None if numpy is None else numpy.random.get_state()
    on_cpu = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def rewind() -> None:
        random.setstate(python)
        rewind_functions()
        if numpy is not None:
            numpy.random.set_state(drawn)
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)

    return rewind


def relative_error(output: Tensor, expected: Tensor) -> float:
    """||output - expected|| / ||expected|| of two tensors of one shape, in float32; NaN if either has NaN. If expected
    is 0 everywhere: 0 for an equal output, else huge or infinite. Waits for the device."""
    difference = (output.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(torch.finfo(torch.float32).tiny))


def rewinder_of(functions: Iterable[Any]) -> Callable[[], None]:
    """A function that can be called later to restore the state that functions of other extensions have now. The first
    use of a shape calls them more often than the host would; with their state restored, they draw random numbers and
    count as if they had been called once.

    The state consists of: random.Random objects in the globals of the functions' modules; bool, int and float
    attributes of the objects that objects_of finds from the functions, by the functions' packages; and, for a function
    that is a bound method, lists that are attributes of its object (ControlNet's reference mode records in such lists).
    """
    functions = list(functions)
    generators: dict[int, random.Random] = {}
    bound: dict[int, Any] = {}
    for one in functions:
        for value in getattr(underlying(one), "__globals__", {}).values():
            if isinstance(value, random.Random):
                generators[id(value)] = value
        if isinstance(one, types.MethodType):
            bound[id(one.__self__)] = one.__self__
    drawn = [(generator, generator.getstate()) for generator in generators.values()]
    # (attributes of an object, its counters), and (attributes of an object, name, the list, its members).
    counted: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for one in objects_of(functions, {package(origin(function)) for function in functions}):
        attributes = vars(one)
        counted.append((attributes, {name: value for name, value in attributes.items() if type(value) in COUNTERS}))
    recorded: list[tuple[dict[str, Any], str, list[Any], list[Any]]] = []
    for one in bound.values():
        attributes = getattr(one, "__dict__", {})
        for name, value in attributes.items():
            if type(value) is list:
                recorded.append((attributes, name, value, list(value)))

    def rewind() -> None:
        for generator, state in drawn:
            generator.setstate(state)
        for attributes, numbers in counted:
            attributes.update(numbers)
        for attributes, name, value, members in recorded:
            value[:] = members
            attributes[name] = value

    return rewind


def objects_of(functions: Iterable[Any], packages: set[str]) -> Iterator[Any]:
    """The objects that functions can reach whose classes belong to these packages (names of top-level modules) or to a
    script of the WebUI. Each is yielded once.

    Follows bound objects, closures, partials, attributes, lists and dictionaries. The search ends after MOST_OBJECTS
    objects.
    """
    waiting = deque(functions)
    seen = set[int]()
    are_theirs: dict[type, bool] = {}
    while waiting and len(seen) < MOST_OBJECTS:
        one = waiting.popleft()
        kind = type(one)
        if kind in HOLD_NOTHING or id(one) in seen:
            continue
        seen.add(id(one))
        if kind is types.MethodType:
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif kind is types.FunctionType:
            for cell in one.__closure__ or ():
                # An empty cell raises ValueError.
                with contextlib.suppress(ValueError):
                    waiting.append(cell.cell_contents)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, (list, tuple)):
            waiting += one
        else:
            if kind not in are_theirs:
                are_theirs[kind] = package(kind.__module__) in packages or kind.__module__.endswith(SCRIPT)
            if are_theirs[kind] and isinstance(getattr(one, "__dict__", None), dict):
                yield one
                waiting += vars(one).values()
