"""Edits networks at random between the steps of samplings with DeepCache. Each output is compared with that of a twin,
an equally edited copy of the network that the host's own code runs.

    python tests/edits_in_samplings.py --edits 400 --seed 0 [--networks sdxl,cosmos,anima] [--kinds weights,code]

A whole step computes all layers. A cached step computes the outer layers, and reuses the output of the inner layers
(the activation at the cut) of the last whole step. The rule: an edit of an outer layer takes effect at the next step,
an edit of any other layer at the next whole step. For a cached step, the twin runs its whole forward, in which the
activation at the cut is replaced by that of the last whole step.
"""
from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import all_folders  # noqa: F401
import pytest
import torch
from edited_networks import Given, Pair
from edits_between_steps import KINDS, OF_EVERYTHING, OF_MODULES
from edits_of_modules import Inapplicable, Undo
from networks_with_a_cut import INTERVAL, NETWORKS, Cut
from random_edits import (
    CLOSE,
    EditFailed,
    attempt,
    distance,
    exact_products,
    forget_everything,
    limit_of,
)
from torch import Tensor

from lib_onediff.core.sampling import Sampling
from lib_onediff.runtime import verify
from lib_onediff.runtime.runtime import runtime
from lib_onediff.steps import schedules

STEPS = 16
# The probability that an edit, or the undoing of one, precedes a step; and that an edit is of a layer that cached steps
# compute.
OFTEN = 0.3
OF_THE_PART = 0.5
# The most edits that are in effect at once, of those that can be undone.
MOST_STANDING = 2
# The smallest change of a cached step's output that shows that the step depends on what was edited.
SEEN = 1e-6
# Edits of values that torch's version counters do not count. A cached step after one uses the new values, and still
# reuses the activation of the last whole step.
UNCOUNTED = frozenset({"add_to_data", "edit_one_row", "other_numbers"})


@dataclass
class Report:
    """The result of run(). edits: how many edits were made or undone, by kind. steps: how many steps ran, by ("whole"
    or "cached", route). wrong: the failures, a line each. unknown: the number of cached steps that the twin could not
    compute because an edit makes an inner layer raise. worst: the largest relative error of the other outputs."""

    edits: Counter[str] = field(default_factory=Counter)
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    unknown: int = 0
    worst: float = 0.0


class Run:
    """Samplings with one pair of networks."""

    def __init__(self, pair: Pair, cut: Cut, chance: random.Random, kinds: Sequence[str]) -> None:
        self.pair = pair
        self.cut = cut
        self.chance = chance
        self.kinds = kinds
        self.report = Report()
        self.history: list[str] = []
        self._standing: list[tuple[str, Undo | None]] = []
        self._cached_in_a_row = 0

    def given(self, index: int) -> Given:
        """The inputs of the step with this index."""
        pair = self.pair
        given = pair.inputs_of((8, 8), 2, 77, pair.random(0))
        latent = given[pair.names[0]]
        given[pair.names[0]] = pair.random(index + 1)(*latent.shape).to(latent)
        timestep = torch.as_tensor(given[pair.names[1]])
        is_share = float(timestep.flatten()[0]) <= 1
        time = self.times(is_share)[index]
        return {**given, pair.names[1]: torch.full_like(timestep, time, dtype=torch.float32)}

    def times(self, is_share: bool) -> list[float]:
        """The timesteps of a sampling: from 1 for a flow model (is_share), else from 1000."""
        times = [1 - index / STEPS for index in range(STEPS)]
        return times if is_share else [1000 * time for time in times]

    def sampling(self, is_edited: bool) -> None:
        """A sampling, with edits between its steps or without."""
        pair = self.pair
        is_share = float(torch.as_tensor(pair.inputs(0)[pair.names[1]]).flatten()[0]) <= 1
        self.cut.kept = None
        with pair.image(True):
            runtime.begin_sampling(pair.ours, Sampling(times=lambda: self.times(is_share)), of_all=False)
            for index in range(STEPS):
                is_read = is_edited and self.chance.random() < OFTEN and self.edit(index)
                self.step(index, is_read)
            runtime.end_sampling(pair.ours)

    def edit(self, index: int) -> bool:
        """Make an edit, or undo one. Returns whether it changes the output of a cached step of the twin; False for
        edits that torch does not count."""
        before = self.cached_output(index)
        is_counted = True
        if self._standing and (len(self._standing) >= MOST_STANDING or self.chance.random() < 0.5):
            self.undo_last()
        else:
            is_counted = self.make() not in UNCOUNTED
        after = self.cached_output(index)
        if before is None or after is None or not is_counted:
            return False
        return after.shape != before.shape or distance(after, before) > SEEN

    def cached_output(self, index: int) -> Tensor | None:
        """The twin's output for a cached step; None if it raises, or before the first whole step."""
        if self.cut.kept is None:
            return None
        output, _ = attempt(self.pair, self.cut.cached, self.given(index))
        return output if isinstance(output, Tensor) else None

    def make(self) -> str:
        """Make an edit, of a random kind. Returns its name."""
        kind = self.chance.choice(self.kinds)
        of_modules = kind in OF_MODULES
        edit = self.chance.choice((OF_MODULES if of_modules else OF_EVERYTHING)[kind])
        seed = self.chance.randrange(10**6)
        target: Any = self.pair
        where = "anywhere"
        if of_modules and self.chance.random() < OF_THE_PART:
            place = self.chance.randrange(len(self.cut.part(self.pair.theirs)))
            target = SimpleNamespace(networks=[self.cut.part(one)[place] for one in self.pair.networks])
            where = f"part {place}"
        try:
            undo = edit.make(target, seed)
        except Inapplicable:
            return edit.name
        except EditFailed as failed:
            self.report.wrong.append(str(failed))
            return edit.name
        self.history.append(f"{edit.name}:{seed} {where}")
        self.report.edits[kind] += 1
        if undo is not None:
            self._standing.append((kind, undo))
        return edit.name

    def undo_last(self) -> None:
        kind, undo = self._standing.pop()
        if undo is not None:
            undo()
            self.history.append("undo")
            self.report.edits[kind] += 1

    def undo_all(self) -> None:
        while self._standing:
            self.undo_last()

    def step(self, index: int, is_read: bool) -> None:
        """Compute a step by both networks, and report a difference. is_read: whether an edit before this step changes
        the output of a cached step; the step must then be a whole one."""
        report = self.report
        pair = self.pair
        given = self.given(index)
        passes = runtime.status()["deepcache"]["cached"]
        ours, _ = attempt(pair, pair.ours, given)
        is_cached = runtime.status()["deepcache"]["cached"] > passes
        theirs_by = self.cut.cached if is_cached else self.cut.whole
        theirs, _ = attempt(pair, theirs_by, given)
        if not is_cached:
            self.cut.kept = self.cut.found
        half = "cached" if is_cached else "whole"
        route = str(runtime.status()["route"])
        report.steps[half, route] += 1
        self.history.append(f"{index}:{half}:{route}")
        where = f"step {index}, {half} by {route} ({runtime.status()['reason']})"
        self._cached_in_a_row = self._cached_in_a_row + 1 if is_cached else 0
        if is_cached and is_read:
            self.wrong(f"{where}: it must be a whole step, because an edit changed a layer that cached steps compute")
        if self._cached_in_a_row >= INTERVAL:
            self.wrong(f"{where}: it must be a whole step")
        if isinstance(theirs, Exception) and is_cached:
            report.unknown += 1
            return
        if isinstance(ours, Exception) or isinstance(theirs, Exception):
            if type(ours) is not type(theirs):
                self.wrong(f"{where}: {ours!r:.150} where the host's is {theirs!r:.150}")
            return
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            self.wrong(f"{where}: {ours.shape} {ours.dtype}, the host's is {theirs.shape} {theirs.dtype}")
            return
        error = distance(ours, theirs)
        if error > CLOSE[torch.float32] and error > limit_of(pair, theirs_by, given, theirs):
            self.wrong(f"{where}: an error of {error:.1e}")
            return
        report.worst = max(report.worst, error)

    def wrong(self, what: str) -> None:
        self.report.wrong.append(f"{what}; {'; '.join(self.history[-24:])}")


def run(
    network: str, count: int, seed: int, kinds: Sequence[str] = KINDS, most_wrong: int = 5,
) -> Report:
    """Run samplings until `count` edits were made or undone, or `most_wrong` failures found. Then undo all edits, and
    run two samplings without edits; graphs must serve every step of the second one, as before the first edit."""
    forget_everything()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch, exact_products():
        # The host is not timed.
        patch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", -1.0)
        # Whole steps are evenly spaced, INTERVAL steps apart.
        patch.setattr(schedules, "TABLES", {})
        patch.setattr(schedules, "authors_whole_steps", lambda total, interval: frozenset(range(0, total, interval)))
        schedules.schedule_for.cache_clear()
        try:
            with NETWORKS[network]() as (pair, cut):
                found = Run(pair, cut, random.Random(seed), kinds)
                for _ in range(2):
                    found.sampling(is_edited=False)
                while found.report.edits.total() < count and len(found.report.wrong) < most_wrong:
                    found.sampling(is_edited=True)
                    if found.chance.random() < 0.5:
                        found.undo_all()
                        for _ in range(2):
                            found.sampling(is_edited=False)
                found.undo_all()
                for _ in range(2):
                    before = found.report.steps.copy()
                    found.sampling(is_edited=False)
                last = found.report.steps - before
                if last != Counter({("whole", "graph"): 6, ("cached", "graph"): 10}):
                    reason = runtime.status()["reason"]
                    found.report.wrong.append(f"after all edits were undone, a sampling has {dict(last)} ({reason})")
        finally:
            forget_everything()
            schedules.schedule_for.cache_clear()
    return found.report


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--edits", type=int, default=400, help="the number of edits to make or undo in each network")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--networks", default=",".join(NETWORKS))
    made.add_argument("--kinds", default=",".join(KINDS))
    options = made.parse_args(arguments)
    torch.set_num_threads(1)
    is_right = True
    for network in options.networks.split(","):
        report = run(network, options.edits, options.seed, options.kinds.split(","))
        print(network, dict(report.edits), {"/".join(name): count for name, count in report.steps.items()},
              f"unknown {report.unknown}, worst {report.worst:.1e}")
        print(*report.wrong, sep="\n")
        is_right = is_right and not report.wrong
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
