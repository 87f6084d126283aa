"""How precisely torch computes in our calls: what the user has chosen is set around them, and what was found put back.

torch keeps these switches for the whole process, and not every torch has every one of them. A shape's key holds those
that matter to it, as they were when its graph was captured: a replay computes as its capture did.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

HALF = "half"
# Switches as a shape's key names them.
HALF_SUMS = "float16 sums in matmul"
FP16_REDUCTION = "reduced float16 reduction"
BF16_REDUCTION = "reduced bfloat16 reduction"
TF32_MATMUL = "TF32 in matmul"
TF32_CONVOLUTION = "TF32 in convolutions"
# How far sums of some thousand products in float16 lie from exact ones, relative to the output's norm.
ROUNDING_HALF_SUMS = 6e-2

# (switch, whether it is on) pairs.
Flags = tuple[tuple[str, bool], ...]

# Two threads that set and put back the same switches must not overlap: the one that ends last would put back what the
# other had set.
_TURN = threading.RLock()


def wanted(settings: Any, switch: str) -> bool | None:
    """How a switch is to stand; None: as it is found."""
    is_half: bool = settings.accumulation == HALF
    if switch == HALF_SUMS:
        return is_half
    return True if is_half and switch in (TF32_MATMUL, TF32_CONVOLUTION) else None


def switch_of(owner: Any, attribute: str) -> Any:
    """What a switch of torch.backends says; None where this torch has none of that name."""
    try:
        return getattr(owner, attribute)
    except (AttributeError, AssertionError):
        # torch 2.1 says AssertionError for a name that it does not know.
        return None


@dataclass(frozen=True)
class MatmulSwitch:
    """An attribute of torch.backends.cuda.matmul."""

    attribute: str

    def read(self) -> bool | None:
        """Whether it is on; None where this torch has no such switch."""
        found: bool | None = switch_of(torch.backends.cuda.matmul, self.attribute)
        return found

    def write(self, value: bool | None) -> None:
        setattr(torch.backends.cuda.matmul, self.attribute, value)

    # The interface of Tf32Switch: restore() puts back what state() has returned.
    state = read
    restore = write


@dataclass(frozen=True)
class Tf32Switch:
    """TF32 of matrix products or of convolutions.

    torch 2.9 and newer have it twice, as allow_tf32 and as fp32_precision; while the two say different things, whoever
    reads the first gets a RuntimeError. So the first is used where it can be read, and the second where it cannot.
    """

    convolutions: bool

    def _owners(self) -> tuple[Any, Any]:
        """Who has allow_tf32, and who has fp32_precision (None where nobody has)."""
        if not self.convolutions:
            matmul = torch.backends.cuda.matmul
            return matmul, None if switch_of(matmul, "fp32_precision") is None else matmul
        newer = switch_of(torch.backends.cudnn, "conv")
        return torch.backends.cudnn, None if switch_of(newer, "fp32_precision") is None else newer

    def state(self) -> tuple[bool | None, str | None]:
        """What restore() takes: allow_tf32 where it can be read, and fp32_precision where there is one."""
        older, newer = self._owners()
        try:
            allowed = switch_of(older, "allow_tf32")
        except RuntimeError:
            allowed = None
        return allowed, None if newer is None else newer.fp32_precision

    def read(self) -> bool | None:
        """Whether it is on; None where this torch has no such switch."""
        allowed, precision = self.state()
        return allowed if precision is None else precision == "tf32"

    def write(self, value: bool) -> None:
        older, newer = self._owners()
        if self.state()[0] is not None:
            older.allow_tf32 = value
        elif newer is not None:
            newer.fp32_precision = "tf32" if value else "ieee"

    def restore(self, state: tuple[bool | None, str | None]) -> None:
        allowed, precision = state
        older, newer = self._owners()
        if allowed is not None:
            older.allow_tf32 = allowed
        if newer is None or newer.fp32_precision == precision:
            return
        # It may have been "none", which takes a wider setting's value, and torch reads that value then. So "none" is
        # tried first, and the value itself only if it reads otherwise.
        newer.fp32_precision = "none"
        if newer.fp32_precision != precision:
            newer.fp32_precision = precision


SWITCHES: Mapping[str, MatmulSwitch | Tf32Switch] = {
    HALF_SUMS: MatmulSwitch("allow_fp16_accumulation"),
    FP16_REDUCTION: MatmulSwitch("allow_fp16_reduced_precision_reduction"),
    BF16_REDUCTION: MatmulSwitch("allow_bf16_reduced_precision_reduction"),
    TF32_MATMUL: Tf32Switch(convolutions=False),
    TF32_CONVOLUTION: Tf32Switch(convolutions=True),
}
OF_DTYPE: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.float16: (HALF_SUMS, FP16_REDUCTION),
    torch.bfloat16: (BF16_REDUCTION,),
    torch.float32: (TF32_MATMUL, TF32_CONVOLUTION),
}


def flags_for(settings: Any, dtype: torch.dtype, device: torch.device, upcast_attention: bool = False) -> Flags:
    """The switches that matter to a network of this dtype, as settings want them and this torch has them.

    settings: settings.Settings. upcast_attention: attention is computed in float32. To be asked while the host's own
    switches stand. Empty but on a GPU.
    """
    if device.type != "cuda":
        return ()
    names = OF_DTYPE.get(dtype, ())
    if upcast_attention and TF32_MATMUL not in names:
        names = (*names, TF32_MATMUL)
    flags = []
    with _TURN:
        for name in names:
            found = SWITCHES[name].read()
            chosen = wanted(settings, name)
            if found is not None:
                flags.append((name, found if chosen is None else chosen))
    return tuple(flags)


@contextlib.contextmanager
def applied(flags: Flags) -> Iterator[None]:
    """The switches stand like this inside; afterwards, and after an exception, exactly as they were found.

    Nothing is written where they stand so already.
    """
    if not flags:
        yield
        return
    found: list[tuple[MatmulSwitch | Tf32Switch, Any]] = []
    with _TURN:
        try:
            for name, value in flags:
                switch = SWITCHES[name]
                if switch.read() not in (value, None):
                    found.append((switch, switch.state()))
                    switch.write(value)
            yield
        finally:
            for switch, state in reversed(found):
                switch.restore(state)


def tf32_is_on() -> bool:
    """Whether torch may use TF32 anywhere, read so that it never raises; allow_tf32 itself does from torch 2.9 on,
    where somebody has used fp32_precision."""
    return any(SWITCHES[name].read() for name in (TF32_MATMUL, TF32_CONVOLUTION))


# Older torch raises when asked for autocast on another kind of device, such as mps.
AUTOCAST_DEVICES = ("cuda", "cpu")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What torch.autocast casts to on this kind of device now; None where it is off."""
    if device_type not in AUTOCAST_DEVICES:
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


# Asked at every call, so torch's own function where that takes the kind of device (torch 2.4 and newer).
is_autocast_on: Callable[[str], bool] = (
    torch.is_autocast_enabled if hasattr(torch, "get_autocast_dtype") else lambda kind: autocast_dtype(kind) is not None
)


@contextlib.contextmanager
def our_modes(device: torch.device, flags: Flags = ()) -> Iterator[None]:
    """Ordinary tensors, no gradients, no autocast: what our forward and its captures are written for.

    flags: torch's switches of precision, as the shape's key has them.
    """
    autocasts = autocast_dtype(device.type) is not None
    no_autocast = torch.autocast(device.type, enabled=False) if autocasts else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), no_autocast, applied(flags):
        yield
