"""Lets a WebUI on a CPU take the route of CUDA graphs: for tests/webui/test_sessions.py, or switched on before any
other test.

Link this folder into the WebUI's extensions folder beside OneDiff. POST /onediff-graphs/v1 {"on": true} switches it on,
{"on": false} off. GET returns how many UNet calls looked up their route; later calls of a sampling do not.

Everything but the recording is real. In place of a replay, the forward is computed anew from the graph's own inputs and
from the memory in which the weights lay when the graph was made. As with a graph, weights that were moved without
notice show in the image. Where functions of other extensions run within the UNet, the segments between them are really
recorded, and launched again.
"""
from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from fastapi import Body
from modules import script_callbacks
from torch import Tensor


class SharedMemory:
    """Stands for the memory that the graphs of one network share."""

    bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device


def replaying_graphs() -> Any:
    """A stand-in for CudaGraphs that computes in place of replaying."""
    from lib_onediff.core.inputs import bytes_of, copy_inputs
    from lib_onediff.devices.cuda.graphs.capture import CudaGraphs
    from lib_onediff.devices.cuda.graphs.segments import record
    from lib_onediff.families.registry import FAMILIES

    compute = FAMILIES.output

    class Replayed:
        def __init__(self, binding: Any, ops: Any, inputs: Any, memory: SharedMemory) -> None:
            self.inputs = inputs
            self.memory = memory
            self.own_bytes = bytes_of(inputs)
            self._layout = binding.layout
            self._ops = ops
            self._weights = at_their_addresses(binding.weights())

        def run(self, call: Any) -> Tensor:
            copy_inputs(call, self.inputs)
            return compute(self._layout, self._weights, self._ops, self.inputs)

    class Graphs(CudaGraphs):
        def prepare(self, architecture: str, binding: Any, ops: Any, inputs: Any, needs: int = 0) -> Any:
            place = (inputs.latent.device, architecture)
            memory = self._pools.get(place)
            if memory is None:
                memory = self._pools[place] = SharedMemory(inputs.latent.device)
                self._alive[memory] = None
            if inputs.patches is None:
                return Replayed(binding, ops, inputs, memory)
            weights = at_their_addresses(binding.weights())
            recording = tape().TapeRecording()
            return record(recording, inputs, memory, lambda call: compute(binding.layout, weights, ops, call))

        def peak(self, device: torch.device, work: Any) -> tuple[Any, int]:
            return work(), 0

    return Graphs(compute)


def tape() -> Any:
    """The module tests/unit/tape.py of the repository that this folder is linked from."""
    path = Path(__file__).resolve().parents[4] / "unit" / "tape.py"
    spec = importlib.util.spec_from_file_location("onediff_tape", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at_their_addresses(weights: Any) -> Any:
    """The weights at their current addresses, which is all that a graph knows of them. What the WebUI casts at each use
    is cast within the graph."""
    from lib_onediff.weights.operands import Operands

    # What the steps hold is written over in its place.
    return Operands({name: at_its_addresses(layer) for name, layer in weights.stored.items()}, weights.steps)


def at_its_addresses(layer: Any) -> Any:
    """A layer's tensors in their current memory, independent of where its parameters are moved later."""
    return type(layer)(*(part.detach() if isinstance(part, Tensor) else part for part in layer))


class Switch:
    """Whether the stand-in is used, and the functions that it has replaced."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []
        self.route_lookups = 0

    def turn(self, on: bool) -> None:
        """Switch the stand-in on or off. Releases all graphs."""
        from lib_onediff.core.refusal import Refusal
        from lib_onediff.runtime.backend_choice import BackendChoice
        from lib_onediff.runtime.runtime import runtime

        runtime.release_all()
        while self._undo:
            holder, name, before = self._undo.pop()
            setattr(holder, name, before)
        if not on:
            return
        def refuse(*args: Any) -> None:
            raise Refusal("there is no Triton here")

        begin = BackendChoice.begin
        native = runtime.devices.named("native")

        def counting(chain: Any, *args: Any) -> Any:
            self.route_lookups += 1
            return begin(chain, *args)

        self.put(BackendChoice, "begin", counting)
        self.put(runtime.devices.named("cudagraph"), "refuse", lambda *args: None)
        self.put(native, "refuse", refuse)
        self.put(runtime.services.holdings, "made", replaying_graphs())

    def put(self, holder: Any, name: str, value: Any) -> None:
        """Replace an attribute until the stand-in is switched off."""
        self._undo.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def state(self) -> dict[str, Any]:
        return {"on": bool(self._undo), "route_lookups": self.route_lookups}


def add_routes(demo: Any, app: Any) -> None:
    switch = Switch()

    @app.get("/onediff-graphs/v1")
    def state() -> dict[str, Any]:
        return switch.state()

    @app.post("/onediff-graphs/v1")
    def turn(on: bool = Body(..., embed=True)) -> dict[str, Any]:
        switch.turn(on)
        return switch.state()


script_callbacks.on_app_started(add_routes)
