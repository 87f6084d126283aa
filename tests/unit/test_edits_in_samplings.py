"""A short run of the tool for random edits between the steps of samplings, and a test that it finds errors."""
from __future__ import annotations

import edits_in_samplings
import pytest

from lib_onediff.weights.baseline import Parameters
from lib_onediff.weights.module_tree import ModuleStates


@pytest.mark.parametrize("network", ["sdxl", "cosmos", "anima"])
def test_an_edit_counts_at_the_next_step_that_reads_it(network: str) -> None:
    report = edits_in_samplings.run(network, 30, seed=3)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.steps["cached", "graph"] > 60, report.steps


@pytest.mark.parametrize("blind", [ModuleStates.are_unchanged, Parameters.in_place])
def test_a_part_that_is_not_compared_is_found(blind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if blind is Parameters.in_place:
        monkeypatch.setattr(Parameters, "are_same", lambda parameters, present: True)
        monkeypatch.setattr(Parameters, "were_edited", lambda parameters, present: False)
    else:
        monkeypatch.setattr(ModuleStates, "are_unchanged", lambda states, root: True)
    report = edits_in_samplings.run("sdxl", 60, seed=1, kinds=["code", "modules", "weights"], most_wrong=1)
    assert report.wrong
