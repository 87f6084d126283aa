"""Which classes of layers a checkpoint bears in eight bits: how far each takes the UNet's output, and what is within a
budget."""
from __future__ import annotations

import functools
import hashlib
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..model.low_bit import WantedKinds
from ..ops.tuning_cache import TuningCache

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
class Choice:
    """What is in eight bits on a checkpoint of a model ("SDXL"), until something is asked or measured anew.

    error: of the UNet's output with all that is used; None where nothing is. awaits: the halves of an image that were
    not measured yet.
    """

    model: str
    question: Question
    state: object
    error: float | None
    classes: tuple[ClassError, ...]
    awaits: int

    @classmethod
    def of(cls, model: str, question: Question) -> Choice:
        """What was measured, of all that had to be."""
        findings, chosen = question.findings, question.chosen()
        classes = tuple(
            ClassError(name, question.kinds(name), findings.error((name,)), name in chosen)
            for name in question.every_class()
        )
        error = findings.error(chosen) if chosen else None
        return cls(model, question, findings.state, error, classes, question.awaits(chosen))

    def answers(self, question: Question) -> bool:
        """Whether this is asked again, and nothing was measured since."""
        asked = self.question
        same = (asked.findings.name, asked.budget) == (question.findings.name, question.budget)
        return same and self.state is question.findings.state and asked.wanted == question.wanted

    def __str__(self) -> str:
        """For the log: "feed-forward in 1.1e-02 (exact), ...; together 1.6e-02 of at most 0.02"."""
        exact = {False: " (exact)", True: ""}
        classes = ", ".join(f"{one.name} {one.error or 0:.1e}{exact[one.is_used]}" for one in self.classes)
        together = "nothing is used" if self.error is None else f"together {self.error:.1e}"
        return f"{classes}; {together} of at most {self.question.budget:g}"

    @property
    def left_out(self) -> frozenset[str]:
        return frozenset(one.name for one in self.classes if not one.is_used)


class Findings:
    """The errors of one checkpoint's classes of layers by one backend, kept in a TuningCache.

    An error is the largest that was measured at any size and step. Layers that gain nothing at a size are not in eight
    bits there: where others of the same class are, it is measured again.
    """

    def __init__(self, tuning_cache: TuningCache, checkpoint: str, backend: str, dtype: str) -> None:
        self._tuning_cache = tuning_cache
        self.name = f"{backend} errors, {checkpoint}, {dtype}"

    @property
    def state(self) -> object:
        """The same object as long as nothing was measured or forgotten."""
        return self._tuning_cache.get(self.name)

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
        self._tuning_cache.set(self.name, {**known, name: entry})

    def chosen(self, classes: Collection[str], budget: float) -> tuple[str, ...]:
        """Those of the classes that are within a budget together, by what was measured, or else by the root of the sum
        of squares: independent errors add up so (0.9 of what emoji-sd's classes do). The one that errs most goes first.
        """
        left = sorted(classes)
        while left and self._expected(left) > budget:
            left.remove(max(left, key=self._alone))
        return tuple(left)

    def _expected(self, classes: Sequence[str]) -> float:
        together = self.error(classes)
        return math.hypot(*map(self._alone, classes)) if together is None else together

    def _alone(self, name: str) -> float:
        return self.error((name,)) or 0.0

    def _known(self) -> dict[str, tuple[float, dict[str, int]]]:
        """By the classes, the error and in which halves each set of layers was measured. Anybody may have written the
        store."""
        value = self._tuning_cache.get(self.name)
        if not isinstance(value, dict):
            return {}
        return {name: (entry[0], entry[1]) for name, entry in value.items() if is_sound(entry)}


def is_sound(entry: Any) -> bool:
    """Whether this is [error, {digest: halves}]."""
    if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and isinstance(entry[1], dict)):
        return False
    is_error = isinstance(entry[0], (int, float)) and 0 <= entry[0] <= WORTHLESS
    return is_error and all(type(halves) is int for halves in entry[1].values())


@dataclass(frozen=True)
class Question:
    """Which classes of layers are in eight bits. wanted: the layers that a call has so where all are. classes: of every
    layer, in the order of a block."""

    findings: Findings
    wanted: WantedKinds
    classes: Mapping[str, str]
    budget: float

    def every_class(self) -> list[str]:
        """Those that are wanted here, and those that were measured at other sizes: the choice is the same at each."""
        known = {self.classes[layer] for layer in self.wanted} | set(self.findings.classes())
        return [name for name in dict.fromkeys(self.classes.values()) if name in known]

    def chosen(self) -> tuple[str, ...]:
        """Those within the budget."""
        return self.findings.chosen(self.every_class(), self.budget)

    def left_out(self) -> frozenset[str]:
        return frozenset(self.every_class()).difference(self.chosen())

    def unknown(self) -> list[str]:
        """Those of the wanted classes that were never measured, at any size."""
        return [name for name in self.every_class() if self.findings.error((name,)) is None]

    def due(self, chosen: tuple[str, ...], half: int) -> list[tuple[str, ...]]:
        """What has to be measured in a half: each of the chosen classes alone, and all together."""
        return [group for group, missing in self._missing(chosen).items() if missing & half]

    def awaits(self, chosen: tuple[str, ...]) -> int:
        """The halves in which something has to be measured."""
        return functools.reduce(operator.or_, self._missing(chosen).values(), 0)

    def _missing(self, chosen: tuple[str, ...]) -> dict[tuple[str, ...], int]:
        groups = [*((name,) for name in chosen), chosen]
        layers = {group: self.layers(group) for group in groups}
        return {
            group: self.findings.missing(group, digest_of_layers(wanted)) for group, wanted in layers.items() if wanted
        }

    def layers(self, names: Collection[str]) -> WantedKinds:
        """The wanted layers of these classes."""
        return {layer: kinds for layer, kinds in self.wanted.items() if self.classes[layer] in names}

    def kinds(self, name: str) -> str:
        """In which layers of a class are wanted, in words."""
        return ", ".join(sorted({kind.name for kinds in self.layers((name,)).values() for kind in kinds}))


def half_of(timestep: float | None) -> int:
    """The half of an image that a timestep is in, 0 for the last steps. None: of a batch whose images are at different
    ones, which is as good as any."""
    if timestep is None or timestep > MIDDLE:
        return FIRST_HALF
    return SECOND_HALF if timestep >= LATE else 0


def digest_of_layers(layers: WantedKinds) -> str:
    """What tells these layers in these kinds from others."""
    words = sorted(f"{layer} {' '.join(kind.name for kind in kinds)}" for layer, kinds in layers.items())
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:8]
