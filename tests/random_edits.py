"""Makes random edits of networks between their calls, and compares each output of OneDiff with the output of a twin: a
network with the same weights and edits, which runs the host's own code.

    python tests/random_edits.py --edits 2000 --seed 0 [--device cuda] [--dtype float16] [--networks sd1,anima]
        [--kinds globals,classes] [--seconds 600]
    python tests/random_edits.py --networks sdxl --replay "default_dtype:12; calls:1:7:announced"

The exit status is 1 if an output was wrong, if OneDiff did not serve a call after all edits were undone, or if it
served so few calls that the run shows nothing.
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

# The relative error that rounding explains, by dtype. limit_of measures whether a network amplifies it.
CLOSE = {torch.float32: 1e-5, torch.float64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# The allowed error, as a multiple of the change of the host's own output when its inputs change by one rounding.
TIMES_A_ROUNDING = 4
EDITS_OF_A_PLAN = 30
# The largest number of edits in effect at once.
MOST_STANDING = 3
# If OneDiff served a smaller part of the calls, the run has shown too little.
LEAST_SERVED = 0.25
OURS = ("graph", "plain")
# How many shorter sequences are tried for each failure.
MOST_TRIALS = 24


class Edit(NamedTuple):
    """A kind of edit. make(pair, seed) edits both networks of a pair in the same way, and returns a function that
    undoes it, or None if it is not undone."""

    kind: str
    name: str
    make: Callable[[Pair, int], Undo | None]


class EditFailed(Exception):
    """An edit raised an exception on one of the two networks only."""


def of_both(edit: Callable[[Any, random.Random], Undo | None]) -> Callable[[Pair, int], Undo | None]:
    """Edit.make for an edit of one network: it is made to both, with the same random choices."""
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
    """Edit.make for an edit of code that both networks run. The edit gets the pair's sites: the names of functions on
    which the network's output depends."""
    return lambda pair, seed: edit(pair.sites, random.Random(seed))


def of_both_with_sites(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    """As of_both, for an edit that also gets the pair's sites (see with_sites)."""
    def make(pair: Pair, seed: int) -> Undo | None:
        def one(network: Any, chance: random.Random) -> Undo | None:
            return edit(network, pair.sites, chance)

        one.__name__ = edit.__name__
        return of_both(one)(pair, seed)

    return make


def on_theirs(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    """Edit.make for an edit that changes all networks in the process. The edit gets the twin, to choose what to
    edit."""
    return lambda pair, seed: edit(pair.theirs, random.Random(seed))


def on_pair(edit: Callable[..., Undo | None]) -> Callable[[Pair, int], Undo | None]:
    """Edit.make for an edit that gets the whole pair."""
    return lambda pair, seed: edit(pair, random.Random(seed))


def edits(kind: str, functions: Sequence[Any], adapt: Callable[[Any], Any]) -> list[Edit]:
    """The edits of these functions. A function that is listed twice is chosen twice as often. adapt: makes Edit.make of
    a function."""
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
    """The step of a plan that makes an edit."""

    edit: Edit
    seed: int

    def __str__(self) -> str:
        return f"{self.edit.name}:{self.seed}"


class UndoLast(NamedTuple):
    """The step of a plan that undoes the last edit in effect."""

    def __str__(self) -> str:
        return "undo"


class Calls(NamedTuple):
    """The step of a plan that makes `count` calls with the inputs of a seed. is_announced: whether the host
    announces the begin and end of the image."""

    count: int
    seed: int
    is_announced: bool

    def __str__(self) -> str:
        return f"calls:{self.count}:{self.seed}:{'announced' if self.is_announced else 'unannounced'}"


Step = Make | UndoLast | Calls


def random_plan(chance: random.Random, kinds: Sequence[str], count: int) -> list[Step]:
    """A plan of `count` edits, all undone at the end, with calls after each edit and each undoing. All kinds are
    equally likely. Most calls have the same inputs, so that some of them are replayed."""
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
    """A plan as a text, for --replay."""
    return "; ".join(map(str, plan))


def plan_of(text: str) -> list[Step]:
    """The plan of a text that text_of has returned."""
    plan: list[Step] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        name, *numbers = part.split(":")
        if name == "undo":
            plan.append(UndoLast())
        elif name == "calls":
            plan.append(Calls(int(numbers[0]), int(numbers[1]), numbers[2] == "announced"))
        else:
            plan.append(Make(BY_NAME[name], int(numbers[0])))
    return plan


# --- running them -------------------------------------------------------------------------------------------------

class Wrong(Exception):
    """An output was wrong. The message says how, in one line."""


class NotAgain(Wrong):
    """OneDiff did not serve a call after all edits were undone."""


@dataclass
class Tally:
    """The counts of one kind of edits.

    edits: how many were made or undone. calls: the calls after them, by route. raised: calls in which both networks
    raised exceptions of the same class. wrong, not_again: how many failed with Wrong and NotAgain. worst: the largest
    relative error.
    """

    edits: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    raised: int = 0
    wrong: int = 0
    not_again: int = 0
    worst: float = 0.0


Tallies = dict[str, Tally]


def tensors_in(given: Given) -> list[Tensor]:
    """The tensors among the arguments of a call, also in dicts."""
    found: list[Tensor] = []
    for value in given.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(value)
    return found


def attempt(pair: Pair, caller: Any, given: Given) -> Any:
    """(the output of a call, or its exception; the state of torch's random generator afterwards, or None on a GPU and
    after an exception). Each call starts with the same state."""
    torch.manual_seed(0)
    try:
        answer = pair.answer(caller, given)
    except Exception as error:
        return error, None
    return answer, torch.default_generator.get_state() if pair.device.type == "cpu" else None


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The relative error of ours; infinite if the two are not finite at the same places."""
    ours, theirs = (one.detach().to("cpu", torch.float64).flatten() for one in (ours, theirs))
    finite = torch.isfinite(theirs)
    if not torch.equal(finite, torch.isfinite(ours)):
        return float("inf")
    size = float(theirs[finite].square().sum().sqrt())
    return float((ours[finite] - theirs[finite]).square().sum().sqrt()) / (size or 1.0)


def limit_of(pair: Pair, caller: Any, given: Given, theirs: Tensor) -> float:
    """The relative error that rounding explains: TIMES_A_ROUNDING times the change of the host's own output when the
    latent and the context change by one rounding, but at least CLOSE."""
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
    """Make a call of both networks, and count it. Raises Wrong if OneDiff's output, exception or random numbers differ
    from the twin's, or if it wrote to an input."""
    before = runtime.call_stats.calls.copy()
    versions = [one._version for one in tensors_in(given) if not one.is_inference()]
    ours, state = attempt(pair, ours_by, given)
    taken = runtime.call_stats.calls - before
    tally.calls.update(taken)
    if versions != [one._version for one in tensors_in(given) if not one.is_inference()]:
        raise Wrong(f"{name}: OneDiff wrote to an input")
    theirs, expected_state = attempt(pair, theirs_by, given)
    where = f"{name} by {', '.join(taken) or 'no route'} ({runtime.status()['reason'] or 'no reason'})"
    if isinstance(ours, Exception) or isinstance(theirs, Exception):
        if type(ours) is not type(theirs):
            raise Wrong(f"{where}: {ours!r:.150}, and the host's is {theirs!r:.150}")
        tally.raised += 1
        return
    for fact in ("shape", "dtype", "device", "requires_grad"):
        if getattr(ours, fact) != getattr(theirs, fact):
            raise Wrong(f"{where}: {fact} {getattr(ours, fact)}, the host's {getattr(theirs, fact)}")
    if state is not None and not torch.equal(state, expected_state):
        raise Wrong(f"{where}: it drew other random numbers than the host")
    error = distance(ours, theirs)
    if error > 1e-5 and error > (most := limit_of(pair, theirs_by, given, theirs)):
        again = repeated(pair, ours_by, theirs_by, given, theirs)
        raise Wrong(f"{where}: an error of {error:.1e}, of which rounding explains {most:.0e}{again}")
    tally.worst = max(tally.worst, error)


def repeated(pair: Pair, ours_by: Any, theirs_by: Any, given: Given, theirs: Tensor) -> str:
    """A text with the errors of a second output of each network against the host's first output. It shows whether a
    fault lasts."""
    found = ""
    for name, caller in (("the host", theirs_by), ("ours", ours_by)):
        again, _ = attempt(pair, caller, given)
        second = f"{again!r:.100}" if isinstance(again, Exception) else f"{distance(again, theirs):.1e}"
        found += f"; {name} again: {second}"
    return found


def given_now(pair: Pair, seed: int) -> Given:
    """The inputs of a seed, changed by the edits of inputs that are in effect. A change that raises an error on the
    result of another one is left out."""
    given = pair.inputs(seed)
    for change in pair.changes:
        with contextlib.suppress(Exception):
            given = change(given, pair.names)
    return given


def run_plan(pair: Pair, plan: Sequence[Step], tallies: Tallies, deadline: float) -> int:
    """Run the steps, and undo all edits at the end. Returns how many edits were made or undone.

    Raises Wrong at the first wrong output. Its __notes__ are the kind of the last edit, and the number of steps so far.
    deadline: by time.monotonic(); no step begins after it.
    """
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
    """Make an edit. Returns the function that undoes it; None if it is never undone, or if the networks have nothing to
    edit. Raises Wrong if it only works on one of them."""
    try:
        return step.edit.make(pair, step.seed)
    except Inapplicable:
        return None
    except EditFailed as failed:
        raise Wrong(str(failed)) from failed


def run_calls(pair: Pair, step: Calls, tally: Tally, is_edited: bool) -> None:
    """Make the calls of a step, also of copies of the networks. Raises Wrong, and NotAgain if no edit is in effect and
    OneDiff does not serve the next image."""
    with pair.image(step.is_announced):
        for _ in range(step.count):
            compare(pair, "the network", pair.ours, pair.theirs, given_now(pair, step.seed), tally)
            for name, ours, theirs in list(pair.callers):
                compare(pair, name, ours, theirs, given_now(pair, step.seed), tally)
    if is_edited or not step.is_announced:
        return
    with pair.image(True):
        compare(pair, "the next image", pair.ours, pair.theirs, given_now(pair, step.seed), tally)
    if runtime.status()["route"] not in OURS:
        raise NotAgain(f"by {runtime.status()['route']} ({runtime.status()['reason'] or 'no reason'})")


def fails(network: str, options: argparse.Namespace, plan: Sequence[Step], how: type[Wrong]) -> Wrong | None:
    """The exception with which a plan fails on new networks; None if it does not fail with one of class `how`."""
    with prepared(network, options) as pair:
        try:
            run_plan(pair, plan, defaultdict(Tally), time.monotonic() + 60)
        except Wrong as wrong:
            return wrong if type(wrong) is how else None
    return None


def shortened(network: str, options: argparse.Namespace, plan: list[Step], wrong: Wrong) -> list[Step]:
    """A shorter plan that fails in the same way, found by leaving out first halves, then smaller parts. An edit is left
    out together with its undoing."""
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


def undone_at(plan: Sequence[Step], index: int) -> int:
    """The index of the step that undoes the edit of the step with this index; -1 if none does."""
    depth = 0
    for number in range(index, len(plan)):
        depth += isinstance(plan[number], Make) - isinstance(plan[number], UndoLast)
        if depth == 0:
            return number
    return -1


@contextlib.contextmanager
def prepared(network: str, options: argparse.Namespace) -> Iterator[Pair]:
    """A context with a new pair of networks, in a runtime without any state."""
    forget_everything()
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        # Do not time the host's forward.
        patch.setattr(verify, "SECONDS_TO_TIME_THE_HOST", -1.0)
        try:
            with NETWORKS[network](options.device, options.dtype) as pair:
                pair.key = network
                yield pair
        finally:
            forget_everything()


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """A context without TF32, and without warnings and logs."""
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
    """Run random plans on each network in turn, until options.edits were made. Returns the tallies by network and kind,
    and the number of failures."""
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
                # At least one, so that the run also ends if a network is wrong before any edit.
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
    """Run the plan of --replay. Returns the exit status."""
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
            tell(f"{network}: not tested, because there were too few edits")
            continue
        enough = line(network, list(of_network.values()))[1] >= LEAST_SERVED and enough
    wrong, served = line("all", [tally for of_network in tallies.values() for tally in of_network.values()])
    verdict = "right" if not wrong else f"{wrong} FAILURES"
    tell(f"{verdict} in {seconds:.0f} s" + ("" if enough else "; OneDiff served too few calls to show anything"))
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
    made.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many seconds")
    made.add_argument("--no-shorten", dest="shorten", action="store_false", help="print failing sequences whole")
    made.add_argument("--replay", help="run a sequence that was printed for a failure")
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
