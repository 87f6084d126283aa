"""CUDA graphs without a GPU: launches are recorded, and a replay launches them again into the same memory.

This module has no other imports of the tests, because tests/webui/extensions/onediff-graphs loads it inside of a WebUI.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Tape(TorchDispatchMode):
    """Records the calls of torch's operators. replay() repeats them, and copies each output into the memory of the
    recorded one."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.launches.append((function, args, kwargs or {}, output))
        return output

    def replay(self) -> None:
        for function, args, kwargs, output in self.launches:
            again = function(*args, **kwargs)
            for before, now in zip(tree_flatten(output)[0], tree_flatten(again)[0], strict=True):
                if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
                    before.copy_(now)


class TapeRecording:
    """A GraphRecording (devices/cuda/graphs/segments.py) without a GPU. parts: the number of segments so far."""

    def __init__(self) -> None:
        self.parts = 0
        self._tape: Tape | None = None

    def begin(self, given: Iterable[Tensor] = ()) -> list[Tensor]:
        inside = [one.clone() for one in given]
        self._tape = Tape()
        self._tape.__enter__()
        return inside

    def end(self) -> Callable[[], None]:
        tape = self._tape
        self._tape = None
        assert tape is not None
        tape.__exit__(None, None, None)
        self.parts += 1
        return tape.replay

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.detach()
