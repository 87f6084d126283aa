"""A forward as CUDA graphs: one of all of it, or of what lies between the functions of other extensions in it.

With functions, it is recorded while it is computed: where one is called, the recording ends, what was recorded is
replayed, and the function is called with its result; what it returns is copied to where the next recording reads it. A
replay does the same with the functions and options of its own call. The parts lie over each other in the graphs' memory
like those of one graph, so only addresses are kept of what passes between them, and functions get copies: they may keep
them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partialmethod
from inspect import isfunction
from typing import Any

from torch import Tensor

from ....core.call import Call, PatchPoints
from .inputs import bytes_of, copy_inputs
from .recording import Address, GraphRecording

# Where the host's options are told of the place, whether anything stands there or not.
NOTED = ("before_stage", "join", "begin_block", "end_transformer")


class DoesNotFit(Exception):
    """Functions stand elsewhere than when the graphs were recorded, or return something of another shape."""


# Does a part again, with the functions of a call.
Step = Callable[[Any], object]


@dataclass(frozen=True)
class Function:
    """A point where functions stand. arguments: views in the place of tensors. results: where the next part reads what
    they return."""

    name: str
    arguments: tuple[Any, ...]
    results: tuple[Address, ...]

    def __call__(self, patches: PatchPoints) -> None:
        returned = tensors_of(getattr(patches, self.name)(*map(fresh, self.arguments)))
        results = [view.tensor for view in self.results]
        if list(map(form, returned)) != list(map(form, results)):
            raise DoesNotFit(f"a function of another extension returned another shape than before ({self.name})")
        for result, given in zip(results, returned, strict=True):
            result.copy_(given)


def replaying(replay: Callable[[], None]) -> Step:
    """What was recorded between two functions."""
    return lambda patches: replay()


def noting(name: str, arguments: tuple[Any, ...]) -> Step:
    """A point where nothing stands; the host's options are told of the place. Nobody reads the tensors."""
    places = tuple(None if isinstance(one, Tensor) else one for one in arguments)
    return lambda patches: getattr(patches, name)(*places)


class RecordedPoints(PatchPoints):
    """The points of a call whose forward is being recorded. steps: what was done so far."""

    def __init__(self, patches: PatchPoints, recording: GraphRecording) -> None:
        self._patches, self._recording = patches, recording
        self.structure, self.places = patches.structure, patches.places
        self.sees_stages = patches.sees_stages
        self.norm = None if patches.norm is None else lambda path, given: self._at("norm", path, given)
        self.steps: list[Step] = []

    def begin(self, latent: Tensor) -> None:
        self._patches.begin(latent)

    def _at(self, name: str, *arguments: Any) -> Any:
        patches, recording = self._patches, self._recording
        if not patches.stands(name, *arguments):
            if name in NOTED:
                self.steps.append(noting(name, arguments))
            return getattr(patches, name)(*arguments)
        self.steps.append(replaying(recording.end()))
        views = tuple(recording.view(one) if isinstance(one, Tensor) else one for one in arguments)
        returned = getattr(patches, name)(*(one.clone() if isinstance(one, Tensor) else one for one in arguments))
        results = recording.begin(tensors_of(returned))
        self.steps.append(Function(name, views, tuple(map(recording.view, results))))
        return tuple(results) if isinstance(returned, (tuple, list)) else results[0]


# Every point is recorded in the same way.
for _name, _point in vars(PatchPoints).items():
    if isfunction(_point) and _name not in ("stands", "functions", "begin"):
        setattr(RecordedPoints, _name, partialmethod(RecordedPoints._at, _name))


@dataclass
class GraphRunner:
    """core.device.Runner by the graphs of a forward's parts. output: (batch, out channels, height, width), where the
    last part writes it. places: see PatchPoints; None where no functions run within it. memory: the pool that the
    graphs were captured in."""

    steps: list[Step]
    output: Tensor
    places: object
    inputs: Call
    memory: Any
    own_bytes: int

    def run(self, call: Call) -> Tensor:
        """The output for a call, as a new tensor. Raises DoesNotFit, before any function was called where they stand at
        other places."""
        patches = call.patches
        if (None if patches is None else patches.places) != self.places:
            raise DoesNotFit("functions stand at other places than before")
        copy_inputs(call, self.inputs)
        if patches is not None:
            patches.begin(call.latent)
        for step in self.steps:
            step(patches)
        return self.output.clone()


def record(
    recording: GraphRecording, inputs: Call, memory: Any, compute: Callable[[Call], Tensor]
) -> GraphRunner:
    """Record a forward of inputs that are the graphs' own; with functions within it, it is computed too, and they are
    called. compute: the forward. memory: see GraphRunner."""
    # Whose functions they were must not be kept.
    patches, own, places = inputs.patches, replace(inputs, patches=None), None
    recording.begin()
    if patches is None:
        output = compute(own)
        steps = [replaying(recording.stop().replay)]
    else:
        points, places = RecordedPoints(patches, recording), patches.places
        output = compute(replace(inputs, patches=points))
        steps = [*points.steps, replaying(recording.end())]
    return GraphRunner(steps, output, places, own, memory, bytes_of(own))


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def form(tensor: Any) -> tuple[Any, ...]:
    if not isinstance(tensor, Tensor):
        raise DoesNotFit(f"a function returned {type(tensor).__name__}")
    return tuple(tensor.shape), tensor.dtype, tensor.device


def fresh(argument: Any) -> Any:
    """A function may keep what it is given, and write to it."""
    return argument.tensor.clone() if hasattr(argument, "tensor") else argument
