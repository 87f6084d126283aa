"""Which classes of layers a checkpoint bears in eight bits: how far each takes the UNet's output, and what is within a
budget."""
from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..weights.low_bit import WantedKinds

# Timesteps, as shares of that of pure noise. Each half of an image is measured at its first step. Seen of FP8 on
# emoji-sd, all classes together: 2.2e-2 at 0.95, 1.5e-2 to 1.8e-2 down to 0.4, 2.3e-2 at 0.2, 1.3e-1 at its end. First
# the prompt counts, and cross-attention out errs twice as much as later; self-attention out does so in the second half.
# The last steps are not measured: they err the most, of the little noise that is left, and hardly change the image.
MIDDLE = 0.5
LATE = 0.2
# What is measured; bits.
FIRST_HALF = 1
SECOND_HALF = 2
BOTH = FIRST_HALF | SECOND_HALF
# As wrong as an output of zeros; what is not finite is no better.
WORTHLESS = 1.0
TOGETHER = " + "
# Classes of layers that are in eight bits together, in the order of their names.
Group = tuple[str, ...]


@dataclass(frozen=True)
class ClassError:
    """A class of layers. kinds: in which of them are wanted, "" where none is at the size of the last call. error: of
    the UNet's output with this class alone in eight bits, relative to that with none; None where that is not known.
    is_used: whether it is in eight bits."""

    name: str
    kinds: str
    error: float | None
    is_used: bool


@dataclass(frozen=True)
class Choice:
    """Which classes of layers are in eight bits on a checkpoint of a model ("SDXL"), by what was measured of it.

    wanted: the layers that a call has so where all are. classes: of every layer, in the order of a block. found: what
    was measured, as it is stored: by the names of a group, the largest error at any size and step, and in which halves
    of an image which layers were measured, by digest_of_layers: {"a + b": [0.01, {"0c45": 3}]}. Anybody may have
    written the store. Layers that gain nothing at a size are not in eight bits there: where others of the same class
    are, it is measured again.
    """

    model: str
    wanted: WantedKinds
    classes: Mapping[str, str]
    budget: float
    found: Any

    @functools.cached_property
    def _known(self) -> dict[str, tuple[float, dict[str, int]]]:
        found = self.found if isinstance(self.found, dict) else {}
        return {name: (entry[0], entry[1]) for name, entry in found.items() if is_sound(entry)}

    def error_of(self, group: Group) -> float | None:
        """What these make together; None where it was not measured."""
        known = self._known.get(TOGETHER.join(group))
        return None if known is None else known[0]

    @functools.cached_property
    def every_class(self) -> list[str]:
        """Those that are wanted here, and those that were measured at other sizes: the choice is the same at each."""
        known = {self.classes[layer] for layer in self.wanted} | set(self._known)
        return [name for name in dict.fromkeys(self.classes.values()) if name in known]

    @functools.cached_property
    def chosen(self) -> Group:
        """Those within the budget together, by what was measured, or else by the root of the sum of squares:
        independent errors add up so (0.9 of what emoji-sd's classes do). The one that errs most goes first."""
        alone = {name: self.error_of((name,)) or 0.0 for name in sorted(self.every_class)}
        while alone:
            together = self.error_of(tuple(alone))
            if (math.hypot(*alone.values()) if together is None else together) <= self.budget:
                break
            del alone[max(alone, key=alone.__getitem__)]
        return tuple(alone)

    @functools.cached_property
    def left_out(self) -> frozenset[str]:
        return frozenset(self.every_class).difference(self.chosen)

    @property
    def is_new(self) -> bool:
        """Whether a wanted class was never measured, at any size."""
        return any(self.error_of((name,)) is None for name in self.every_class)

    @property
    def error(self) -> float | None:
        """Of the UNet's output with all that is used; None where nothing is."""
        return self.error_of(self.chosen) if self.chosen else None

    @property
    def errors(self) -> tuple[ClassError, ...]:
        kinds = {name: {kind.name for kind in self.layers((name,)).values()} for name in self.every_class}
        return tuple(
            ClassError(name, ", ".join(sorted(kinds[name])), self.error_of((name,)), name in self.chosen)
            for name in self.every_class
        )

    @functools.cached_property
    def _missing(self) -> dict[Group, int]:
        """The halves in which a group was not measured: of each of the chosen classes alone, and of all together."""
        missing = {}
        for group in (*((name,) for name in self.chosen), self.chosen):
            _, halves = self._known.get(TOGETHER.join(group), (0.0, dict[str, int]()))
            if layers := self.layers(group):
                missing[group] = BOTH & ~halves.get(digest_of_layers(layers), 0)
        return missing

    @functools.cached_property
    def awaits(self) -> int:
        """The halves of an image in which something has to be measured."""
        return functools.reduce(operator.or_, self._missing.values(), 0)

    def due(self, half: int) -> list[Group]:
        """What has to be measured in a half."""
        return [group for group, missing in self._missing.items() if missing & half]

    def layers(self, group: Collection[str]) -> WantedKinds:
        """The wanted layers of these classes."""
        return {layer: kind for layer, kind in self.wanted.items() if self.classes[layer] in group}

    def measured(self, group: Group, half: int, error: float) -> Choice:
        """As it is when the layers of a group were measured in a half."""
        before, halves = self._known.get(TOGETHER.join(group), (0.0, dict[str, int]()))
        layers = digest_of_layers(self.layers(group))
        error = error if error < WORTHLESS else WORTHLESS
        entry = [max(before, error), {**halves, layers: half | halves.get(layers, 0)}]
        return replace(self, found={**self._known, TOGETHER.join(group): entry})

    def __str__(self) -> str:
        """For the log: "feed-forward in 1.1e-02 (exact), ...; together 1.6e-02 of at most 0.02"."""
        classes = (f"{one.name} {one.error or 0:.1e}{'' if one.is_used else ' (exact)'}" for one in self.errors)
        together = "nothing is used" if self.error is None else f"together {self.error:.1e}"
        return f"{', '.join(classes)}; {together} of at most {self.budget:g}"


def is_sound(entry: Any) -> bool:
    """Whether this is [error, {digest: halves}]."""
    if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], dict)):
        return False
    error, halves = entry
    is_error = isinstance(error, (int, float)) and 0 <= error <= WORTHLESS
    return is_error and all(type(one) is int for one in halves.values())


def half_of(timestep: float | None, first: float) -> int:
    """The half of an image that a timestep is in, 0 for the last steps. None: of a batch whose images are at different
    ones, which is as good as any. first: the timestep of pure noise."""
    if timestep is None or timestep > MIDDLE * first:
        return FIRST_HALF
    return SECOND_HALF if timestep >= LATE * first else 0


def digest_of_layers(layers: WantedKinds) -> str:
    """What tells these layers in these kinds from others."""
    words = sorted(f"{layer} {kind.name}" for layer, kind in layers.items())
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
