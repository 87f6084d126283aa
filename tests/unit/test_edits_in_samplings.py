"""A short run of edits_in_samplings, a tool for random edits between the steps of samplings, and a test that the tool
finds errors."""
from __future__ import annotations

import edits_in_samplings
import pytest

from lib_onediff.weights.baseline import Parameters
from lib_onediff.weights.module_tree import ModuleStates


@pytest.mark.parametrize("network", ["sdxl", "cosmos", "anima"])
def test_an_edit_takes_effect_at_the_next_step_that_reads_it(network: str) -> None:
    """The tool edits weights, code and modules at random between steps. It compares each output with that of a copy of
    the network, which the host's own code runs. More than 60 steps must be replays of DeepCache's cached passes."""
    report = edits_in_samplings.run(network, 30, seed=3)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.steps["cached", "graph"] > 60, report.steps


@pytest.mark.parametrize("blind", [ModuleStates.are_unchanged, Parameters.in_place])
def test_the_tool_finds_an_error_in_comparing_code_or_weights(blind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison named blind is patched to report no change. Replays then use old weights or code, and the tool
    must report a wrong output."""
    if blind is Parameters.in_place:
        monkeypatch.setattr(Parameters, "are_same", lambda parameters, present: True)
        monkeypatch.setattr(Parameters, "were_edited", lambda parameters, present: False)
    else:
        monkeypatch.setattr(ModuleStates, "are_unchanged", lambda states, root: True)
    report = edits_in_samplings.run("sdxl", 60, seed=1, kinds=["code", "modules", "weights"], most_wrong=1)
    assert report.wrong
