"""Compiled code as a file: the next process reads it in a twentieth of the time in which torch.compile would find it in
its caches, because nothing is traced. torch 2.8 and newer."""
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..requirements import release
from .regions import NeedsAnotherGraph
from .size_guard import SizeGuard

log = logging.getLogger("onediff")

OLDEST_TORCH = (2, 8)
CODE = ".code"
# How the names begin under which the store keeps digests of compiled code.
IN_STORE = "compiled code "
# Or kernels are compiled and tuned twice: the first call does it too.
OPTIONS = {"config_patches": {"triton.autotune_at_compile_time": False}}


@dataclass(frozen=True)
class Order:
    """How code is called with the tensors of a region.

    inputs: for each input of the code which tensor, and where it is a size, of which dimension (None: the tensor).
    outputs: where among the code's outputs the results are; a number where there is only one, and no tuple.
    guard: what the sizes have to fulfil, as torch's symbolic_shapes writes it (see size_guard); None: nothing.
    """

    inputs: list[tuple[int, int | None]]
    outputs: list[int] | int
    guard: str | None


class Artifact:
    """Code with the order in which it takes tensors. Raises ValueError for an order whose guard we cannot read.

    digest: that of the files where it is kept; None where it is not.
    """

    def __init__(self, code: Any, order: Order, digest: str | None = None) -> None:
        count = sum(dimension is not None for _, dimension in order.inputs)
        self._guard = None if order.guard is None else SizeGuard(order.guard, count)
        self._code = code
        self._order = order
        self.digest = digest
        self._served: set[tuple[int, ...]] = set()

    def __call__(self, *tensors: Tensor) -> Any:
        """Raises NeedsAnotherGraph."""
        given: list[Tensor | int] = []
        sizes: list[int] = []
        for place, dimension in self._order.inputs:
            if dimension is None:
                given.append(tensors[place])
            else:
                size = tensors[place].shape[dimension]
                given.append(size)
                sizes.append(size)
        if tuple(sizes) not in self._served:
            self._require(tuple(sizes))
        made, outputs = self._code(*given), self._order.outputs
        return made[outputs] if isinstance(outputs, int) else tuple(made[place] for place in outputs)

    def _require(self, sizes: tuple[int, ...]) -> None:
        if self._guard is not None and not self._guard.passes(sizes):
            raise NeedsAnotherGraph(f"{self._order.guard} with {sizes}")
        self._served.add(sizes)

    def write(self, path: Path) -> None:
        """Keep it on the disk, for read(path), if that is possible."""
        try:
            with at_once(Path(f"{path}{CODE}")) as unfinished:
                self._code.save(path=str(unfinished), format="binary")
                code = unfinished.read_bytes()
        except Exception as error:
            # Which torch raises, too, where it finds something in it that cannot be kept.
            log.debug("compiled code is not kept: %s", error, exc_info=True)
        else:
            order = json.dumps(asdict(self._order))
            self.digest = digest_of_bytes(order.encode(), code) if write(path, order) else None


def write(path: Path, text: str) -> bool:
    """A small file, whole or not at all: without it, what it tells is found out again. Whether it is there."""
    try:
        with at_once(path) as unfinished:
            unfinished.write_bytes(text.encode())
    except OSError as error:
        log.debug("what is in Inductor's caches cannot be noted: %s", error)
        return False
    return True


def digest_of(path: Path) -> str | None:
    """That of what is kept at a path, or None for nothing. Code of an older torch than OLDEST_TORCH lies elsewhere, in
    Inductor's own caches."""
    try:
        order, code = path.read_bytes(), Path(f"{path}{CODE}")
        return digest_of_bytes(order, code.read_bytes() if are_possible() else b"")
    except OSError:
        return None


def digest_of_bytes(order: bytes, code: bytes) -> str:
    return hashlib.sha256(hashlib.sha256(order).digest() + hashlib.sha256(code).digest()).hexdigest()


@contextlib.contextmanager
def at_once(path: Path) -> Iterator[Path]:
    """Another path to write to: the file is there when it is whole, for other processes too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def are_possible() -> bool:
    return release(torch.__version__)[:2] >= OLDEST_TORCH


def read(path: Path, digest: str | None) -> Artifact | None:
    """What was written there by the same version of torch for the same machine, or None. digest: that of the files, by
    somebody who knows; without it nothing is read, because it is run."""
    if digest is None:
        return None
    if digest_of(path) != digest:
        log.warning("%s is compiled anew: it is not what OneDiff has noted in its store.", path)
        return None
    try:
        order = Order(**json.loads(path.read_text()))
        from torch._inductor.standalone_compile import CompiledArtifact

        return Artifact(CompiledArtifact.load(path=f"{path}{CODE}", format="binary"), order, digest)
    except Exception as error:
        log.debug("no compiled code is read from %s: %s", path, error, exc_info=True)
        return None


def compiled(function: Callable[..., Any], inputs: list[Tensor], path: Path) -> Artifact:
    """A function compiled by Inductor, with the dimensions of any size that its inputs are marked with, and kept.

    All such dimensions have sizes of their own, except for those that are always equal. Raises what Inductor raises.
    """
    codes: list[Any] = []
    guards: list[str | None] = []
    passed: list[Any] = []
    made: list[Tensor] = []

    def backend(graph: Any, _: Any) -> Callable[..., Any]:
        from torch._inductor.standalone_compile import standalone_compile

        examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        tracing: Any = torch._guards.TracingContext.get().fake_mode
        code = standalone_compile(graph, examples, dynamic_shapes="from_graph", options=OPTIONS)
        codes.append(code)
        sizes = [one for one in examples if isinstance(one, torch.SymInt)]
        guards.append(tracing.shape_env.produce_guards_expression(sizes))

        def call(*given: Any) -> Any:
            passed[:] = given
            made[:] = code(*given)
            return made

        return call

    results = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*inputs)
    order = Order([place_of(one, inputs) for one in passed], places_of(results, made), guards[0])
    # torch may keep what has seen them.
    passed.clear()
    made.clear()
    artifact = Artifact(codes[0], order)
    artifact.write(path)
    return artifact


def place_of(given: Any, inputs: list[Tensor]) -> tuple[int, int | None]:
    """Where among the inputs this tensor is, or a dimension of this size that is marked to be of any size."""
    for place, tensor in enumerate(inputs):
        if isinstance(given, Tensor):
            if given is tensor:
                return place, None
            continue
        for dimension in sorted(getattr(tensor, "_dynamo_dynamic_indices", ())):
            if tensor.shape[dimension] == given:
                return place, dimension
    raise LookupError("torch gives code something that is no input")


def places_of(results: Any, made: list[Tensor]) -> list[int] | int:
    where = [next(place for place, one in enumerate(made) if one is result) for result in as_tuple(results)]
    return where if isinstance(results, tuple) else where[0]


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)
