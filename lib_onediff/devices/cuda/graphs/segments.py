"""A forward within which functions of other extensions run: CUDA graphs of what lies between them.

It is recorded while it is computed: where a function is called, the recording ends, what was recorded is replayed, and
the function is called with its result; what it returns is copied to where the next recording reads it. A replay does
the same with the functions and options of its own call. The parts lie over each other in the graphs' memory like those
of one graph, so only addresses are kept of what passes between them, and functions get copies: they may keep them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ....core.call import UNetCall
from ....core.leaves import TransformerBlock
from ....core.patch_points import Block, PatchPoints
from .inputs import copy_inputs

INTEGERS = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8"}


class DoesNotFit(Exception):
    """Functions stand elsewhere than when the graphs were recorded, or return something of another shape."""


class View(Protocol):
    """A tensor's memory, which this does not keep alive."""

    @property
    def tensor(self) -> Tensor: ...


class Recording(Protocol):
    """Records what is launched, in parts."""

    def begin(self, given: Iterable[Tensor] = ()) -> list[Tensor]:
        """Record from now on. Returns tensors of the graphs' memory, which hold what is given when this part is
        replayed."""

    def end(self) -> Callable[[], None]:
        """What replays the part; it has replayed once already."""

    def view(self, tensor: Tensor) -> View:
        """The memory of a tensor that the recording knows."""


class Step(Protocol):
    def run(self, patches: PatchPoints) -> None:
        """Do it again, with the functions of a call."""


@dataclass(frozen=True)
class Replay:
    """What was recorded between two functions."""

    replay: Callable[[], None]

    def run(self, patches: PatchPoints) -> None:
        self.replay()


@dataclass(frozen=True)
class Note:
    """A point where nothing stands; the host's options are told of the place. arguments: without the tensors, which
    nobody reads."""

    name: str
    arguments: tuple[Any, ...]

    def run(self, patches: PatchPoints) -> None:
        getattr(patches, self.name)(*self.arguments)


@dataclass(frozen=True)
class Function:
    """A point where functions stand. arguments: views in the place of tensors. results: where the next part reads what
    they return."""

    name: str
    arguments: tuple[Any, ...]
    results: tuple[View, ...]

    def run(self, patches: PatchPoints) -> None:
        returned = tensors_of(getattr(patches, self.name)(*map(fresh, self.arguments)))
        results = [view.tensor for view in self.results]
        if list(map(form, returned)) != list(map(form, results)):
            raise DoesNotFit(f"a function of another extension returned another shape than before ({self.name})")
        for result, given in zip(results, returned, strict=True):
            result.copy_(given)


class RecordedPoints(PatchPoints):
    """The points of a call whose forward is being recorded. steps: what was done so far."""

    def __init__(self, patches: PatchPoints, recording: Recording) -> None:
        self._patches, self._recording = patches, recording
        self.structure, self.places = patches.structure, patches.places
        self.sees_stages = patches.sees_stages
        self.norm = None if patches.norm is None else lambda path, given: self._at("norm", path, given)
        self.steps: list[Step] = []

    def _at(self, name: str, *arguments: Any) -> Any:
        patches, recording = self._patches, self._recording
        if not patches.stands(name, *arguments):
            return getattr(patches, name)(*arguments)
        self.steps.append(Replay(recording.end()))
        views = tuple(recording.view(one) if isinstance(one, Tensor) else one for one in arguments)
        returned = getattr(patches, name)(*(one.clone() if isinstance(one, Tensor) else one for one in arguments))
        results = recording.begin(tensors_of(returned))
        self.steps.append(Function(name, views, tuple(map(recording.view, results))))
        return tuple(results) if isinstance(returned, (tuple, list)) else results[0]

    def _noted(self, name: str, *arguments: Any) -> Any:
        """As _at, at a point where the host's options are told of the place."""
        steps = len(self.steps)
        result = self._at(name, *arguments)
        if len(self.steps) == steps:
            self.steps.append(Note(name, tuple(None if isinstance(one, Tensor) else one for one in arguments)))
        return result

    def begin(self, latent: Tensor) -> None:
        self._patches.begin(latent)

    def embedding(self, embedding: Tensor) -> Tensor:
        return self._at("embedding", embedding)

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        return self._noted("before_stage", part, index, hidden_states)

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        return self._at("after_stage", part, index, hidden_states)

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        return self._at("after_skip", index, hidden_states)

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self._noted("join", index, hidden_states, skip)

    def concatenate(self, index: int, hidden_states: Tensor, skip: Tensor) -> Tensor | None:
        return self._at("concatenate", index, hidden_states, skip)

    def begin_block(self, place: Block, block: TransformerBlock) -> bool:
        return self._noted("begin_block", place, block)

    def end_transformer(self) -> None:
        self._noted("end_transformer")

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        return self._at("whole_block", block, tokens, context)

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._at("self_attention_inputs", normed)

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._at("cross_attention_inputs", normed, context)

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        return self._at("whole_attention", attention, block, normed, context)

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        return self._at("attend", attention, query, key, value)

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        return self._at("attention_output", attention, tokens)

    def between_attentions(self, tokens: Tensor) -> Tensor:
        return self._at("between_attentions", tokens)


@dataclass
class Segments:
    """The parts of a forward. output: (batch, out channels, height, width), where the last part writes it. places: see
    PatchPoints."""

    steps: list[Step]
    output: Tensor
    places: object

    def run(self, call: UNetCall, inputs: UNetCall) -> Tensor:
        """The output for a call, as a new tensor. inputs: the graphs' own. Raises DoesNotFit, before any function was
        called where they stand at other places."""
        patches = call.patches
        if patches is None or patches.places != self.places:
            raise DoesNotFit("functions stand at other places than before")
        copy_inputs(call, inputs)
        patches.begin(call.latent)
        for step in self.steps:
            step.run(patches)
        return self.output.clone()


def record(
    recording: Recording, patches: PatchPoints, compute: Callable[[PatchPoints], Tensor]
) -> Segments:
    """Compute a forward and record it. compute: the forward with the points that it is given."""
    points = RecordedPoints(patches, recording)
    recording.begin()
    output = compute(points)
    points.steps.append(Replay(recording.end()))
    return Segments(points.steps, output, patches.places)


def tensors_of(returned: Any) -> tuple[Tensor, ...]:
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def form(tensor: Any) -> tuple[Any, ...]:
    if not isinstance(tensor, Tensor):
        raise DoesNotFit(f"a function returned {type(tensor).__name__}")
    return tuple(tensor.shape), tensor.dtype, tensor.device


def fresh(argument: Any) -> Any:
    """A function may keep what it is given, and write to it."""
    return argument.tensor.clone() if hasattr(argument, "tensor") else argument


class Address:
    """The memory of a tensor on a GPU, by its address alone."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self._dtype, self._device = tensor.dtype, tensor.device
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape), "strides": tuple(size * stride for stride in tensor.stride()),
            "typestr": INTEGERS[size], "data": (tensor.data_ptr(), False), "version": 3, "stream": None,
        }

    @cached_property
    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device).view(self._dtype)


class GraphRecording:
    """Records CUDA graphs on a stream into a pool. What is between them runs on the stream that is current when this is
    made."""

    def __init__(self, pool: Any, stream: torch.cuda.Stream, piece: int) -> None:
        """piece: bytes that the pool gets in one piece before."""
        self._pool, self._stream, self._piece = pool, stream, piece
        self._host = torch.cuda.current_stream(stream.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []

    def begin(self, given: Iterable[Tensor] = ()) -> list[Tensor]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_stream(self._stream)
        # thread_local: other threads of the WebUI may use the GPU meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph
        if self._piece:
            torch.empty(self._piece, dtype=torch.uint8, device=self._stream.device)
            self._piece = 0
        self._copies = [(torch.empty_like(one), one) for one in given]
        return [inside for inside, _ in self._copies]

    def end(self) -> Callable[[], None]:
        graph = self.stop()
        if graph is None:
            raise RuntimeError("nothing is being recorded")
        for inside, given in self._copies:
            inside.copy_(given)
        self._copies = []
        graph.replay()
        return graph.replay

    def stop(self) -> torch.cuda.CUDAGraph | None:
        """End the recording, if there is one, and launch where the host does again."""
        graph, self._graph = self._graph, None
        try:
            if graph is not None:
                graph.capture_end()
        finally:
            torch.cuda.set_stream(self._host)
        return graph

    def view(self, tensor: Tensor) -> View:
        return Address(tensor)
