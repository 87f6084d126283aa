"""Chooses the classes of layers that are computed in eight bits: those whose errors, measured on this checkpoint,
together stay within the user's budget."""
from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..weights.low_bit import WantedKinds

# Limits between the parts of an image, as fractions of the timestep of pure noise: the first "half" is above MIDDLE,
# the second from MIDDLE to LATE, and steps below LATE are not measured. Each half is measured once, at its first step.
# Errors of FP8 on emoji-sd, with all classes: 2.2e-2 at 0.95, 1.5e-2 to 1.8e-2 down to 0.4, 2.3e-2 at 0.2, 1.3e-1 at
# the end. Early steps depend more on the prompt, and "cross-attention out" errs twice as much there as later;
# "self-attention out" does so in the second half. The last steps have the largest errors, relative to the little noise
# that is left, but hardly change the image.
MIDDLE = 0.5
LATE = 0.2
# The halves of an image, as bits: a number such as BOTH says which halves were, or still have to be, measured.
FIRST_HALF = 1
SECOND_HALF = 2
BOTH = FIRST_HALF | SECOND_HALF
# The error of an output of zeros. It also stands for errors that are not finite.
WORTHLESS = 1.0
# Joins the names of a group in Choice.found and in the log.
TOGETHER = " + "
# The sorted names of classes of layers that are in eight bits together.
Group = tuple[str, ...]


@dataclass(frozen=True)
class ClassError:
    """A class of layers, such as "feed-forward in".

    kinds: the names of the 8-bit formats of its layers, with commas; "" if no layer is wanted at the last call's size.
    error: the relative error of the UNet's output with this class alone in eight bits; None if unknown.
    is_used: whether the class is in eight bits.
    """

    name: str
    kinds: str
    error: float | None
    is_used: bool


@dataclass(frozen=True)
class Choice:
    """Which classes of layers, such as "feed-forward in", are computed in eight bits on one checkpoint, by the errors
    that were measured. Immutable: measured() returns a new one.

    model: the model's name for users ("SDXL").
    wanted: the layers of a call that are faster in eight bits, with their formats.
    classes: the class of every layer, by the layer's name, in the order of a block.
    budget: the largest allowed relative error of the UNet's output.
    found: measured errors as the store has them, {"a + b": [0.01, {"0c45": 3}]}: for the joined names of a group, the
        group's largest error at any size and step, and for each set of layers (digest_of_layers) the halves in which
        the group was measured with this set. None if nothing was measured; the store's value may be damaged. A class
        has fewer layers at sizes where fewer of them are faster, so each set of layers is measured.
    """

    model: str
    wanted: WantedKinds
    classes: Mapping[str, str]
    budget: float
    found: Any

    @functools.cached_property
    def _known(self) -> dict[str, tuple[float, dict[str, int]]]:
        """The entries of `found` that are not damaged: name of a group -> (error, {digest of layers: halves})."""
        found = self.found if isinstance(self.found, dict) else {}
        return {name: (entry[0], entry[1]) for name, entry in found.items() if is_sound(entry)}

    def error_of(self, group: Group) -> float | None:
        """The relative error with exactly these classes in eight bits together; None if it was not measured."""
        known = self._known.get(TOGETHER.join(group))
        return None if known is None else known[0]

    @functools.cached_property
    def every_class(self) -> list[str]:
        """The names of the classes that this call wants in eight bits, and of those measured at other sizes, because
        one choice is made for all sizes; in the order of a block."""
        known = {self.classes[layer] for layer in self.wanted} | set(self._known)
        return [name for name in dict.fromkeys(self.classes.values()) if name in known]

    @functools.cached_property
    def chosen(self) -> Group:
        """The sorted names of the classes to compute in eight bits: as many as are within the budget together; () if
        none is. The class with the largest error is left out first. The error of a class that was not measured counts
        as 0, so the class is chosen.

        The joint error of the classes is the measured one; if it was not measured, the root of the sum of the squares
        of their errors, as for independent errors. On emoji-sd, that estimate was 0.9 of the measured error.
        """
        alone = {name: self.error_of((name,)) or 0.0 for name in sorted(self.every_class)}
        while alone:
            together = self.error_of(tuple(alone))
            if (math.hypot(*alone.values()) if together is None else together) <= self.budget:
                break
            del alone[max(alone, key=alone.__getitem__)]
        return tuple(alone)

    @functools.cached_property
    def left_out(self) -> frozenset[str]:
        """The classes of every_class that are not chosen: they stay exact, because with them the error would exceed the
        budget."""
        return frozenset(self.every_class).difference(self.chosen)

    @property
    def is_new(self) -> bool:
        """Whether the error of any class of every_class is unknown: it was measured at no size."""
        return any(self.error_of((name,)) is None for name in self.every_class)

    @property
    def error(self) -> float | None:
        """The relative error of the UNet's output with all chosen classes in eight bits; None if no class is chosen, or
        the error was not measured."""
        return self.error_of(self.chosen) if self.chosen else None

    @property
    def errors(self) -> tuple[ClassError, ...]:
        """Each class of every_class with the error of that class alone, for users."""
        kinds = {name: {kind.name for kind in self.layers((name,)).values()} for name in self.every_class}
        return tuple(
            ClassError(name, ", ".join(sorted(kinds[name])), self.error_of((name,)), name in self.chosen)
            for name in self.every_class
        )

    @functools.cached_property
    def _missing(self) -> dict[Group, int]:
        """For each chosen class alone, and for all chosen classes together: the halves of an image, as bits, in which
        this group was not measured yet with the layers of this call; 0 if it was measured in all. A group without a
        layer in this call has no item."""
        missing = {}
        for group in (*((name,) for name in self.chosen), self.chosen):
            _, halves = self._known.get(TOGETHER.join(group), (0.0, dict[str, int]()))
            if layers := self.layers(group):
                missing[group] = BOTH & ~halves.get(digest_of_layers(layers), 0)
        return missing

    @functools.cached_property
    def awaits(self) -> int:
        """The halves of an image in which any group still has to be measured, as bits; 0 if all is measured."""
        return functools.reduce(operator.or_, self._missing.values(), 0)

    def due(self, half: int) -> list[Group]:
        """The groups that still have to be measured in a half. half: FIRST_HALF or SECOND_HALF; for 0 (the last steps,
        see half_of) no group."""
        return [group for group, missing in self._missing.items() if missing & half]

    def layers(self, group: Collection[str]) -> WantedKinds:
        """The layers of these classes that this call wants in eight bits, with their formats."""
        return {layer: kind for layer, kind in self.wanted.items() if self.classes[layer] in group}

    def measured(self, group: Group, half: int, error: float) -> Choice:
        """A new Choice to which a measurement was added: the relative error of the output with a group in eight bits,
        in one half. Of several errors of a group, the largest is kept. An error of NaN or above WORTHLESS is kept as
        WORTHLESS."""
        before, halves = self._known.get(TOGETHER.join(group), (0.0, dict[str, int]()))
        layers = digest_of_layers(self.layers(group))
        error = error if error < WORTHLESS else WORTHLESS
        entry = [max(before, error), {**halves, layers: half | halves.get(layers, 0)}]
        return replace(self, found={**self._known, TOGETHER.join(group): entry})

    def __str__(self) -> str:
        """Words for the log: "feed-forward in 1.1e-02 (stays exact), ...; in all 1.6e-02, of at most 0.02"."""
        classes = (f"{one.name} {one.error or 0:.1e}{'' if one.is_used else ' (stays exact)'}" for one in self.errors)
        together = "no layer uses 8 bits" if self.error is None else f"in all {self.error:.1e}"
        return f"{', '.join(classes)}; {together}, of at most {self.budget:g}"


def is_sound(entry: Any) -> bool:
    """Whether a value from the store has the form of an item of Choice.found: [error, {digest: halves}]."""
    if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], dict)):
        return False
    error, halves = entry
    is_error = isinstance(error, (int, float)) and 0 <= error <= WORTHLESS
    return is_error and all(type(one) is int for one in halves.values())


def half_of(timestep: float | None, first: float) -> int:
    """The half of an image that a timestep belongs to: FIRST_HALF or SECOND_HALF; 0 for the last steps, which are not
    measured. timestep: None, because the images of the batch are at different timesteps, gives FIRST_HALF. first: the
    timestep of pure noise, the largest one."""
    if timestep is None or timestep > MIDDLE * first:
        return FIRST_HALF
    return SECOND_HALF if timestep >= LATE * first else 0


def digest_of_layers(layers: WantedKinds) -> str:
    """Eight hexadecimal digits that identify these layers with their formats."""
    words = sorted(f"{layer} {kind.name}" for layer, kind in layers.items())
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
