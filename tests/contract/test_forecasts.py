"""Output forecast in every WebUI: which sampler it is, each says by its sampling function."""
from __future__ import annotations

from typing import Any

import pytest
from builders import relative_error
from contract_hosts import Host
from test_guided_samplings import Guided, Sampler12

from lib_onediff.runtime.runtime import runtime

# Of 12 steps at interval 3.
COMPUTED = [0, 1, 2, 4, 8, 11]


class Euler(Sampler12):
    """It adds no noise between its steps."""

    def sample_euler(self, model: Any, x: Any, sigmas: Any) -> None:
        """The sampling function; its name is what counts."""

    func = sample_euler


class Ancestral(Sampler12):
    def sample_euler_ancestral(self, model: Any, x: Any, sigmas: Any, eta: float = 1.0) -> None:
        """The sampling function; its name is what counts."""

    func = sample_euler_ancestral


def sampled(host: Host, sampler: type[Sampler12], **options: Any) -> tuple[Guided, list[Any], list[int]]:
    """The steps of a sampling, and which of them were computed."""
    guided = Guided(host)
    guided.sampler = sampler
    guided.start(**{"guidance_end": 1.0, "forecast_interval": 3, **options})
    steps, computed, before = [], [], runtime.status()["forecast"]["calls"]
    for place, step in enumerate(guided.steps()):
        steps.append(step)
        if runtime.status()["forecast"]["calls"] == before:
            computed.append(place)
        before = runtime.status()["forecast"]["calls"]
    return guided, steps, computed


def test_six_of_twelve_steps_are_computed_and_are_the_hosts(host: Host) -> None:
    guided, steps, computed = sampled(host, Euler)
    assert computed == COMPUTED, runtime.status()["forecast"]["reason"]
    assert runtime.status()["forecast"]["reason"] == "" and runtime.guard.faults == []
    guided.host.switch(False)
    for place, step in enumerate(steps):
        distance = relative_error(step.prediction, guided.by_host(step))
        assert distance < 1e-5 if place in computed else distance > 1e-5, (place, distance)


def test_without_a_negative_prompt_from_half_of_the_steps_on(host: Host) -> None:
    guided, steps, computed = sampled(host, Euler, guidance_end=0.5)
    # There the prompt alone begins a history of its own.
    assert computed == sorted({*COMPUTED, 6, 7}) and runtime.guard.faults == []
    assert [step.is_early for step in steps] == [place >= 6 for place in range(12)]


@pytest.mark.parametrize(("sampler", "reason"), [(Ancestral, "Euler and DDIM"), (Sampler12, "Euler and DDIM")])
def test_other_samplers_are_computed_whole(host: Host, sampler: type[Sampler12], reason: str) -> None:
    _, _, computed = sampled(host, sampler)
    assert computed == list(range(12)) and runtime.guard.faults == []
    found = runtime.status()["forecast"]["reason"]
    assert found.startswith("Output forecast rests: ") and reason in found


def test_off_is_off(host: Host) -> None:
    _, _, computed = sampled(host, Euler, deepcache_interval=1)
    assert computed == list(range(12)) and runtime.status()["forecast"]["reason"] == ""
