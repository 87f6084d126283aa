"""The timesteps of a sampling, which OneDiff records from the schedule that a WebUI's sampler computes. The samplers
here are stand-ins with the methods and attributes of A1111's and Forge's; tests/webui runs the real ones."""
from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lib_onediff.core.refusal import Refusal
from lib_onediff.core.sampling import Solver, Timeline
from lib_onediff.hosts.sampler_schedule import OTHER_TIMESTEPS, sampling_of


class Wrapped:
    """The noise schedule of Stable Diffusion, with the attributes of k-diffusion's DiscreteSchedule."""

    def __init__(self) -> None:
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        alphas = (1 - betas).cumprod(0)
        self.sigmas = ((1 - alphas) / alphas).sqrt().float()
        self.log_sigmas = self.sigmas.log()

    def sigma_to_t(self, sigma: Tensor) -> Tensor:
        distances = sigma.log() - self.log_sigmas[:, None]
        low = distances.ge(0).cumsum(0).argmax(0).clamp(max=998)
        weight = ((self.log_sigmas[low] - sigma.log()) / (self.log_sigmas[low] - self.log_sigmas[low + 1])).clamp(0, 1)
        return (1 - weight) * low + weight * (low + 1)


def euler(model: Any, x: Any, sigmas: Any, s_churn: float = 0.0) -> None:
    """A sampler with Euler's signature."""


def dpm_fast(model: Any, x: Any, sigma_min: float, sigma_max: float, n: int) -> None:
    """A sampler with DPM fast's signature."""


def ddim(model: Any, x: Any, timesteps: Any) -> None:
    """A sampler with DDIM's signature."""


def unipc(model: Any, x: Any, timesteps: Any, is_img2img: bool = False) -> None:
    """A sampler with UniPC's signature."""


def with_eta(model: Any, x: Any, timesteps: Any, eta: float = 0.0) -> None:
    """A sampler with the parameter eta."""


def named(name: str, like: Any) -> Any:
    """A copy of a sampling function with another name."""
    found = types.FunctionType(like.__code__, like.__globals__, name, like.__defaults__)
    assert found.__name__ == name
    return found


class BySigmas:
    """A sampler that takes noise levels, with Karras' schedule. func: its sampling function."""

    def __init__(self, func: Any) -> None:
        self.func = func
        self.model_wrap = Wrapped()

    def get_sigmas(self, p: Any, steps: int) -> Tensor:
        low, high = (self.model_wrap.sigmas[place] ** (1 / 7) for place in (0, -1))
        return torch.cat([(high + torch.linspace(0, 1, steps) * (low - high)) ** 7, torch.zeros(1)])


class ByTimesteps:
    """A sampler that takes timesteps, such as DDIM. func: its sampling function."""

    def __init__(self, func: Any) -> None:
        self.func = func

    def get_timesteps(self, p: Any, steps: int) -> Tensor:
        return torch.arange(0, 1000, 1000 // steps) + 1


class Generation:
    """A WebUI's processing object at the beginning of a pass. is_hr_pass: whether it is the second pass of hires
    fix."""

    def __init__(self, sampler: Any, is_hr_pass: bool = False) -> None:
        self.sampler = sampler
        self.is_hr_pass = is_hr_pass


@pytest.fixture(autouse=True)
def webui(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The WebUI's modules.shared.opts, with no option set."""
    opts = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "modules", types.SimpleNamespace(shared=types.SimpleNamespace(opts=opts)))
    return opts


@pytest.mark.parametrize("steps", [1, 4, 20])
def test_the_noise_levels_of_a_sampler_are_recorded_and_converted_to_timesteps(steps: int) -> None:
    """sampling_of() replaces the sampler's get_sigmas until the WebUI calls it at the beginning of a pass. There is no
    UNet call at the last sigma, 0. In img2img, which begins later in the schedule, the first step has index 0, too."""
    sampler = BySigmas(euler)
    sampling = sampling_of(Generation(sampler, is_hr_pass=True))
    assert sampling.times() is None
    sigmas = sampler.get_sigmas(None, steps)
    times = sampling.times()
    assert len(times) == steps and times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(999, abs=0.01)
    assert times == [pytest.approx(float(sampler.model_wrap.sigma_to_t(sigma[None]))) for sigma in sigmas[:-1]]
    # img2img uses the lower part of the timesteps.
    timeline = Timeline(times)
    begun = [timeline.step(time)[0] for time in times[steps // 2:]]
    assert begun[0].index == 0 and [step.is_last for step in begun] == [False] * (len(begun) - 1) + [True]


def test_the_sampler_is_unchanged_after_its_schedule_was_recorded() -> None:
    """Also if sampling_of() is called twice before the schedule is computed, as in Forge for the second pass of hires
    fix."""
    sampler = BySigmas(euler)
    for _ in range(2):
        sampling_of(Generation(sampler))
    sampler.get_sigmas(None, 5)
    assert "get_sigmas" not in sampler.__dict__


def test_a_sampler_method_set_by_another_extension_is_kept() -> None:
    """Another extension has set get_sigmas on the sampler object. It is called, recorded, and set again afterwards."""
    sampler = BySigmas(euler)
    theirs = vars(sampler)["get_sigmas"] = partial(BySigmas.get_sigmas, sampler)
    sampling = sampling_of(Generation(sampler))
    sampler.get_sigmas(None, 5)
    assert len(sampling.times()) == 5 and sampler.__dict__["get_sigmas"] is theirs


def test_the_recorded_timesteps_of_ddim_leave_out_the_lowest_at_which_it_calls_no_unet() -> None:
    sampler = ByTimesteps(ddim)
    sampling = sampling_of(Generation(sampler))
    sampler.get_timesteps(None, 20)
    assert sampling.times() == [float(time) for time in range(51, 1000, 50)]


def test_with_samplers_that_choose_their_timesteps_while_they_run_the_steps_are_unknown() -> None:
    """why_not: why OneDiff skips no work in this sampling. Without a sampler (None), there is no such reason, and the
    solver is unknown."""
    for sampler in (BySigmas(dpm_fast), ByTimesteps(unipc)):
        assert "chooses its timesteps" in sampling_of(Generation(sampler)).why_not
    nothing = sampling_of(Generation(None))
    assert (nothing.why_not, nothing.solver()) == ("", Solver.UNKNOWN)


@pytest.mark.parametrize(("name", "solver"), [
    ("sample_euler", Solver.FIRST_ORDER), ("sample_dpmpp_2m", Solver.MULTISTEP),
    ("sample_euler_ancestral", Solver.OTHER), ("sample_dpmpp_2m_sde", Solver.OTHER), ("sample_heun", Solver.OTHER),
])
def test_the_solver_of_a_sampler_is_known_by_the_name_of_its_function(name: str, solver: Solver) -> None:
    """Samplers that add noise, or call the network twice a step, have another solver."""
    assert sampling_of(Generation(BySigmas(named(name, euler)))).solver() is solver


@pytest.mark.parametrize(("of_image", "of_settings", "solver"), [
    (None, None, Solver.FIRST_ORDER), (0.0, 1.0, Solver.FIRST_ORDER), (None, 0.5, Solver.OTHER),
    (0.5, 0.0, Solver.OTHER),
])
def test_ddim_is_a_first_order_solver_only_with_an_eta_of_0(
    webui: types.SimpleNamespace, of_image: float | None, of_settings: float | None, solver: Solver
) -> None:
    """With a larger eta, DDIM adds noise. of_image: the generation's eta, which takes precedence over of_settings, that
    of the WebUI's settings. None: not set."""
    if of_settings is not None:
        webui.eta_ddim = of_settings
    generation: Any = Generation(ByTimesteps(named("ddim", with_eta)))
    generation.eta = of_image
    assert sampling_of(generation).solver() is solver


class DiscretePredictor(Wrapped):
    """Forge's predictor for SD and SDXL."""

    def timestep(self, sigma: Tensor) -> Tensor:
        return (sigma.log() - self.log_sigmas[:, None]).abs().argmin(0)


class FlowPredictor:
    """Forge Neo's predictor for flow models. multiplier: the largest timestep, 1 for Anima, 1000 for others."""

    def __init__(self, multiplier: float) -> None:
        times = torch.arange(1, 1001) / 1000
        self.sigmas = 3 * times / (1 + 2 * times)
        self.multiplier = multiplier

    def timestep(self, sigma: Tensor) -> Tensor:
        return sigma * self.multiplier


@pytest.mark.parametrize("kind", [ddim, named("plms", ddim)], ids=["ddim", "plms"])
@pytest.mark.parametrize(("predictor", "reason"), [
    (DiscretePredictor(), ""), (FlowPredictor(1.0), OTHER_TIMESTEPS), (FlowPredictor(1000.0), OTHER_TIMESTEPS),
], ids=["sd", "anima", "flow"])
def test_with_ddim_and_plms_the_steps_of_a_flow_model_are_unknown(
    kind: Any, predictor: Any, reason: str
) -> None:
    """DDIM and PLMS take timesteps of 0 to 999, which a flow model does not have. reason: why the steps are unknown."""
    sampler = ByTimesteps(kind)
    model = types.SimpleNamespace(predictor=predictor)
    objects = types.SimpleNamespace(unet=types.SimpleNamespace(model=model))
    engine = types.SimpleNamespace(forge_objects=objects)
    vars(sampler)["model_wrap"] = types.SimpleNamespace(inner_model=engine)
    sampling = sampling_of(Generation(sampler))
    assert sampling.why_not == reason
    sampler.get_timesteps(None, 20)
    if reason:
        with pytest.raises(Refusal, match="Euler"):
            sampling.position(torch.tensor([0.9]))
    else:
        assert sampling.position(torch.tensor([951.0])).step.total == 19


@pytest.mark.parametrize("name", ["sample_euler", "sample_er_sde", "sample_dpmpp_2m"])
def test_the_steps_of_anima_are_known_with_samplers_that_take_noise_levels(name: str) -> None:
    """Each call is assigned to its step by its timestep. Anima is a flow model. Only with Euler may outputs be
    extrapolated."""
    predictor = FlowPredictor(1.0)
    sampler = BySigmas(named(name, euler))
    sampler.model_wrap = types.SimpleNamespace(
        sigmas=predictor.sigmas, log_sigmas=predictor.sigmas.log(), sigma_to_t=predictor.timestep
    )
    sampling = sampling_of(Generation(sampler))
    sigmas = sampler.get_sigmas(None, 20)[:-1]
    # er_sde begins slightly below the first noise level, at which the signal would be 0.
    sigmas[0] *= 0.9999
    steps = [sampling.position(predictor.timestep(sigma[None])).step for sigma in sigmas]
    assert [step.index for step in steps] == list(range(20)) and {step.total for step in steps} == {20}
