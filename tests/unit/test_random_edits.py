"""Short runs of the tool random_edits.py, and tests that the tool itself finds faults."""
from __future__ import annotations

import random
from typing import Any

import pytest
import random_edits
from random_edits import Calls, Make, plan_of, random_plan, text_of

from lib_onediff.runtime.runtime import Runtime
from lib_onediff.weights.module_tree import Tree

pytest.importorskip("ldm.modules.diffusionmodules.openaimodel", reason="stable-diffusion-sdkit is not installed")
# The kinds of edits that must work; the tool's others are for runs by hand.
KINDS = "weights,attributes,code,adapters,globals,classes,defaults,copies,inputs"


def options(*arguments: str) -> Any:
    return random_edits.parser().parse_args(["--no-shorten", *arguments])


@pytest.mark.parametrize("network", ["sdxl-graphs", "a1111", "anima"])
def test_after_random_edits_every_output_is_close_to_the_host_output_and_most_are_ours(network: str) -> None:
    """The tool edits a network at random between calls, and compares each output with that of the host's own forward.
    report() is also False if OneDiff computed too few of the calls."""
    lines: list[str] = []
    tallies, failures = random_edits.run(
        options("--networks", network, "--kinds", KINDS, "--edits", "50", "--seed", "1"), lines.append
    )
    is_right = random_edits.report(tallies, 0, lines.append)
    assert is_right and not failures, "\n".join(lines)


@pytest.mark.parametrize("broken", ["a change that is not seen", "an output a little off"])
def test_the_tool_finds_a_planted_fault(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """broken: the fault that is planted in OneDiff. Either a changed module counts as unchanged, or each output of ours
    has a relative error of 3e-5."""
    if broken == "an output a little off":
        monkeypatch.setattr(Runtime, "run", lambda *given, run=Runtime.run, **more: 1.00003 * run(*given, **more))
    else:
        monkeypatch.setattr(Tree, "is_unchanged", lambda tree, root: True)
    lines: list[str] = []
    tallies, failures = random_edits.run(options("--networks", "sd1", "--kinds", "code", "--edits", "12"), lines.append)
    assert failures and not random_edits.report(tallies, 0, lines.append), lines
    assert any(line.startswith("WRONG sd1") for line in lines), lines


def test_the_tool_fails_if_the_host_serves_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In such a run, no output of ours was tested."""
    monkeypatch.setattr(Runtime, "run", lambda runtime, unet, call, host, *given, **more: host())
    lines: list[str] = []
    tallies, _ = random_edits.run(options("--networks", "sd1", "--kinds", "weights", "--edits", "4"), lines.append)
    assert not random_edits.report(tallies, 0, lines.append) and "too few calls" in lines[-1], lines


def test_an_edit_plan_can_be_read_from_its_text_and_is_shortened_to_the_failing_edit(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is the list of edits and calls of a run. It is printed as text, from which a failure can be run again.
    Here, fails() is replaced: a plan fails if it contains one certain edit."""
    plan = random_plan(random.Random(0), random_edits.KINDS, 40)
    assert plan_of(text_of(plan)) == plan and len({step.edit.kind for step in plan if isinstance(step, Make)}) > 8
    culprit = [step for step in plan if isinstance(step, Make)][17]

    def fails(network: str, options: Any, steps: Any, how: Any) -> Any:
        return culprit in steps

    monkeypatch.setattr(random_edits, "fails", fails)
    wrong = random_edits.Wrong("far away")
    wrong.__notes__ = ["code", str(len(plan))]
    shorter = random_edits.shortened("sd1", options(), plan, wrong)
    assert culprit in shorter and len(shorter) <= 3 and isinstance(plan[-1], Calls) and shorter[-1] == plan[-1]
