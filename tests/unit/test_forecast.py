"""Output forecast: which steps run the UNet, what the others answer, and why not."""
from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from builders import SMALL, SMALL_XL, diffusers_output, diffusers_unet
from deepcache_builders import STEPS, WEBUI, call_of
from torch import Tensor

from lib_onediff.core.call import UNetCall
from lib_onediff.core.patch_points import PatchPoints
from lib_onediff.core.rows import PromptRows, half_of, take_rows
from lib_onediff.core.sampling import OTHER_SAMPLER, UNKNOWN_SAMPLER, Sampling
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import Runtime
from lib_onediff.steps.forecast import OutputHistory

FORECAST, COMPUTED = "forecast", "computed"
# Of 20 steps with interval 3: DeepCache's whole steps, the first three, and the last.
WHOLE_OF_20 = {0, 1, 2, 3, 6, 9, 12, 16, 19}


@dataclass
class Samplings:
    """Samplings of a UNet in the care of a runtime of their own."""

    runtime: Runtime
    unet: Any

    @classmethod
    def of(cls, config: dict[str, Any] = SMALL, **options: Any) -> Samplings:
        runtime, unet = Runtime(), diffusers_unet(**config)
        runtime.configure(Settings(**{"deepcache_interval": 3, "deepcache_depth": 0, **options}))
        runtime.adopt(unet, host_traits=WEBUI)
        return cls(runtime, unet)

    def begin(self, times: Any = STEPS, **more: Any) -> None:
        known = {"why_no_forecast": lambda: "", **more}
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: times, **known))

    @torch.no_grad()
    def run(self, call: UNetCall, **more: Any) -> tuple[str, Tensor]:
        before = self.runtime.status()["forecast"]["calls"]
        output = self.runtime.run(self.unet, call, lambda: diffusers_output(self.unet, call), **more)
        return FORECAST if self.runtime.status()["forecast"]["calls"] > before else COMPUTED, output

    def call(self, time: float, **more: Any) -> UNetCall:
        return call_of(self.unet, time, **more)

    def sample(self, times: Iterable[float] = STEPS, **more: Any) -> list[str]:
        return [self.run(self.call(time, **more))[0] for time in times]

    @property
    def reason(self) -> str:
        return str(self.runtime.status()["forecast"]["reason"])


def steps(whole: Iterable[int] = WHOLE_OF_20, count: int = 20) -> list[str]:
    return [COMPUTED if index in whole else FORECAST for index in range(count)]


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
def test_the_other_steps_are_on_the_line_through_the_last_two(config: dict[str, Any]) -> None:
    ours, plain = Samplings.of(config), Samplings.of(config, deepcache_interval=1)
    ours.begin()
    plain.begin()
    computed: list[tuple[float, Tensor]] = []
    found = []
    for time in STEPS:
        call = ours.call(time)
        kind, output = ours.run(call)
        found.append(kind)
        if kind == COMPUTED:
            assert torch.equal(output, plain.run(call)[1])
            computed.append((time, output))
            continue
        (t0, o0), (t1, o1) = computed[-2:]
        expected = o1.double() + (o1.double() - o0.double()) * ((time - t1) / (t1 - t0))
        assert output.dtype == o1.dtype and torch.allclose(output.double(), expected, atol=1e-5)
    assert found == steps()
    assert ours.runtime.status()["forecast"] == {"calls": 11, "reason": ""}
    # A forecast is no call of the UNet: it has no route and no time.
    assert ours.runtime.call_stats.total == 9 and ours.runtime.table.entries()[0].uses == 9


@pytest.mark.parametrize(("interval", "whole"), [
    (1, set(range(20))), (2, {0, 1, 2, 4, 6, 8, 10, 12, 14, 17, 19}), (4, {0, 1, 2, 5, 9, 14, 19}),
])
def test_how_many_are_computed(interval: int, whole: set[int]) -> None:
    ours = Samplings.of(deepcache_interval=interval)
    for _ in range(2):
        ours.begin()
        assert ours.sample() == steps(whole)


def test_the_host_may_go_on_computing_in_an_output() -> None:
    ours, other = Samplings.of(), Samplings.of()
    for each in (ours, other):
        each.begin()
    for time in STEPS[:5]:
        call = ours.call(time)
        output, expected = ours.run(call)[1], other.run(call)[1]
        assert torch.equal(output, expected)
        output.mul_(3)


def test_prompts_and_sizes_that_take_turns_are_told_apart() -> None:
    ours, alone = Samplings.of(), Samplings.of()
    ours.begin()
    alone.begin()
    found = []
    for time in STEPS:
        cat, dog = ours.call(time, names=("cat",)), ours.call(time, names=("dog",))
        of_cat, of_dog = ours.run(cat), ours.run(dog)
        large = ours.run(ours.call(time, names=("cat",), size=16))
        found.append(of_cat[0])
        assert of_cat[0] == of_dog[0] == large[0] and large[1].shape[-1] == 16
        assert not torch.equal(of_cat[1], of_dog[1])
        assert torch.equal(alone.run(cat)[1], of_cat[1])
    assert found == steps()


def test_a_prompt_that_changes_begins_a_history() -> None:
    ours = Samplings.of()
    ours.begin()
    found = ours.sample(STEPS[:10]) + [ours.run(ours.call(time, names=("dog", "ugly")))[0] for time in STEPS[10:]]
    assert found == steps(WHOLE_OF_20 | {10, 11})


def test_weights_that_change_begin_a_history() -> None:
    ours = Samplings.of()
    ours.begin()
    found = ours.sample(STEPS[:10])
    with torch.no_grad():
        ours.unet.conv_in.weight.mul_(1.5)
    assert found + ours.sample(STEPS[10:]) == steps(WHOLE_OF_20 | {10, 11})


def test_two_calls_a_step() -> None:
    """The second, as Heun makes it, at the timestep where the next step begins."""
    ours = Samplings.of()
    ours.begin()
    found = []
    for time, following in zip(STEPS, [*STEPS[1:], 0.5], strict=True):
        kinds = ours.run(ours.call(time))[0], ours.run(ours.call(following, seed=1))[0]
        found.append(kinds)
    # By its timestep, a second call belongs to the step that begins there.
    assert [kind for kind, _ in found] == steps()
    assert [kind for _, kind in found] == [*steps()[1:], COMPUTED]


def test_img2img_and_a_second_sampling_begin_anew() -> None:
    ours = Samplings.of()
    ours.begin()
    ours.sample(STEPS[:15])
    ours.begin()
    # 12 steps of 20: its first step is the one that comes first.
    assert ours.sample(STEPS[8:]) == steps({0, 1, 2, 4, 8, 11}, 12)


def test_where_the_steps_are_not_known_they_are_counted() -> None:
    ours = Samplings.of()
    ours.begin(None)
    assert ours.sample() == steps({0, 1, 2, 3, 6, 9, 12, 15, 18, 19})


@pytest.mark.parametrize(("more", "why"), [
    ({"why_no_forecast": lambda: OTHER_SAMPLER}, OTHER_SAMPLER), ({"why_not": "it jumps"}, "it jumps"),
    ({"times": STEPS[:9]}, "the sampling has fewer than 10 steps"),
])
def test_samplings_without_forecasts(more: dict[str, Any], why: str) -> None:
    ours = Samplings.of()
    ours.begin(**more)
    assert ours.sample(more.get("times", STEPS)) == [COMPUTED] * len(more.get("times", STEPS))
    assert ours.reason == f"Output forecast rests: {why}"


def test_nobody_says_which_sampler_it_is() -> None:
    ours = Samplings.of()
    ours.runtime.begin_sampling(ours.unet, Sampling(times=lambda: STEPS))
    assert ours.sample() == [COMPUTED] * 20 and UNKNOWN_SAMPLER in ours.reason


def test_images_at_different_steps() -> None:
    ours = Samplings.of()
    ours.begin()
    call = ours.call(STEPS[5])
    ours.run(replace(call, timestep=torch.tensor([501.0, 401.0])))
    assert "at different steps" in ours.reason


def test_tiles() -> None:
    ours = Samplings.of()
    ours.begin()
    found = [ours.run(ours.call(time, seed=tile))[0] for time in STEPS for tile in range(2)]
    assert found == [COMPUTED] * 40 and "tiles" in ours.reason


def test_functions_of_other_extensions_are_called_at_every_step() -> None:
    ours = Samplings.of()
    ours.begin()
    found = [ours.run(replace(ours.call(time), patches=PatchPoints()))[0] for time in STEPS]
    assert found == [COMPUTED] * 20 and "other extensions" in ours.reason


def test_the_hosts_outputs_are_not_continued() -> None:
    ours = Samplings.of()
    ours.begin()
    # Recorded gradients, as here, are the host's.
    for time in STEPS[:6]:
        call = ours.call(time)
        ours.runtime.run(ours.unet, call, lambda call=call: diffusers_output(ours.unet, call))
    assert ours.runtime.call_stats.route == "host" and ours.runtime.status()["forecast"]["calls"] == 0


def test_a_fault_of_ours_costs_a_reason_and_a_log_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours = Samplings.of()
    ours.begin()

    def fails(*args: Any) -> Tensor:
        raise RuntimeError("the line broke")

    monkeypatch.setattr(OutputHistory, "forecast", fails)
    with caplog.at_level(logging.ERROR, logger="onediff"):
        assert ours.sample() == [COMPUTED] * 20
    assert "the line broke" in caplog.text and "a fault of OneDiff" in ours.reason
    monkeypatch.undo()
    ours.begin()
    assert ours.sample() == steps()


def test_after_the_end_of_guidance_the_prompt_has_a_history_of_its_own() -> None:
    ours = Samplings.of(guidance_end=0.5)
    ours.begin()
    found = []
    for time in STEPS:
        call = replace(ours.call(time), latent=ours.call(time).latent[:1].repeat(2, 1, 1, 1))
        rows = half_of(2, False)
        alone = lambda call=call, rows=rows: diffusers_output(ours.unet, take_rows(call, rows))  # noqa: E731
        kind, output = ours.run(call, guidance=lambda rows=rows, alone=alone: PromptRows(rows, alone))
        found.append(kind)
        if time < STEPS[9]:
            assert torch.equal(output[0], output[1])
    assert found == steps(WHOLE_OF_20 | {10, 11})
