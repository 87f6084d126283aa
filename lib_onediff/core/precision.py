"""torch's global switches for precision (TF32, float16 sums): set around our calls, and restored afterwards.

Not every version of torch has all of them. A shape's key contains the switches that affect its numbers, because a
replay computes with the values of its capture.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# The value of Settings.accumulation that turns on faster, less precise sums.
HALF = "half"
# The names of the switches in a shape's key.
HALF_SUMS = "float16 sums in matmul"
FP16_REDUCTION = "reduced float16 reduction"
BF16_REDUCTION = "reduced bfloat16 reduction"
TF32_MATMUL = "TF32 in matmul"
TF32_CONVOLUTION = "TF32 in convolutions"
# The relative error of an output that the check of a shape accepts with HALF_SUMS: sums of some thousand products in
# float16 have such an error, relative to the output's norm.
ROUNDING_HALF_SUMS = 6e-2

# Values of switches, for applied() and a shape's key: (switch, whether it is on) pairs, with names as in SWITCHES.
Flags = tuple[tuple[str, bool], ...]

# Two threads must not change the switches at the same time: the thread that ends last would restore values that the
# other thread had set.
_TURN = threading.RLock()


def wanted(settings: Any, switch: str) -> bool | None:
    """The value that the settings want for a switch in our calls; None: the value that the host has set.

    With accumulation "half": True for HALF_SUMS and the two switches of TF32, otherwise None. With "full": False for
    HALF_SUMS, even if the host has it on, otherwise None. settings: a Settings. switch: a name as in SWITCHES.
    """
    is_half: bool = settings.accumulation == HALF
    if switch == HALF_SUMS:
        return is_half
    return True if is_half and switch in (TF32_MATMUL, TF32_CONVOLUTION) else None


def switch_of(owner: Any, attribute: str) -> Any:
    """The value of owner.attribute; None if this torch has no such attribute. owner: a part of torch.backends, or None.
    Raises what torch raises for a switch that it cannot read now (see Tf32Switch)."""
    try:
        return getattr(owner, attribute)
    except (AttributeError, AssertionError):
        # torch 2.1 raises AssertionError for an unknown name.
        return None


@dataclass(frozen=True)
class MatmulSwitch:
    """A switch that is an attribute of torch.backends.cuda.matmul."""

    attribute: str

    def read(self) -> bool | None:
        """Whether the switch is on; None if this torch has no such switch."""
        found: bool | None = switch_of(torch.backends.cuda.matmul, self.attribute)
        return found

    def write(self, value: bool | None) -> None:
        """Turn the switch on or off. To be called only if this torch has the switch (read() is not None)."""
        setattr(torch.backends.cuda.matmul, self.attribute, value)

    # The methods of Tf32Switch that save and restore a switch: here its value is all of its state.
    state = read
    restore = write


@dataclass(frozen=True)
class Tf32Switch:
    """torch's switch for TF32 in matrix products, or in convolutions if `convolutions`.

    torch 2.9 and newer have two switches for it, allow_tf32 and fp32_precision. While the two disagree, reading
    allow_tf32 raises RuntimeError. So read() prefers fp32_precision, which can always be read; write() prefers
    allow_tf32, unless it cannot be read.
    """

    convolutions: bool

    def _owners(self) -> tuple[Any, Any]:
        """The parts of torch.backends with the attributes (allow_tf32, fp32_precision); the second is None if this
        torch has no fp32_precision."""
        if not self.convolutions:
            matmul = torch.backends.cuda.matmul
            return matmul, None if switch_of(matmul, "fp32_precision") is None else matmul
        newer = switch_of(torch.backends.cudnn, "conv")
        return torch.backends.cudnn, None if switch_of(newer, "fp32_precision") is None else newer

    def state(self) -> tuple[bool | None, str | None]:
        """The values of (allow_tf32, fp32_precision), for restore(). The first is None if it cannot be read, the second
        if this torch has none."""
        older, newer = self._owners()
        try:
            allowed = switch_of(older, "allow_tf32")
        except RuntimeError:
            allowed = None
        return allowed, None if newer is None else newer.fp32_precision

    def read(self) -> bool | None:
        """Whether TF32 is on; None if this torch has no such switch."""
        allowed, precision = self.state()
        return allowed if precision is None else precision == "tf32"

    def write(self, value: bool) -> None:
        """Turn TF32 on or off. Does nothing if this torch has no such switch."""
        older, newer = self._owners()
        if self.state()[0] is not None:
            older.allow_tf32 = value
        elif newer is not None:
            newer.fp32_precision = "tf32" if value else "ieee"

    def restore(self, state: tuple[bool | None, str | None]) -> None:
        """Set allow_tf32 and fp32_precision to the values that state() has returned. A value that is None is not
        written."""
        allowed, precision = state
        older, newer = self._owners()
        if allowed is not None:
            older.allow_tf32 = allowed
        if newer is None or newer.fp32_precision == precision:
            return
        # The attribute may have been "none", which inherits the value of a more general switch, and torch reads as that
        # value. So "none" is tried first, and the value itself only if "none" reads as another one.
        newer.fp32_precision = "none"
        if newer.fp32_precision != precision:
            newer.fp32_precision = precision


# All switches, by the names that they have in Flags.
SWITCHES: Mapping[str, MatmulSwitch | Tf32Switch] = {
    HALF_SUMS: MatmulSwitch("allow_fp16_accumulation"),
    FP16_REDUCTION: MatmulSwitch("allow_fp16_reduced_precision_reduction"),
    BF16_REDUCTION: MatmulSwitch("allow_bf16_reduced_precision_reduction"),
    TF32_MATMUL: Tf32Switch(convolutions=False),
    TF32_CONVOLUTION: Tf32Switch(convolutions=True),
}
# The names of the switches that affect networks of a dtype.
OF_DTYPE: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.float16: (HALF_SUMS, FP16_REDUCTION),
    torch.bfloat16: (BF16_REDUCTION,),
    torch.float32: (TF32_MATMUL, TF32_CONVOLUTION),
}


def flags_for(settings: Any, dtype: torch.dtype, device: torch.device, upcast_attention: bool = False) -> Flags:
    """The switches that affect a network of this dtype, with the values that they should have in our calls: for a
    shape's key, and for applied().

    A switch that the settings leave alone has its present value, so call this while the host's own values are set. A
    switch that this torch lacks is left out. () on any device but a GPU. settings: a Settings. dtype: its switches are
    in OF_DTYPE; none for other dtypes. upcast_attention: whether attention scores are computed in float32: then
    TF32_MATMUL is included for every dtype.
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
    """A context in which the switches have these values. At its end, also after an exception, they are restored.

    A switch that has the value already, or that this torch lacks, is not written. The switches are global, so only one
    thread can be in such a context: others wait at its beginning. Empty flags change nothing and wait for nothing.
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
    """Whether torch may use TF32 now, in matrix products or in convolutions. Unlike torch's own attributes, this can
    always be read (see Tf32Switch)."""
    return any(SWITCHES[name].read() for name in (TF32_MATMUL, TF32_CONVOLUTION))


# The device types with autocast. Older versions of torch raise for others, such as mps.
AUTOCAST_DEVICES = ("cuda", "cpu")


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of the torch.autocast that is active now for a device type, such as "cuda"; None if autocast is off, or
    the device type is not in AUTOCAST_DEVICES."""
    if device_type not in AUTOCAST_DEVICES:
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


# Whether autocast is on for a device type. Every call of a network reads this, so it is torch's own function if that
# takes a device type (torch 2.4 and newer).
is_autocast_on: Callable[[str], bool] = (
    torch.is_autocast_enabled if hasattr(torch, "get_autocast_dtype") else lambda kind: autocast_dtype(kind) is not None
)


@contextlib.contextmanager
def our_modes(device: torch.device, flags: Flags = ()) -> Iterator[None]:
    """A context for our forwards and captures: without inference mode, gradients and autocast, and with torch's
    precision switches as in flags (see applied). device: the one that computes. flags: those in the shape's key.
    """
    autocasts = autocast_dtype(device.type) is not None
    no_autocast = torch.autocast(device.type, enabled=False) if autocasts else contextlib.nullcontext()
    with torch.inference_mode(False), torch.no_grad(), no_autocast, applied(flags):
        yield
