"""Which classes of layers a checkpoint bears in eight bits: how far each takes the UNet's output, and what is within a
budget."""
from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....core.tuning_cache import TuningCache
from ....weights.low_bit import WantedKinds

# Timesteps, of 1000. Each half of an image is measured at its first step. Seen of FP8 on emoji-sd, all classes
# together: 2.2e-2 at 951, 1.5e-2 to 1.8e-2 down to 400, 2.3e-2 at 200, 1.3e-1 at 1. At first the prompt counts, and
# cross-attention out errs twice as much as later; self-attention out does so in the second half. The last steps are not
# measured: they err the most, of the little noise that is left, and hardly change the image.
MIDDLE, LATE = 500.0, 200.0
# What is measured; bits.
FIRST_HALF, SECOND_HALF = 1, 2
BOTH = FIRST_HALF | SECOND_HALF
# As wrong as an output of zeros; what is not finite is no better.
WORTHLESS = 1.0
TOGETHER = " + "


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
class Findings:
    """The errors of one checkpoint's classes of layers, kept in a TuningCache under a name.

    An error is the largest that was measured at any size and step. Layers that gain nothing at a size are not in eight
    bits there: where others of the same class are, it is measured again.
    """

    tuning_cache: TuningCache
    name: str

    @classmethod
    def of(cls, tuning_cache: TuningCache, checkpoint: str, low_bit: str, dtype: torch.dtype) -> Findings:
        """low_bit: as settings.Settings.low_bit."""
        return cls(tuning_cache, f"low-bit {low_bit} errors, {checkpoint}, {str(dtype).removeprefix('torch.')}")

    @property
    def state(self) -> object:
        """The same object as long as nothing was measured or forgotten."""
        return self.tuning_cache.get(self.name)

    def error(self, classes: Sequence[str]) -> float | None:
        """What these make together; None where it was not measured."""
        found = self._known().get(TOGETHER.join(classes))
        return None if found is None else found[0]

    def classes(self) -> list[str]:
        """Those that were measured alone."""
        return [name for name in self._known() if TOGETHER not in name]

    def missing(self, classes: Sequence[str], layers: str) -> int:
        """The halves of an image in which these were not measured. layers: a digest of those that a call has in eight
        bits."""
        return BOTH & ~self._known().get(TOGETHER.join(classes), (0.0, {}))[1].get(layers, 0)

    def note(self, classes: Sequence[str], layers: str, half: int, error: float) -> None:
        """They were measured in a half."""
        known, name = self._known(), TOGETHER.join(classes)
        before, halves = known.get(name, (0.0, {}))
        error = error if error < WORTHLESS else WORTHLESS
        entry = [max(before, error), {**halves, layers: half | halves.get(layers, 0)}]
        self.tuning_cache.set(self.name, {**known, name: entry})

    def chosen(self, classes: Collection[str], budget: float) -> tuple[str, ...]:
        """Those of the classes that are within a budget together, by what was measured, or else by the root of the sum
        of squares: independent errors add up so (0.9 of what emoji-sd's classes do). The one that errs most goes first.
        """
        alone = {name: self.error((name,)) or 0.0 for name in sorted(classes)}
        while alone:
            together = self.error(tuple(alone))
            if (math.hypot(*alone.values()) if together is None else together) <= budget:
                break
            del alone[max(alone, key=alone.__getitem__)]
        return tuple(alone)

    def _known(self) -> dict[str, tuple[float, dict[str, int]]]:
        """By the classes, the error and in which halves each set of layers was measured. Anybody may have written the
        store."""
        value = self.tuning_cache.get(self.name)
        if not isinstance(value, dict):
            return {}
        return {name: (entry[0], entry[1]) for name, entry in value.items() if is_sound(entry)}


def is_sound(entry: Any) -> bool:
    """Whether this is [error, {digest: halves}]."""
    if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], dict)):
        return False
    error, halves = entry
    is_error = isinstance(error, (int, float)) and 0 <= error <= WORTHLESS
    return is_error and all(type(one) is int for one in halves.values())


@dataclass(frozen=True)
class Choice:
    """Which classes of layers are in eight bits on a checkpoint of a model ("SDXL"), by what is known of it.

    wanted: the layers that a call has so where all are. classes: of every layer, in the order of a block. state: of the
    findings.
    """

    model: str
    findings: Findings
    wanted: WantedKinds
    classes: Mapping[str, str]
    budget: float
    state: object

    @functools.cached_property
    def every_class(self) -> list[str]:
        """Those that are wanted here, and those that were measured at other sizes: the choice is the same at each."""
        known = {self.classes[layer] for layer in self.wanted} | set(self.findings.classes())
        return [name for name in dict.fromkeys(self.classes.values()) if name in known]

    @functools.cached_property
    def chosen(self) -> tuple[str, ...]:
        """Those within the budget."""
        return self.findings.chosen(self.every_class, self.budget)

    @functools.cached_property
    def left_out(self) -> frozenset[str]:
        return frozenset(self.every_class).difference(self.chosen)

    @property
    def is_new(self) -> bool:
        """Whether a wanted class was never measured, at any size."""
        return any(self.findings.error((name,)) is None for name in self.every_class)

    @property
    def error(self) -> float | None:
        """Of the UNet's output with all that is used; None where nothing is."""
        return self.findings.error(self.chosen) if self.chosen else None

    @property
    def errors(self) -> tuple[ClassError, ...]:
        kinds = {name: {kind.name for kind in self.layers((name,)).values()} for name in self.every_class}
        return tuple(
            ClassError(name, ", ".join(sorted(kinds[name])), self.findings.error((name,)), name in self.chosen)
            for name in self.every_class
        )

    @functools.cached_property
    def _missing(self) -> dict[tuple[str, ...], int]:
        groups = {group: self.layers(group) for group in (*((name,) for name in self.chosen), self.chosen)}
        return {
            group: self.findings.missing(group, digest_of_layers(layers)) for group, layers in groups.items() if layers
        }

    @functools.cached_property
    def awaits(self) -> int:
        """The halves of an image in which something has to be measured."""
        return functools.reduce(operator.or_, self._missing.values(), 0)

    def due(self, half: int) -> list[tuple[str, ...]]:
        """What has to be measured in a half: each of the chosen classes alone, and all together."""
        return [group for group, missing in self._missing.items() if missing & half]

    def layers(self, names: Collection[str]) -> WantedKinds:
        """The wanted layers of these classes."""
        return {layer: kind for layer, kind in self.wanted.items() if self.classes[layer] in names}

    def now(self) -> Choice:
        """By what is known by now."""
        return replace(self, state=self.findings.state)

    def __str__(self) -> str:
        """For the log: "feed-forward in 1.1e-02 (exact), ...; together 1.6e-02 of at most 0.02"."""
        classes = (f"{one.name} {one.error or 0:.1e}{'' if one.is_used else ' (exact)'}" for one in self.errors)
        together = "nothing is used" if self.error is None else f"together {self.error:.1e}"
        return f"{', '.join(classes)}; {together} of at most {self.budget:g}"


def half_of(timestep: float | None) -> int:
    """The half of an image that a timestep is in, 0 for the last steps. None: of a batch whose images are at different
    ones, which is as good as any."""
    if timestep is None or timestep > MIDDLE:
        return FIRST_HALF
    return SECOND_HALF if timestep >= LATE else 0


def digest_of_layers(layers: WantedKinds) -> str:
    """What tells these layers in these kinds from others."""
    words = sorted(f"{layer} {kind.name}" for layer, kind in layers.items())
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
