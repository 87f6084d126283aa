"""Guidance that ends early: which calls are computed by the prompt's rows alone, what they answer, why not others."""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from builders import LAYOUTS, SMALL, diffusers_output, diffusers_unet, relative_error
from deepcache_builders import STEPS, WEBUI, Rig, call_of, equal_distances  # noqa: F401
from grid import grid
from torch import Tensor

from lib_onediff.core.additions import PerturbedAttention
from lib_onediff.core.call import Control, UNetCall
from lib_onediff.core.rows import PromptRows, half_of, take_rows
from lib_onediff.core.sampling import Sampling
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import Runtime

EARLY, LATE = "prompt alone", "whole"
KINDS = {"negative first": False, "prompt first": True}


@dataclass
class Samplings:
    """Samplings of a UNet with guidance, in the care of a runtime of their own; the oracle is the host's own UNet."""

    runtime: Runtime
    unet: Any
    prompt_first: bool = False
    host_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, config: dict[str, Any] = SMALL, prompt_first: bool = False, **options: Any) -> Samplings:
        runtime, unet = Runtime(), diffusers_unet(**config)
        runtime.configure(Settings(**{"guidance_end": 0.5, **options}))
        runtime.adopt(unet, host_traits=WEBUI)
        return cls(runtime, unet, prompt_first)

    def begin(self, times: Any = STEPS, **more: Any) -> None:
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: times, **more))

    def call(self, time: float, images: int = 1) -> UNetCall:
        """Of a step: the same latents for the prompt and for the negative prompt."""
        call = call_of(self.unet, time, ["cat", "dog", "ugly", "bad"][:images] + ["ugly", "bad"][:images])
        return replace(call, latent=call.latent[:images].repeat(2, 1, 1, 1))

    def host(self, call: UNetCall) -> Tensor:
        self.host_rows.append(call.latent.shape[0])
        return diffusers_output(self.unet, call)

    def rows(self, call: UNetCall) -> PromptRows:
        rows = half_of(call.latent.shape[0], self.prompt_first)
        return PromptRows(rows, lambda: self.host(take_rows(call, rows)))

    @torch.no_grad()
    def run(self, call: UNetCall, guidance: Callable[[], PromptRows | str] | None = None) -> tuple[str, Tensor]:
        before = self.runtime.status()["guidance"]["without_negative"]
        output = self.runtime.run(
            self.unet, call, lambda: self.host(call), guidance=guidance or (lambda: self.rows(call))
        )
        assert self.runtime.call_stats.route != "host", self.runtime.call_stats.reason
        return EARLY if self.runtime.status()["guidance"]["without_negative"] > before else LATE, output

    def sample(self, times: Iterable[float] = STEPS, **more: Any) -> list[str]:
        return [self.run(self.call(time, **more))[0] for time in times]

    @property
    def reason(self) -> str:
        return str(self.runtime.status()["guidance"]["reason"])


def steps(whole: int, count: int = 20) -> list[str]:
    return [LATE] * whole + [EARLY] * (count - whole)


@grid(layout=["small", "small XL"], kind=list(KINDS), images=[1, 2])
def test_half_of_the_steps_are_the_hosts_own_unet_on_the_prompts_rows(
    layout: str, kind: str, images: int
) -> None:
    config, prompt_first = LAYOUTS[layout], KINDS[kind]
    ours, plain = Samplings.of(config, prompt_first), Samplings.of(config, guidance_end=1.0)
    ours.begin()
    plain.begin()
    found = []
    for time in STEPS:
        call = ours.call(time, images)
        which, output = ours.run(call)
        found.append(which)
        if which == LATE:
            assert torch.equal(output, plain.run(call)[1])
            continue
        prompt, negative = output[half_of(2 * images, prompt_first)], output[half_of(2 * images, not prompt_first)]
        alone = diffusers_output(ours.unet, take_rows(call, half_of(2 * images, prompt_first)))
        assert relative_error(prompt, alone) < 1e-5 and torch.equal(prompt, negative)
        assert relative_error(output, diffusers_output(ours.unet, call)) > 1e-3
    assert found == steps(10)
    # A shape like any other: proved against the host's own forward of as many rows.
    assert {entry.key.batch for entry in ours.runtime.table.entries()} == {images, 2 * images}
    assert {2 * images, images} == set(ours.host_rows) and ours.reason == ""
    assert ours.runtime.status()["guidance"] == {"without_negative": 10, "reason": ""}


@pytest.mark.parametrize(("end", "whole"), [(0.0, 1), (0.25, 5), (0.26, 6), (0.5, 10), (0.96, 20), (1.0, 20)])
def test_the_fraction_of_the_steps(end: float, whole: int) -> None:
    ours = Samplings.of(guidance_end=end)
    for _ in range(2):
        ours.begin()
        assert ours.sample() == steps(whole)


def test_steps_that_nobody_announces_are_learned() -> None:
    ours = Samplings.of()
    for _ in range(2):
        ours.begin(None)
        assert ours.sample() == steps(10)
    # The next image begins without a word.
    assert ours.sample() == steps(10)


def test_a_sampler_that_calls_twice_a_step() -> None:
    """As Heun's: the second call is where the next step begins."""
    ours = Samplings.of()
    ours.begin()
    times = [time for pair in zip(STEPS, [*STEPS[1:], 0.5], strict=True) for time in pair]
    assert ours.sample(times).index(EARLY) == 19


def test_a_refiner_goes_on_where_the_first_unet_was() -> None:
    ours, refiner = Samplings.of(), Samplings.of()
    refiner.runtime = ours.runtime
    refiner.runtime.adopt(refiner.unet, host_traits=WEBUI)
    sampling = Sampling(times=lambda: STEPS)
    for samplings in (ours, refiner):
        samplings.runtime.begin_sampling(samplings.unet, sampling)
        ours.runtime.managed_unet(samplings.unet).sampling = sampling
    assert ours.sample(STEPS[:14]) == steps(10, 14)
    # Its first step shows what calls there are.
    assert refiner.sample(STEPS[14:]) == steps(1, 6)


@pytest.mark.parametrize(("total", "rests"), [(9, True), (10, False)])
def test_few_steps_are_whole(total: int, rests: bool) -> None:
    ours = Samplings.of()
    ours.begin(STEPS[:total])
    assert (EARLY in ours.sample(STEPS[:total])) is not rests
    assert ("fewer than 10 steps" in ours.reason) is rests


def test_off_nobody_is_asked() -> None:
    ours = Samplings.of(guidance_end=1.0)
    ours.begin()
    for time in STEPS:
        ours.run(ours.call(time), lambda: pytest.fail("asked"))
    assert ours.runtime.status()["guidance"] == {"without_negative": 0, "reason": ""}


def test_a_change_of_the_option_in_mid_sampling() -> None:
    ours = Samplings.of()
    ours.begin()
    assert ours.sample(STEPS[:12]) == steps(10, 12)
    ours.runtime.configure(Settings())
    assert ours.sample(STEPS[12:14]) == [LATE, LATE] and ours.reason == ""


# --- why not --------------------------------------------------------------------------------------------------------


def refused(ours: Samplings, change: Callable[[UNetCall], UNetCall] = lambda call: call, **more: Any) -> str:
    """The reason at the end of a sampling that is computed whole."""
    for time in STEPS:
        call = change(ours.call(time))
        assert ours.run(call, **more)[0] == LATE
    assert ours.reason.startswith("Guidance end rests: ")
    return ours.reason.removeprefix("Guidance end rests: ")


def test_a_host_that_cannot_tell_the_rows() -> None:
    ours = Samplings.of()
    ours.begin()
    assert refused(ours, guidance=lambda: "the host's reason") == "the host's reason"
    with torch.no_grad():
        call = ours.call(1.0)
        ours.runtime.run(ours.unet, call, lambda: ours.host(call))
    assert ours.reason.endswith("the caller does not say which rows are the negative prompt's")


def test_what_the_sampler_says_counts() -> None:
    ours = Samplings.of()
    ours.begin(why_not="the sampler's churn moves its steps")
    assert refused(ours) == "the sampler's churn moves its steps"


def test_images_at_different_steps() -> None:
    ours = Samplings.of()
    ours.begin()
    assert "different steps" in refused(ours, lambda call: replace(call, timestep=call.timestep - torch.arange(2)))


def test_halves_of_other_latents_are_no_guidance() -> None:
    """As where somebody calls a pipeline's UNet himself."""
    ours = Samplings.of()
    ours.begin()
    assert "the same latents" in refused(ours, lambda call: replace(call, latent=torch.randn_like(call.latent)))


def test_perturbed_rows_are_computed_whole() -> None:
    ours = Samplings.of(verify=False)
    ours.begin()
    perturbed = PerturbedAttention(frozenset(), 1)
    assert "perturbed" in refused(ours, lambda call: replace(call, perturbed=perturbed))


def test_a_step_with_other_calls_beside_prompt_and_negative_prompt() -> None:
    """Several prompts that do not fit into one call: the first step shows it."""
    ours = Samplings.of(guidance_end=0.0)
    ours.begin()
    for time in STEPS:
        call = ours.call(time)
        assert ours.run(call)[0] == ours.run(call, lambda: "several prompts")[0] == LATE
    assert ours.run(ours.call(1.0))[0] == LATE and "and others" in ours.reason
    ours.begin()
    assert ours.sample() == steps(1)


def test_residuals_are_cut_with_the_rows() -> None:
    # The host of these tests adds no residuals.
    ours = Samplings.of(verify=False)
    residual = torch.cat([torch.zeros(1, 16, 8, 8), torch.ones(1, 16, 8, 8)])
    control = Control(input=(residual,), output=(None, None, None, residual))
    ours.begin()
    *_, (kind, output) = [ours.run(replace(ours.call(time), control=control)) for time in STEPS]
    plain = Samplings.of(verify=False, guidance_end=1.0)
    plain.begin()
    whole = plain.run(replace(plain.call(STEPS[-1]), control=control))[1]
    assert kind == EARLY and relative_error(output[1:], whole[1:]) < 1e-5 and torch.equal(output[0], output[1])


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_fault_of_ours_runs_the_whole_call(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("onediff"), "propagate", True)
    ours = Samplings.of()
    ours.begin()

    def broken() -> PromptRows:
        raise RuntimeError("no such rows")

    plain = Samplings.of(guidance_end=1.0)
    plain.begin()
    call = ours.call(STEPS[0])
    assert torch.equal(ours.run(call, broken)[1], plain.run(call)[1])
    assert "no such rows" in ours.reason and any("no such rows" in fault for fault in ours.runtime.guard.faults)
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    assert ours.sample(STEPS[1:]) == steps(19, 19) and ours.reason == "Guidance end rests: a fault of OneDiff"


def test_where_the_host_fails_on_half_it_runs_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Samplings.of()
    ours.begin()
    assert ours.sample(STEPS[:10]) == steps(10, 10)

    def fails() -> Tensor:
        raise ZeroDivisionError("half a call")

    call = ours.call(STEPS[10])
    kind, output = ours.run(call, lambda: PromptRows(half_of(2, False), fails))
    assert kind == LATE and relative_error(output, diffusers_output(ours.unet, call)) < 1e-5
    assert "half a call" in ours.reason and ours.sample(STEPS[11:]) == steps(9, 9)


def test_a_host_without_memory_is_not_asked_for_more() -> None:
    ours = Samplings.of()
    ours.begin()
    ours.sample(STEPS[:10])

    def full() -> Tensor:
        raise torch.cuda.OutOfMemoryError("full")

    ours.host_rows.clear()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        ours.run(ours.call(STEPS[10]), lambda: PromptRows(half_of(2, False), full))
    assert ours.host_rows == []


@pytest.mark.parametrize(("total", "cached"), [(9, 0), (10, 6)])
def test_deepcache_rests_below_as_many_steps(total: int, cached: int) -> None:
    rig = Rig.of()
    for _ in range(2):
        rig.begin(STEPS[:total])
        assert rig.sample(STEPS[:total]).count("cached") == cached
        assert (rig.reason == "DeepCache rests: the sampling has fewer than 10 steps") is (cached == 0)
        assert rig.log.count("whole") == (0 if cached else total)


# --- beside DeepCache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [2, 3])
def test_deepcache_begins_with_a_whole_call_where_the_batch_changes(interval: int) -> None:
    ours = Samplings.of(deepcache_interval=interval)
    ours.begin()
    passes = []
    for time in STEPS:
        before = dict(ours.runtime.status()["deepcache"])
        call = ours.call(time)
        kind, output = ours.run(call)
        after = ours.runtime.status()["deepcache"]
        (name,) = (name for name in ("full", "cached") if after[name] != before[name])
        passes.append((kind, name))
        if name == "full":
            expected = diffusers_output(ours.unet, call)
            if kind == EARLY:
                expected = expected[1:].repeat(2, 1, 1, 1)
            assert relative_error(output, expected) < 1e-5
    assert [kind for kind, _ in passes] == steps(10)
    scheduled = ["full" if index % interval == 0 or index == 19 else "cached" for index in range(20)]
    names = [name for _, name in passes]
    assert names[:10] == scheduled[:10] and names[10] == "full"
    # Until the schedule's next whole step there is a feature only if that whole call stands for its own.
    assert names[-(20 - 12):] == scheduled[12:]
