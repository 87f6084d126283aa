"""Random edits of networks between their calls, each answer of OneDiff's compared with that of a twin which the host's
own code runs.

    python tests/random_edits.py --edits 2000 --seed 0 [--device cuda] [--dtype float16] [--networks sd1,anima]
        [--kinds globals,classes] [--seconds 600]
    python tests/random_edits.py --networks sdxl --replay "default_dtype:12; calls:1:7:told"

The exit status is 1 where an answer was wrong, where OneDiff did not serve again after everything was undone, and where
it served so few calls that the run shows nothing.
"""
from __future__ import annotations

import argparse
import contextlib
import logging
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import all_folders  # noqa: F401
import edits_of_calls
import edits_of_code
import edits_of_modules
import pytest
import torch
from edited_networks import NETWORKS, Given, Pair, forget_everything
from edits_of_modules import Inapplicable, Undo
from torch import Tensor

from lib_onediff.runtime import verify
from lib_onediff.runtime.runtime import runtime

# What rounding explains of float32, and of the types with fewer digits; more is measured, see limit_of.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# How many times what the host's own output moves by, where its inputs move by one rounding.
TIMES_A_ROUNDING = 4
EDITS_OF_A_PLAN = 30
MOST_STANDING = 3
# A run in which OneDiff served a smaller part of the calls shows little.
LEAST_SERVED = 0.25
OURS = ("graph", "plain")
# Of one failure: how many shorter sequences are tried.
MOST_TRIALS = 24


class Edit(NamedTuple):
    """make(pair, seed): edits both networks of a pair in the same way; returns what undoes it, None where it stays."""

    kind: str
    name: str
    make: Callable[[Pair, int], Undo | None]


class EditFailed(Exception):
    """An edit works on the host's network and not on the one in our care, or the other way round."""


def of_both(edit: Callable[[Any, random.Random], Undo | None]) -> Callable[[Pair, int], Undo | None]:
    def make(pair: Pair, seed: int) -> Undo | None:
        undos = []
        errors = []
        for network in pair.networks:
            torch.manual_seed(seed)
            try:
                undos.append(edit(network, random.Random(seed)))
            except Exception as error:
                errors.append(error)
        if len(errors) == 2:
            raise Inapplicable from errors[0]
        if errors:
            raise EditFailed(f"{edit.__name__} raises {errors[0]!r} on one of the two networks")
        return None if undos[0] is None else lambda: [undo() for undo in undos if undo is not None]

    return make


def with_sites(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    return lambda pair, seed: edit(pair.sites, random.Random(seed))


def of_both_with_sites(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    def make(pair: Pair, seed: int) -> Undo | None:
        def one(network: Any, chance: random.Random) -> Undo | None:
            return edit(network, pair.sites, chance)

        one.__name__ = edit.__name__
        return of_both(one)(pair, seed)

    return make


def on_theirs(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    """An edit of everything, which needs a network to look at."""
    return lambda pair, seed: edit(pair.theirs, random.Random(seed))


def on_pair(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    return lambda pair, seed: edit(pair, random.Random(seed))


def edits(kind: str, functions: Sequence[Any], adapt: Callable[[Any], Any]) -> list[Edit]:
    """Functions that are named twice are chosen twice as often."""
    by_function = {function: Edit(kind, function.__name__, adapt(function)) for function in functions}
    return [by_function[function] for function in functions]


EDITS: list[Edit] = [
    *edits("weights", edits_of_modules.WEIGHTS, of_both), *edits("attributes", edits_of_modules.ATTRIBUTES, of_both),
    *edits("code", edits_of_modules.CODE, of_both), *edits("code", edits_of_modules.EVERYWHERE, on_theirs),
    *edits("adapters", edits_of_modules.ADAPTERS, of_both),
    *edits("globals", edits_of_code.GLOBALS, with_sites),
    *edits("globals of torch", edits_of_code.IN_TORCH, with_sites),
    *edits("classes", edits_of_code.CLASSES, with_sites),
    *edits("classes", edits_of_code.OF_A_NETWORK, of_both_with_sites),
    *edits("bodies", edits_of_code.BODIES, with_sites),
    *edits("defaults", edits_of_calls.DEFAULTS, on_pair), *edits("modes", edits_of_calls.MODES, on_pair),
    *edits("copies", edits_of_calls.COPIES, on_pair), *edits("inputs", edits_of_calls.INPUTS, on_pair),
]
KINDS = tuple(dict.fromkeys(edit.kind for edit in EDITS))
BY_NAME = {edit.name: edit for edit in EDITS}


# --- plans --------------------------------------------------------------------------------------------------------

class Make(NamedTuple):
    edit: Edit
    seed: int

    def __str__(self) -> str:
        return f"{self.edit.name}:{self.seed}"


class UndoLast(NamedTuple):
    def __str__(self) -> str:
        return "undo"


class Calls(NamedTuple):
    """count calls with the inputs of a seed, as steps of an image that the host tells of, or not (told)."""

    count: int
    seed: int
    told: bool

    def __str__(self) -> str:
        return f"calls:{self.count}:{self.seed}:{'told' if self.told else 'untold'}"


Step = Make | UndoLast | Calls


def random_plan(chance: random.Random, kinds: Sequence[str], count: int) -> list[Step]:
    """So many edits, each followed by calls, as its undoing is; every kind as often as any other. Most calls have the
    same inputs, so that some are replayed."""
    usual = chance.randrange(12)

    def calls() -> Calls:
        seed = usual if chance.random() < 0.8 else chance.randrange(12)
        return Calls(chance.choice([1, 1, 4]), seed, chance.random() < 0.7)

    plan: list[Step] = [Calls(4, usual, True)]
    standing = 0
    for _ in range(count):
        kind = chance.choice(kinds)
        edit = chance.choice([edit for edit in EDITS if edit.kind == kind])
        plan += [Make(edit, chance.randrange(10**6)), calls()]
        standing += 1
        while standing and (standing >= MOST_STANDING or chance.random() < 0.6):
            plan += [UndoLast(), calls()]
            standing -= 1
    for _ in range(standing):
        plan += [UndoLast(), calls()]
    return plan


def text_of(plan: Sequence[Step]) -> str:
    return "; ".join(map(str, plan))


def plan_of(text: str) -> list[Step]:
    """What text_of has written."""
    plan: list[Step] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        name, *numbers = part.split(":")
        if name == "undo":
            plan.append(UndoLast())
        elif name == "calls":
            plan.append(Calls(int(numbers[0]), int(numbers[1]), numbers[2] == "told"))
        else:
            plan.append(Make(BY_NAME[name], int(numbers[0])))
    return plan


# --- running them -------------------------------------------------------------------------------------------------

class Wrong(Exception):
    """What is wrong, in one line. kind: of the edits to which it is counted."""


class NotAgain(Wrong):
    """Everything was undone, and OneDiff does not serve."""


@dataclass
class Tally:
    """Of one kind of edits: how many were made or undone, the calls after them by route, and what was wrong."""

    edits: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    raised: int = 0
    wrong: int = 0
    not_again: int = 0
    worst: float = 0.0


Tallies = dict[str, Tally]


def tensors_in(given: Given) -> list[Tensor]:
    found: list[Tensor] = []
    for value in given.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(value)
    return found


def attempt(pair: Pair, caller: Any, given: Given) -> Any:
    """The answer, or the exception; with the same random numbers each time, and where these stand afterwards."""
    torch.manual_seed(0)
    try:
        answer = pair.answer(caller, given)
    except Exception as error:
        return error, None
    return answer, torch.default_generator.get_state() if pair.device.type == "cpu" else None


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the host's; infinite where one has a number and the other none."""
    ours, theirs = (one.detach().to("cpu", torch.float64).flatten() for one in (ours, theirs))
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(ours)):
        return float("inf")
    size = float(theirs[finite].square().sum().sqrt())
    return float((ours[finite] - theirs[finite]).square().sum().sqrt()) / (size or 1.0)


def limit_of(pair: Pair, caller: Any, given: Given, theirs: Tensor) -> float:
    """How far an answer may be from the host's because of rounding: some times what the host's own answer moves by
    where the latent and the context move by one rounding."""
    kind = pair.device.type
    computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else theirs.dtype
    dtypes = [computed, *(one.dtype for one in tensors_in(given) if one.is_floating_point())]
    dtypes += [next(pair.theirs.parameters()).dtype]
    close = max(CLOSE.get(dtype, 1e-5) for dtype in dtypes)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    generator = torch.Generator().manual_seed(1)
    moved = dict(given)
    for name in (pair.names[0], pair.names[2]):
        value = given[name]
        if isinstance(value, Tensor) and value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32, device="cpu")
            moved[name] = value.detach() + value.detach() * (noise * eps).to(value)
    other, _ = attempt(pair, caller, moved)
    if isinstance(other, Exception):
        return close
    return max(close, TIMES_A_ROUNDING * distance(other, theirs))


def compare(pair: Pair, name: str, ours_by: Any, theirs_by: Any, given: Given, tally: Tally) -> None:
    """Raise Wrong where the network in our care answers otherwise than its twin."""
    before = runtime.call_stats.calls.copy()
    versions = [one._version for one in tensors_in(given) if not one.is_inference()]
    ours, state = attempt(pair, ours_by, given)
    taken = runtime.call_stats.calls - before
    tally.calls.update(taken)
    if versions != [one._version for one in tensors_in(given) if not one.is_inference()]:
        raise Wrong(f"{name}: an input was written to")
    theirs, expected_state = attempt(pair, theirs_by, given)
    where = f"{name} by {', '.join(taken) or 'nobody'} ({runtime.status()['reason'] or 'no reason'})"
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        if type(ours) is not type(theirs):
            raise Wrong(f"{where}: {ours!r:.150} where the host's is {theirs!r:.150}")
        tally.raised += 1
        return
    for fact in ("shape", "dtype", "device", "requires_grad"):
        if getattr(ours, fact) != getattr(theirs, fact):
            raise Wrong(f"{where}: {fact} {getattr(ours, fact)}, the host's {getattr(theirs, fact)}")
    if state is not None and not torch.equal(state, expected_state):
        raise Wrong(f"{where}: other random numbers were drawn")
    apart = distance(ours, theirs)
    if apart > 1e-5 and apart > (most := limit_of(pair, theirs_by, given, theirs)):
        again = repeated(pair, ours_by, theirs_by, given, theirs)
        raise Wrong(f"{where}: {apart:.1e} away, rounding explains {most:.0e}{again}")
    tally.worst = max(tally.worst, apart)


def repeated(pair: Pair, ours_by: Any, theirs_by: Any, given: Given, theirs: Tensor) -> str:
    """How far a second answer of each is from the host's first: tells a lasting fault from one that comes and goes."""
    told = ""
    for name, caller in (("the host", theirs_by), ("ours", ours_by)):
        again, _ = attempt(pair, caller, given)
        what = f"{again!r:.100}" if isinstance(again, Exception) else f"{distance(again, theirs):.1e}"
        told += f"; {name} again: {what}"
    return told


def given_now(pair: Pair, seed: int) -> Given:
    """The inputs of a seed with what edits have made of them. An edit that fails on another's result leaves it."""
    given = pair.inputs(seed)
    for change in pair.changes:
        with contextlib.suppress(Exception):
            given = change(given, pair.names)
    return given


def run_plan(pair: Pair, plan: Sequence[Step], tallies: Tallies, deadline: float) -> int:
    """Run the steps. Returns how many edits were made or undone. Raises Wrong at the first wrong answer; its notes are
    the kind of the edit to blame and the number of steps up to there. Everything is undone at the end."""
    standing: list[tuple[str, Undo | None]] = []
    kind = "unedited"
    done = 0
    try:
        for number, step in enumerate(plan):
            if time.monotonic() > deadline:
                break
            try:
                if isinstance(step, Make):
                    kind = step.edit.kind
                    standing.append((kind, made(step, pair)))
                    done = done + 1
                    tallies[kind].edits = tallies[kind].edits + 1
                elif isinstance(step, UndoLast):
                    if standing:
                        kind, undo = standing.pop()
                        if undo is not None:
                            undo()
                            done = done + 1
                            tallies[kind].edits = tallies[kind].edits + 1
                else:
                    run_calls(pair, step, tallies[kind], is_edited=any(undo is not None for _, undo in standing))
            except Wrong as wrong:
                tallies[kind].wrong += not isinstance(wrong, NotAgain)
                tallies[kind].not_again += isinstance(wrong, NotAgain)
                wrong.__notes__ = [kind, str(number + 1)]  # type: ignore[attr-defined]
                raise
    finally:
        for _, undo in reversed(standing):
            if undo is not None:
                with contextlib.suppress(Exception):
                    undo()
    return done


def made(step: Make, pair: Pair) -> Undo | None:
    try:
        return step.edit.make(pair, step.seed)
    except Inapplicable:
        return None
    except EditFailed as failed:
        raise Wrong(str(failed)) from failed


def run_calls(pair: Pair, step: Calls, tally: Tally, is_edited: bool) -> None:
    with pair.image(step.told):
        for _ in range(step.count):
            compare(pair, "the network", pair.ours, pair.theirs, given_now(pair, step.seed), tally)
            for name, ours, theirs in list(pair.callers):
                compare(pair, name, ours, theirs, given_now(pair, step.seed), tally)
    if is_edited or not step.told:
        return
    with pair.image(True):
        compare(pair, "the next image", pair.ours, pair.theirs, given_now(pair, step.seed), tally)
    if runtime.status()["route"] not in OURS:
        raise NotAgain(f"by {runtime.status()['route']} ({runtime.status()['reason'] or 'no reason'})")


def fails(network: str, options: argparse.Namespace, plan: Sequence[Step], how: type[Wrong]) -> Wrong | None:
    """How a plan fails with networks of their own; None where it does not fail in this way."""
    with prepared(network, options) as pair:
        try:
            run_plan(pair, plan, defaultdict(Tally), time.monotonic() + 60)
        except Wrong as wrong:
            return wrong if type(wrong) is how else None
    return None


def shortened(network: str, options: argparse.Namespace, plan: list[Step], wrong: Wrong) -> list[Step]:
    """As few steps as still fail in the same way: parts are left out, halves first, then smaller ones. An edit is left
    out with its undoing."""
    plan = plan[:int(wrong.__notes__[1])]  # type: ignore[attr-defined]
    units = [
        {number, undone_at(plan, number)} if isinstance(step, Make) else {number}
        for number, step in enumerate(plan[:-1]) if not isinstance(step, UndoLast)
    ]
    def without(left: list[set[int]]) -> list[Step]:
        kept = set().union(*left, {len(plan) - 1}) - {-1}
        return [step for number, step in enumerate(plan) if number in kept]

    trials = 0
    parts = 2
    while units and trials < MOST_TRIALS:
        size = -(-len(units) // parts)
        for first in range(0, len(units), size):
            left = units[:first] + units[first + size:]
            trials += 1
            if fails(network, options, without(left), type(wrong)):
                units = left
                parts = max(parts - 1, 2)
                break
            if trials == MOST_TRIALS:
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(units))
    return without(units)


def undone_at(plan: Sequence[Step], place: int) -> int:
    """Where the edit that was made at a place is undone; -1 if nowhere."""
    depth = 0
    for number in range(place, len(plan)):
        depth += isinstance(plan[number], Make) - isinstance(plan[number], UndoLast)
        if depth == 0:
            return number
    return -1


@contextlib.contextmanager
def prepared(network: str, options: argparse.Namespace) -> Iterator[Pair]:
    forget_everything()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        # The host is not timed.
        patch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", -1.0)
        try:
            with NETWORKS[network](options.device, options.dtype) as pair:
                pair.key = network
                yield pair
        finally:
            forget_everything()


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """A GPU multiplies float32 in float32; nothing is printed but what this tool prints."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(disabled)
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def run(options: argparse.Namespace, tell: Callable[[str], object] = print) -> tuple[dict[str, Tallies], int]:
    """Random plans on each network in turn until so many edits were made. Returns the tallies by network and kind, and
    how many failures there were."""
    chance = random.Random(options.seed)
    began = time.monotonic()
    deadline = began + options.seconds
    tallies: dict[str, Tallies] = {network: defaultdict(Tally) for network in options.networks}
    done = failures = turn = 0
    seen: set[tuple[str, str, str]] = set()
    with exact_products():
        while done < options.edits and time.monotonic() < deadline:
            network = options.networks[turn % len(options.networks)]
            plan = random_plan(chance, options.kinds, min(EDITS_OF_A_PLAN, options.edits - done))
            turn += 1
            found: Wrong | None = None
            with prepared(network, options) as pair:
                before = sum(tally.edits for tally in tallies[network].values())
                try:
                    run_plan(pair, plan, tallies[network], deadline)
                except Wrong as wrong:
                    found = wrong
                # A network that is wrong before any edit ends the run all the same.
                done += max(sum(tally.edits for tally in tallies[network].values()) - before, 1)
            if found is None:
                continue
            failures += 1
            kind, steps = found.__notes__  # type: ignore[attr-defined]
            last = next((str(step.edit.name) for step in reversed(plan[:int(steps)]) if isinstance(step, Make)), "")
            tell(f"{'NOT AGAIN' if isinstance(found, NotAgain) else 'WRONG'} {network}, {kind}: {found}")
            if not options.shorten:
                tell(f'    --networks {network} --replay "{text_of(plan[:int(steps)])}"')
            elif (network, kind, last) not in seen:
                seen.add((network, kind, last))
                shorter = shortened(network, options, plan, found)
                tell(f'    --networks {network} --replay "{text_of(shorter)}"')
    return tallies, failures


def replay(options: argparse.Namespace) -> int:
    [network] = options.networks
    with exact_products(), prepared(network, options) as pair:
        try:
            run_plan(pair, plan_of(options.replay), defaultdict(Tally), float("inf"))
        except Wrong as wrong:
            print(f"{type(wrong).__name__}: {wrong}")
            return 1
    print("right")
    return 0


def report(tallies: dict[str, Tallies], seconds: float, tell: Callable[[str], object] = print) -> bool:
    """Print the tallies by kind and by network. Returns whether nothing was wrong and OneDiff served enough calls."""
    def line(name: str, found: Sequence[Tally]) -> tuple[int, float]:
        calls = sum((tally.calls for tally in found), Counter())
        total = sum(calls.values())
        ours = sum(calls[route] for route in OURS)
        wrong = sum(tally.wrong for tally in found)
        again = sum(tally.not_again for tally in found)
        tell(
            f"{name:<18}{sum(tally.edits for tally in found):>7} edits {total:>7} calls"
            f"{100 * ours / (total or 1):>5.0f} % by OneDiff ({100 * calls['graph'] / (total or 1):.0f} % by graph)"
            f"{sum(tally.raised for tally in found):>6} raised by both {wrong:>5} wrong {again:>5} not again,"
            f" worst {max((tally.worst for tally in found), default=0):.0e}"
        )
        return wrong + again, ours / (total or 1)

    for kind in ("unedited", *KINDS):
        found = [of_network[kind] for of_network in tallies.values() if kind in of_network]
        if found:
            line(kind, found)
    enough = True
    for network, of_network in tallies.items():
        if not of_network:
            tell(f"{network}: not reached by so few edits")
            continue
        enough = line(network, list(of_network.values()))[1] >= LEAST_SERVED and enough
    wrong, served = line("all", [tally for of_network in tallies.values() for tally in of_network.values()])
    verdict = "right" if not wrong else f"{wrong} FAILURES"
    tell(f"{verdict} in {seconds:.0f} s" + ("" if enough else "; too few calls by OneDiff to show anything"))
    return not wrong and enough


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda known: lambda text: [one for one in text.split(",") if known.index(one) >= 0]  # noqa: E731
    made.add_argument("--edits", type=int, default=2000, help="edits made or undone, of all networks together")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.float32)
    made.add_argument("--networks", type=names(list(NETWORKS)), default=list(NETWORKS), help=", ".join(NETWORKS))
    made.add_argument("--kinds", type=names(list(KINDS)), default=list(KINDS), help=", ".join(KINDS))
    made.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    made.add_argument("--no-shorten", dest="shorten", action="store_false", help="print sequences whole")
    made.add_argument("--replay", help="a printed sequence")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    torch.set_num_threads(1)
    if options.replay:
        return replay(options)
    began = time.monotonic()
    tallies, _ = run(options)
    return 0 if report(tallies, time.monotonic() - began) else 1


if __name__ == "__main__":
    sys.exit(main())
