"""Regions compiled by Inductor: each once, for images of every size, and never while an image waits."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from . import artifact
from .regions import NeedsAnotherGraph, Region, Shapes, function_of
from .traced import Traced


class CompiledRegion:
    """One region. refused: how many calls did not fit what was compiled, which ought to be none."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.refused = 0
        self._code: Callable[..., Any] | None = None

    @property
    def is_ready(self) -> bool:
        return self._code is not None

    def compile(self, shapes: Shapes, path: Path, digest: str | None = None) -> str | None:
        """Compile it, with inputs of these shapes in mind; what was compiled before, on this machine, is read.

        path: where this region is kept, and marked as compiled. digest: that of what may be read there; None: nothing
        may. Returns the digest of what is there now. Raises what Inductor raises.
        """
        inputs = [torch.zeros(shape, dtype=self.region.dtype, device=self.region.device) for shape in shapes]
        for tensor, free in zip(inputs, self.region.free, strict=True):
            for dimension in free:
                torch._dynamo.mark_dynamic(tensor, dimension)
        with one_process():
            code, kept = self._code_for(inputs, path, digest)
            # To load kernels is work too.
            code(*inputs)
        self._code = code
        return kept

    def _code_for(
        self, inputs: list[Tensor], path: Path, digest: str | None
    ) -> tuple[Callable[..., Any], str | None]:
        function = renamed(function_of(self.region), f"{self.region.kind} {self.region.digest[:6]}")
        if artifact.are_possible():
            code = artifact.read(path, digest) or artifact.compiled(function, inputs, path)
            return code, code.digest
        traced = Traced(function)
        traced.compile(inputs)
        return traced, artifact.digest_of(path) if artifact.write(path, "") else None

    def __call__(self, *tensors: Tensor) -> Any:
        """Raises NeedsAnotherGraph for tensors that what was compiled does not serve."""
        if self._code is None:
            self.refused += 1
            raise NeedsAnotherGraph(f"Inductor has not compiled this {self.region.kind}: it was not known to be needed")
        try:
            return self._code(*tensors)
        except NeedsAnotherGraph as guard:
            self.refused += 1
            raise NeedsAnotherGraph(
                f"Inductor would have to compile its {self.region.kind} anew, which an image does not wait for: "
                f"{guard}"
            ) from guard


def one_process() -> contextlib.AbstractContextManager[Any]:
    """Inductor's own pool of processes, as many as there are cores, would take them from the image."""
    from torch._inductor import config

    patched: contextlib.AbstractContextManager[Any] = config.patch(fx_graph_cache=True, compile_threads=1)
    return patched


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with code of its own: torch counts and limits what it compiles for each code object."""
    code = function.__code__.replace(co_name=name.replace(" ", "_").replace("'", ""))
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
