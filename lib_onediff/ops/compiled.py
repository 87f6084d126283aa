"""Regions compiled by Inductor: each once, for images of every size, and never while a picture waits."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .regions import Region, Shapes, function_of


class CompiledAnew(RuntimeError):
    """A call does not fit what was compiled; the message says which guard stands against it."""


class Compiler:
    """Inductor, which may compile in the threads that say so, and in no other."""

    def __init__(self) -> None:
        self._may = threading.local()

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Calls made inside compile what they need."""
        self._may.now = True
        try:
            yield
        finally:
            self._may.now = False

    def compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """A graph of torch.compile as code. Raises CompiledAnew outside at_work."""
        if not getattr(self._may, "now", False):
            raise CompiledAnew("a new size or a new form of the weights")
        from torch._functorch import config as autograd_config
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx

        # Its own pool of processes, as many as there are cores, would take them from the picture.
        with config.patch(fx_graph_cache=True, compile_threads=1), autograd_cache(autograd_config):
            return compile_fx(graph, inputs)


def autograd_cache(config: Any) -> contextlib.AbstractContextManager[Any]:
    """What torch derives from a graph before Inductor sees it, kept on the disk too, where torch can do that."""
    # torch 2.4 and 2.5 have it, and lose graphs of any size by it.
    if torch.__version__ < (2, 6) or not hasattr(config, "enable_autograd_cache"):
        return contextlib.nullcontext()
    return config.patch(enable_autograd_cache=True)


class CompiledRegion:
    """One region. graphs: how often it was compiled, which ought to be once."""

    def __init__(self, region: Region, compiler: Compiler) -> None:
        self.region = region
        self.graphs = 0
        self.is_ready = False
        self._compiler = compiler
        self._function: Callable[..., Any] | None = None

    def compile(self, shapes: Shapes) -> None:
        """Compile it, with inputs of these shapes in mind; what was compiled before, on this machine, is read.

        Raises what Inductor raises.
        """
        region = self.region
        if self._function is None:
            self._function = torch.compile(
                renamed(function_of(region), f"{region.kind} {region.digest[:6]}"),
                fullgraph=True, dynamic=False, backend=self._backend, **without_global_guards(),
            )
        inputs = [torch.zeros(shape, dtype=region.dtype, device=region.device) for shape in shapes]
        for tensor, free in zip(inputs, region.free, strict=True):
            for dimension in free:
                torch._dynamo.mark_dynamic(tensor, dimension)
        with self._compiler.at_work():
            self._function(*inputs)
        self.is_ready = True

    def _backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        code = self._compiler.compile(graph, inputs)
        self.graphs += 1
        return code

    def __call__(self, *tensors: Tensor) -> Any:
        """Raises CompiledAnew for tensors that what was compiled does not serve."""
        if self._function is None:
            raise CompiledAnew(f"Inductor has not compiled this {self.region.kind}: it was not known to be needed")
        try:
            return self._function(*tensors)
        except Exception as error:
            if not isinstance(error, CompiledAnew) and CompiledAnew.__name__ not in str(error):
                raise
        raise CompiledAnew(
            f"Inductor would have to compile its {self.region.kind} anew, which a picture does not wait for: "
            f"{self._why_anew(tensors)}"
        )

    def _why_anew(self, tensors: tuple[Tensor, ...]) -> str:
        """Which guard stands against a call with these."""
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                self._function(*tensors)
        except Exception as error:
            return guard_in(error)
        return "torch does not say why"


def said_by(error: Exception) -> str:
    """What an exception says, in one line, without what torch puts around it."""
    inner = getattr(error, "inner_exception", error)
    return (str(inner).strip().splitlines() or [type(inner).__name__])[0]


def guard_in(error: Exception) -> str:
    """The guard in torch's message on what it would compile anew."""
    failed = [line.strip() for line in str(error).splitlines() if line.strip().startswith("- ")]
    if not failed:
        return said_by(error)
    # What follows is a place in the source. Newer versions begin with a number of theirs.
    guard = failed[0][2:].split("  #")[0].strip()
    return guard.split(": ", 1)[1] if guard[:1].isdigit() and ": " in guard else guard


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with code of its own: torch counts and limits what it compiles for each code object."""
    code = function.__code__.replace(co_name=name.replace(" ", "_").replace("'", ""))
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)


def without_global_guards() -> dict[str, Any]:
    """Options by which torch does not compile anew when a switch of precision changes: what Inductor makes of our
    regions reads them when it runs. torch 2.8 and newer."""
    from torch._dynamo import hooks

    if "guard_filter_fn" not in getattr(hooks.Hooks, "__dataclass_fields__", {}):
        return {}
    keep = lambda guards: [guard.guard_type != "GLOBAL_STATE" for guard in guards]  # noqa: E731
    return {"options": {"guard_filter_fn": keep}}
