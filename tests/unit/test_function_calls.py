"""Functions of other extensions within our forward: each is called once, draws the random numbers that it would draw in
the host's forward, and its exceptions are raised unchanged."""
from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, compute, our_output, relative_error, shared_ldm_unet
from ladder_builders import NATIVE, StandInOperators, attached, reason, served_by
from test_patch_points import PATCHES, Options, copied, merged, ours, unmerged
from test_segments import recorded
from torch import Tensor
from torch.nn import functional

from lib_onediff.core.points import DoesNotFit, ResumedPoints
from lib_onediff.devices.cuda.graphs import segments
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.families.unet.patch_points import INPUT, MIDDLE, PatchPoints
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
# The number of its calls in one UNet call: after each input stage, and after the middle block.
PLACES = 5
SEED = 7


class Extension:
    """An extension that adds noise to hidden states. number: how often it was called; restored if it must be called
    again. at: by number of the call, functions of the noisy hidden states, which return what the extension returns."""

    def __init__(self) -> None:
        self.number = 0
        # The contents of a dictionary are not restored.
        self._seen: dict[str, tuple[str, ...]] = {"": ()}
        self.at: dict[int, Callable[[Tensor], Tensor]] = {}

    @property
    def calls(self) -> int:
        """The number of calls, including those that were repeated."""
        return len(self._seen[""])

    def begin(self, at: dict[int, Callable[[Tensor], Tensor]]) -> None:
        self.number = 0
        self._seen[""] = ()
        self.at = at

    def __call__(self, part: str, hidden: Tensor) -> Tensor:
        does = self.at.get(self.number, lambda hidden: hidden)
        self.number += 1
        self._seen[""] += (part,)
        return does(hidden + 0.01 * torch.randn(hidden.shape) * random.random())


class Points(PatchPoints):
    structure = ("somebody",)

    def __init__(self, extension: Extension) -> None:
        self._extension = extension
        self.functions = [extension]

    def has_function(self, point: str, *arguments: Any) -> bool:
        return point == "after_stage" and arguments[0] in (INPUT, MIDDLE)

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        return self._extension(part, hidden_states) if part in (INPUT, MIDDLE) else hidden_states


class Scene:
    """A UNet with an extension. Arguments _0 to _4: Extension.at for the call with this number, within one UNet
    call."""

    def __init__(self) -> None:
        self.unet = attached(**SMALL_XL)
        self.call = a_call(self.unet)
        self.bound = runtime.services.networks.get(self.unet).bound
        self.host_runs = 0
        self.extension = Extension()

    def patched(self) -> UNetCall:
        return replace(self.call, patches=Points(self.extension))

    def host(self) -> Tensor:
        self.host_runs += 1
        return compute(self.bound.layout, self.bound.binding.weights(), torch_ops, self.patched())

    def begin(self, **at: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(SEED)
        random.seed(SEED)
        self.host_runs = 0
        self.extension.begin({int(number[1:]): does for number, does in at.items()})

    @torch.no_grad()
    def ours(self) -> Tensor:
        return runtime.run(self.unet, self.patched(), self.host)

    @torch.no_grad()
    def expected(self, **at: Callable[[Tensor], Tensor]) -> tuple[Tensor, tuple[float, float]]:
        """The host's own output, and the random numbers that follow it."""
        self.begin(**at)
        return self.host(), numbers()


def numbers() -> tuple[float, float]:
    return float(torch.rand(())), random.random()


def shrunk(hidden: Tensor) -> Tensor:
    """As Kohya's HRFix: another size from some step on."""
    return functional.interpolate(hidden, scale_factor=0.5)


@pytest.fixture
def tracebacks(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """A function that returns the number of tracebacks in the log."""
    return lambda: sum(record.exc_info is not None for record in caplog.records if record.levelno >= logging.WARNING)


@pytest.fixture
def scene(pretended: Any) -> Scene:
    """A scene whose next call is served by graphs."""
    made = Scene()
    with torch.no_grad():
        runtime.run(made.unet, made.call, lambda: our_output(made.unet, made.call))
    for route in ("plain", "plain", "graph"):
        made.begin()
        made.ours()
        assert served_by() == (NATIVE, route), reason()
    return made


@pytest.mark.parametrize("number", range(PLACES))
@pytest.mark.parametrize("most_kept", [segments.MOST_KEPT, 0])
def test_after_an_unexpected_shape_inside_a_replay_output_and_random_numbers_are_the_same(
    scene: Scene, number: int, most_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the host's forward. In call `number`, the extension returns another shape than at the capture.
    The replay ends there, and our forward computes the rest with the results of earlier functions. most_kept: the bytes
    of results that may be kept; with 0, the functions are called again, with the same random numbers."""
    monkeypatch.setattr(segments, "MOST_KEPT", most_kept)
    # A capture calls them again.
    monkeypatch.setattr(runtime.services.graphs, "capture", lambda *given: 0)
    changes = {f"_{number}": shrunk}
    expected, then = scene.expected(**changes)
    scene.begin(**changes)
    output = scene.ours()
    assert served_by() == (NATIVE, "plain") and entry_of_patched().misfits == 1 and scene.host_runs == 0
    assert relative_error(output, expected) < CLOSE and numbers() == then
    if most_kept:
        assert scene.extension.calls == PLACES


def test_after_an_unexpected_shape_the_call_is_captured_anew_and_replayed(scene: Scene) -> None:
    """In three calls of the UNet, the last function halves the size. The first call is computed without a graph and
    captured; the others are replayed. The reference is the host's forward."""
    for route in ("plain", "graph", "graph"):
        expected, then = scene.expected(_4=shrunk)
        scene.begin(_4=shrunk)
        assert relative_error(scene.ours(), expected) < CLOSE and numbers() == then and served_by() == (NATIVE, route)
        # The first call is captured too, for which the functions are restored and called again.
        assert scene.extension.calls == PLACES or route == "plain"


def test_results_of_functions_are_copied_before_a_function_overwrites_them(scene: Scene) -> None:
    """The function returns the same buffer wherever the shape is the same. Its last result has an unexpected shape, so
    that our forward needs the earlier results. The reference is a function that returns new tensors."""
    kept: dict[torch.Size, Tensor] = {}

    def reused(hidden: Tensor) -> Tensor:
        return kept.setdefault(hidden.shape, torch.empty_like(hidden)).copy_(hidden)

    changes = {**{f"_{number}": reused for number in range(PLACES)}, "_4": shrunk}
    plain = {name: (lambda hidden: hidden) for name in changes} | {"_4": shrunk}
    expected, _ = scene.expected(**plain)
    scene.begin(**changes)
    assert relative_error(scene.ours(), expected) < CLOSE and entry_of_patched().misfits == 1


def test_values_passed_between_functions_survive_an_unexpected_shape() -> None:
    """In Forge, each block has a dictionary of options, which one patch may write and the next one read. A patch
    returns an unexpected shape, and the replay ends with DoesNotFit. Our forward resumes with the values written until
    then."""
    unet = shared_ldm_unet()
    options = {PATCHES: {"attn1_patch": [merged], "attn1_output_patch": [unmerged]}}

    def longer(tokens: Tensor, extra: Options) -> Tensor:
        assert extra["kept"]
        tokens = unmerged(tokens, extra) * (1 + extra["transformer_index"] / 10)
        return tokens[:1] if extra["block"][0] == "middle" else tokens

    with torch.no_grad():
        call = a_call(unet)
        runner, _ = recorded(unet, ours(unet, call, copied(options)))
        other = {PATCHES: {"attn1_patch": [merged], "attn1_output_patch": [longer]}}
        made = ours(unet, call, copied(other))
        with pytest.raises(DoesNotFit) as misfit:
            runner.run(made)
        resumed = replace(made, patches=ResumedPoints(made.patches, misfit.value.passed))
        expected = our_output(unet, ours(unet, call, copied(other)))
        assert relative_error(our_output(unet, resumed), expected) < CLOSE


def entry_of_patched() -> Any:
    [entry] = [one for one in runtime.table.entries() if one.key.backend == NATIVE and one.key.patches]
    return entry


# --- exceptions -------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """The exception with which WebUIs interrupt an image."""


def raising(*errors: BaseException) -> Callable[[Tensor], Tensor]:
    """A function that raises each of these errors once, the last one first."""
    waiting = list(errors)

    def fails(hidden: Tensor) -> Tensor:
        if waiting:
            raise waiting.pop()
        return hidden

    return fails


@pytest.mark.parametrize("error", [ValueError("the extension's own"), Interrupted(), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("replays", [True, False])
def test_an_exception_of_a_function_is_raised_unchanged(
    scene: Scene, error: BaseException, replays: bool, tracebacks: Callable[[], int]
) -> None:
    """The caller gets the exception object that the extension raised. Nothing is computed again, and the next call is
    not affected. replays: whether graphs are replayed around the function, or our forward runs without graphs."""
    if not replays:
        runtime.release_memory()
    scene.begin(_2=raising(error))
    with pytest.raises(type(error)) as raised:
        scene.ours()
    assert raised.value is error and scene.extension.calls == 3 and scene.host_runs == 0
    assert [frame.name for frame in raised.traceback][-2:] == ["__call__", "fails"]
    assert runtime.guard.faults == [] and tracebacks() == 0 and not runtime.services.is_between_graphs
    assert entry_of_patched().state.value != "failed"
    expected, then = scene.expected()
    scene.begin()
    assert relative_error(scene.ours(), expected) < CLOSE and numbers() == then
    assert served_by() == (NATIVE, "graph" if replays else "plain")


def test_after_out_of_memory_in_a_function_the_host_computes_with_the_same_random_numbers(scene: Scene) -> None:
    """The host computes the call again. The functions must draw the numbers that they would have drawn without
    OneDiff."""
    expected, then = scene.expected()
    scene.begin(_3=raising(torch.cuda.OutOfMemoryError("CUDA out of memory")))
    # The host's own forward has enough memory.
    output = scene.ours()
    assert served_by()[1] == "host" and scene.host_runs == 1
    assert relative_error(output, expected) < CLOSE and numbers() == then


def test_after_a_failed_kernel_the_next_backend_computes_with_the_same_random_numbers(
    scene: Scene, native_operators: StandInOperators
) -> None:
    """A kernel of the native backend fails after some functions have run. The next backend calls them again, and they
    draw the same numbers as in the first attempt."""
    runtime.release_memory()
    expected, then = scene.expected()
    scene.begin()
    native_operators.fail_with(RuntimeError("CUDA error"))
    output = scene.ours()
    assert served_by()[0] == "cudagraph" and entry_of_patched().state.value == "failed"
    assert relative_error(output, expected) < CLOSE and numbers() == then


def test_a_call_whose_functions_fail_only_in_our_forward_is_left_to_the_host(pretended: Any) -> None:
    """The functions raise until the host's forward runs. Output and random numbers are those of the host's forward
    without OneDiff."""
    scene = Scene()
    with torch.no_grad():
        runtime.run(scene.unet, scene.call, lambda: our_output(scene.unet, scene.call))

    def fails_before_the_host_runs(hidden: Tensor) -> Tensor:
        if not scene.host_runs:
            raise AttributeError("no such thing")
        return hidden

    expected, then = scene.expected()
    scene.begin(**{f"_{number}": fails_before_the_host_runs for number in range(99)})
    output = scene.ours()
    assert relative_error(output, expected) < CLOSE and numbers() == then and scene.host_runs == 1
    assert served_by()[1] == "host" and "failed inside of OneDiff's UNet: no such thing (somebody)" in reason()


def test_a_function_that_fails_in_a_capture_costs_only_the_graph(pretended: Any) -> None:
    """A capture calls the functions again after the call was computed, and one of them raises. Output and random
    numbers are those of the computed call."""
    scene = Scene()
    with torch.no_grad():
        runtime.run(scene.unet, scene.call, lambda: our_output(scene.unet, scene.call))
    scene.begin()
    scene.ours()
    expected, then = scene.expected()

    def fails_once_it_is_answered(hidden: Tensor) -> Tensor:
        if scene.extension.calls > PLACES:
            raise ValueError("again")
        return hidden

    scene.begin(_2=fails_once_it_is_answered)
    output = scene.ours()
    assert relative_error(output, expected) < CLOSE and numbers() == then and scene.host_runs == 0
    assert "the graph could not be captured: again" in entry_of_patched().no_graph
    assert not runtime.services.is_between_graphs
