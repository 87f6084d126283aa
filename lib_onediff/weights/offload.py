"""Weights that lie in the computer's memory for the time being, and are back before anybody computes with them."""
from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .fused_storage import joined, move

log = logging.getLogger("onediff")
Hooked = list[tuple[weakref.ref[nn.Module], RemovableHandle]]
# What is pinned comes in powers of two: so little is lost.
CHUNK_BYTES = 1 << 28
ALIGNED_BYTES = 256
# What the rest of the computer is left with.
SPARE_BYTES = 1 << 30
# Once for every new shape that is checked, every LoRA and every image (--medvram) is no harm; at every step it is.
MANY_TIMES, SECONDS_OF_MANY = 8, 30.0


class NoHostMemory(Exception):
    """The computer's memory has no room, in one line for the user."""


class RestoreFirst:
    """A hook before the forward of an offloaded layer: the weights come back, to where the layer's input is.

    Not under the guard, which would run the host's layer in our place: without its weights that cannot compute. What
    fails in our bookkeeping is logged, and the layer's own weight is moved alone."""

    def __init__(self, weights: OffloadedWeights | None = None) -> None:
        self._weights = None if weights is None else weakref.ref(weights)

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        weights = None if self._weights is None else self._weights()
        if weights is not None:
            try:
                weights.restore_all()
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception:
                log.exception("offloaded weights did not come back together: they come layer by layer")
        # A copy of the layer is not among them.
        for parameter in layer.parameters(recurse=False):
            if inputs and isinstance(inputs[0], Tensor) and parameter.device != inputs[0].device:
                move_alone(parameter, inputs[0].device)

    def __reduce__(self) -> tuple[Any, ...]:
        return RestoreFirst, ()


class OffloadedWeights:
    """Of which layers the weights were moved to the computer's memory. The host's parameters are the same objects with
    the same values: who reads, edits or saves them finds them, and who calls such a layer has all of them back first.

    device: where the UNet was when they were moved. restore_all: called before such a layer computes; it has to end in
    restore. Without it, layers have their weights back one by one.
    """

    def __init__(self) -> None:
        self.restore_all: Callable[[], object] = lambda: None
        self.device = torch.device("cpu")
        # By path or name of fused layer.
        self._layers: dict[str, Hooked] = {}
        self._memory = HostMemory()
        self._restored: deque[float] = deque(maxlen=MANY_TIMES)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def names(self) -> list[str]:
        """Of the layers, by which they were moved."""
        return list(self._layers)

    @property
    def come_and_go(self) -> bool:
        """Whether they came back so often that moving them takes more time than it is worth."""
        return len(self._restored) == MANY_TIMES and time.monotonic() - self._restored[0] < SECONDS_OF_MANY

    @property
    def bytes(self) -> int:
        """Of the computer's memory."""
        return sum(weight.nbytes for weights in map(weights_of, list(self._layers.values())) for weight in weights)

    def offload(self, name: str, layers: list[nn.Module]) -> None:
        """Move the weights of these layers, which lie in one tensor; nothing where that was done. name: by which the
        layout knows them.

        Raises NoHostMemory; the weights are where they were then.
        """
        if name in self._layers:
            return
        weights: list[Any] = [layer._parameters["weight"] for layer in layers]
        if not self._layers:
            self.device = weights[0].device
        move(weights, lambda shape, dtype: self._memory.empty(shape, dtype, self.device.type == "cuda"))
        hook = RestoreFirst(self)
        self._layers[name] = [(weakref.ref(layer), layer.register_forward_pre_hook(hook)) for layer in layers]

    def restore(self, unet: nn.Module | None) -> None:
        """Move all back to where the UNet is now, with what others have put beside them meanwhile.

        Raises torch.cuda.OutOfMemoryError: what was not moved is still known here.
        """
        ours = {id(weight) for kept in self._layers.values() for weight in weights_of(kept)}
        parameters = () if unet is None else unet.parameters()
        device = next((one.device for one in parameters if id(one) not in ours), self.device)
        if device.type == "meta":
            # There is nothing that it could hold.
            device = self.device
        if self._layers:
            self._restored.append(time.monotonic())
        while self._layers:
            name, kept = next(iter(self._layers.items()))
            away = [weight for weight in weights_of(kept) if weight.device != device]
            if away and joined(away) is not None:
                move(away, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
            else:
                # Others have exchanged one of them.
                for weight in away:
                    move_alone(weight, device)
            for _, handle in kept:
                handle.remove()
            del self._layers[name]
        self._memory.forget()
        if unet is not None and device.type != "cpu":
            for tensor in itertools.chain(unet.parameters(), unet.buffers()):
                # A LoRA that was loaded meanwhile went to where its layer's weight was.
                if tensor.device.type == "cpu":
                    move_alone(tensor, device)


class HostMemory:
    """Pinned memory in large pieces, or ordinary memory where there is none that can be pinned."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, pinned: bool) -> Tensor:
        """Raises NoHostMemory."""
        size = aligned(torch.Size(shape).numel() * dtype.itemsize)
        try:
            if not pinned or size > CHUNK_BYTES:
                must_have_room(size)
                return torch.empty(shape, dtype=dtype)
            if self._chunk is None or self._used + size > len(self._chunk):
                must_have_room(CHUNK_BYTES)
                self._chunk, self._used = pinned_bytes(CHUNK_BYTES), 0
        except (RuntimeError, MemoryError) as full:
            said = str(full).partition("\n")[0]
            raise NoHostMemory(f"the computer's memory has no room for the weights: {said}") from None
        start, self._used = self._used, self._used + size
        # A tensor of the mode that is on now, inference or not, as whoever takes it for its own has to be.
        piece: Any = torch.empty(0, dtype=dtype)
        found: Tensor = piece.set_(self._chunk.untyped_storage(), start // dtype.itemsize, shape)
        return found

    def forget(self) -> None:
        """What comes next lies in a new piece: the last one goes with what is in it."""
        self._chunk, self._used = None, 0


def aligned(size: int) -> int:
    """Rounded up, so that any type can follow."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def pinned_bytes(size: int) -> Tensor:
    """Raises RuntimeError where there is no memory at all."""
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        # A system lets a process pin a part of the memory.
        return torch.empty(size, dtype=torch.uint8)


def empty_pinned_cache() -> None:
    """Give pinned memory that nobody uses back to the system, where this torch can."""
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None and torch.cuda.is_initialized():
        empty()


def restore_before(layer: nn.Module) -> None:
    """Somebody is about to change a layer's weights where they belong."""
    for hook in list(layer._forward_pre_hooks.values()):
        if isinstance(hook, RestoreFirst):
            hook(layer, ())


def must_have_room(size: int) -> None:
    """Raise MemoryError where the system says that so many bytes do not fit: Linux would end a process for it."""
    free = free_host_memory()
    if free is not None and free < size + SPARE_BYTES:
        # torch keeps what was pinned before.
        empty_pinned_cache()
        free = free_host_memory() or 0
        if free < size + SPARE_BYTES:
            raise MemoryError(f"{free >> 20} MiB are left")


def free_host_memory() -> int | None:
    """Bytes of the computer's memory that can be had without swapping; None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as told:
            fields = dict(line.split(":", 1) for line in told)
        return int(fields["MemAvailable"].split()[0]) << 10
    except (OSError, KeyError, ValueError, IndexError):
        return None


def move_alone(tensor: Tensor, device: torch.device) -> None:
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        tensor.data = tensor.detach().to(device)


def weights_of(kept: Hooked) -> list[Tensor]:
    """Of those layers that are still there."""
    layers = [layer for reference, _ in kept if (layer := reference()) is not None]
    return [weight for layer in layers if (weight := layer._parameters.get("weight")) is not None]
