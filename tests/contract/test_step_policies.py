"""Step policies (DeepCache, skipping the negative prompt) in every WebUI: they need to know which rows of a batch are
the prompt's, and which sampler is used. Each WebUI passes these in a different way."""
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from builders import CONTEXT_WIDTH, relative_error
from contract_hosts import FAMILY, Host, Sampler, random
from torch import Tensor

from lib_onediff.core.sampling import FEW_STEP_MODEL
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime

family = pytest.mark.parametrize("host", FAMILY, indirect=True)
a1111 = pytest.mark.parametrize("host", ["a1111"], indirect=True)
SIGMAS = [12.0 - step for step in range(12)]
NEGATIVE_FIRST = [1, 0]
PROMPT_FIRST = [0, 1]


class Sampler12(Sampler):
    def get_sigmas(self) -> Tensor:
        return torch.tensor([*SIGMAS, 0.0])


class Step(NamedTuple):
    """A UNet call of a sampling: the arguments of the WebUI's apply_model, and its result. is_skipped: whether OneDiff
    skipped the negative prompt, and computed the prompt's rows alone."""

    latent: Tensor
    sigma: float
    context: Tensor
    options: dict[str, Any]
    control: dict[str, list[Tensor]] | None
    prediction: Tensor
    is_skipped: bool


class Guided:
    """Samplings with classifier-free guidance, in which each WebUI's own code calls the UNet.

    images: their number.
    marks: 0 (prompt) or 1 (negative prompt) for each part of a call's batch; a part has a row for each image.
    """

    sampler: type[Sampler12] = Sampler12

    def __init__(self, host: Host, images: int = 1, marks: list[int] = PROMPT_FIRST) -> None:
        self.host = host
        self.images = images
        self.marks = marks
        self.prompt, self.negative = (random(images, 77, CONTEXT_WIDTH, seed=seed) for seed in (2, 3))
        self.control: dict[str, list[Tensor]] | None = None
        self.options: dict[str, Any] = {}
        # Further attributes of the WebUI's processing object p.
        self.generation: dict[str, Any] = {}

    @property
    def rows(self) -> slice:
        return slice(0, self.images) if self.marks[0] == 0 else slice(self.images, None)

    def start(self, **options: Any) -> None:
        self.host.start()
        runtime.configure(Settings(**{"skip_negative_after": 50, **options}))

    def apply_model(
        self, latent: Tensor, sigma: float, context: Tensor, options: dict[str, Any], control: Any
    ) -> Tensor:
        times = torch.full((len(latent),), sigma)
        if self.host.name == "a1111":
            return self.host.checkpoint.apply_model(latent, 100 * times, {"c_crossattn": [context]})
        lists = control and {part: list(values) for part, values in control.items()}
        return self.host.checkpoint.forge_objects.unet.model.apply_model(
            latent, times, c_crossattn=context, control=lists, transformer_options=options
        )

    def options_of(self, sigma: float) -> dict[str, Any]:
        """The transformer_options that WebUIs of the Forge family pass."""
        marks = torch.tensor(self.marks).repeat_interleave(self.images)
        return {
            "cond_or_uncond": list(self.marks), "sigmas": torch.full((self.images,), sigma), "cond_mark": marks.float(),
            "cond_indices": marks.eq(0).nonzero().flatten().tolist(),
            "uncond_indices": marks.eq(1).nonzero().flatten().tolist(), **self.host.options_of_a_call(), **self.options,
        }

    def params(self) -> Any:
        """A1111's CFGDenoiserParams of a step."""
        return SimpleParams(self.prompt, self.negative)

    def steps(self) -> Iterator[Step]:
        """Make one sampling, and yield its UNet calls."""
        host = self.host
        adapter = self.host.adapter
        runtime.guard.resume()
        known: dict[str, Any] = {"sd_model": host.checkpoint, "is_hr_pass": False, "cfg_scale": 7.0, **self.generation}
        p = SimpleNamespace(sampler=self.sampler(), **known)
        adapter.before_sampling(p)
        p.sampler.get_sigmas()
        image = random(self.images, 4, 8, 8, seed=1)
        parts = [self.prompt, self.negative]
        context = torch.cat([parts[mark] for mark in self.marks])
        for sigma in SIGMAS:
            params = self.params()
            before = runtime.status()["guidance"]["without_negative"]
            adapter.before_step(params)
            latent = image.repeat(len(context) // self.images, 1, 1, 1)
            options = {} if host.name == "a1111" else self.options_of(sigma)
            with host.no_gradients():
                prediction = self.apply_model(latent, sigma, context.clone(), options, self.control).clone()
            yield Step(
                latent, sigma, context, options, self.control, prediction,
                runtime.status()["guidance"]["without_negative"] > before,
            )
            with host.no_gradients():
                image = 0.9 * image + 0.1 * prediction[:self.images]
        adapter.after_run(p)

    def by_host(self, step: Step) -> Tensor:
        """The prediction of the WebUI's own UNet for a call. If OneDiff skipped the negative prompt, the prediction for
        the prompt's rows alone, twice."""
        rows = slice(None)
        options = step.options
        control = step.control
        if step.is_skipped:
            rows = self.rows
            if options:
                options = {**options, "cond_or_uncond": [0]}
            control = control and {part: [value[rows] for value in values] for part, values in control.items()}
        with self.host.no_gradients():
            found = self.apply_model(step.latent[rows], step.sigma, step.context[rows].clone(), options, control)
        return found.repeat(2, 1, 1, 1) if step.is_skipped else found


class SimpleParams:
    def __init__(self, text_cond: Any, text_uncond: Any) -> None:
        self.text_cond = text_cond
        self.text_uncond = text_uncond


def check_the_last_half_skips_the_negative_prompt(guided: Guided) -> None:
    """OneDiff computes the prompt's rows alone in the last half of the steps, and every step's prediction is close to
    the WebUI's own for the same rows."""
    steps = list(guided.steps())
    assert [step.is_skipped for step in steps] == [False] * 6 + [True] * 6, runtime.status()["guidance"]["reason"]
    assert runtime.status()["guidance"]["reason"] == "" and runtime.guard.faults == []
    assert runtime.status()["route"] == "plain"
    batches = {entry.key.batch for entry in runtime.table.entries() if "vae decode" not in entry.key.inputs}
    assert batches == {guided.images, 2 * guided.images}
    guided.host.switch(False)
    for step in steps:
        assert relative_error(step.prediction, guided.by_host(step)) < 1e-5


def reason_for_skipping_nothing(guided: Guided) -> str:
    """Why the negative prompt is not skipped, from the status after a sampling. Asserts that no step skipped it."""
    assert not any(step.is_skipped for step in guided.steps())
    reason = str(runtime.status()["guidance"]["reason"])
    assert reason.startswith("Skipping the negative prompt is inactive: ") and runtime.guard.faults == []
    return reason.removeprefix("Skipping the negative prompt is inactive: ")


@pytest.mark.parametrize("images", [1, 2])
def test_the_last_half_of_the_steps_skips_the_negative_prompt(host: Host, images: int) -> None:
    """Each step's prediction must be close to the WebUI's own for the same rows. On A1111, the conditions are those of
    SDXL (dictionaries). On the Forge family, one image has residuals of a ControlNet, and with two images the negative
    prompt's rows come first."""
    guided = Guided(host, images)
    if host.name == "a1111":
        # SDXL's conditions are dictionaries; the WebUI has padded the negative prompt after the callback.
        guided.params = lambda: params
        params = SimpleParams({"crossattn": guided.prompt}, {"crossattn": guided.negative[:, :40]})
    elif images == 2:
        guided.marks = NEGATIVE_FIRST
    else:
        residuals = random(2, 64, 4, 4, seed=5), random(2, 64, 4, 4, seed=6)
        guided.control = {"input": [], "middle": [residuals[0]], "output": [residuals[1]]}
    guided.start()
    check_the_last_half_skips_the_negative_prompt(guided)


@family
@pytest.mark.parametrize(("marks", "options", "reason"), [
    ([1, 0, 0], {}, "several prompts, areas"), ([0], {}, "separate calls"), ([1], {}, "separate calls"),
    ([1, 0], {"sigmas": None}, "does not say"), ([1, 0], {"cond_or_uncond": None}, "does not say"),
    ([1, 0, 1, 0], {"cond_or_uncond": [1, 0]}, "neither the prompt nor"),
])
def test_the_negative_prompt_is_not_skipped_if_the_options_do_not_identify_the_prompts_rows(
    host: Host, marks: list[int], options: dict[str, Any], reason: str
) -> None:
    """On the Forge family, transformer_options describe the rows. marks: 0 (prompt) or 1 (negative prompt) for each row
    of the call. options: replace entries of transformer_options. reason: a part of the reason in the status."""
    guided = Guided(host, 1, marks)
    guided.options = options
    guided.start()
    assert reason in reason_for_skipping_nothing(guided)


@a1111
@pytest.mark.parametrize(("conds", "negatives", "batch", "reason"), [
    (2, 1, 3, "AND joins several prompts"), (1, 1, 1, "separate calls"), (1, 1, 3, "neither the prompt nor"),
    (1, 1, 2, "replaces the WebUI's prompts"), (0, 0, 2, "own sampling loop"),
])
def test_the_negative_prompt_is_not_skipped_if_the_callback_of_a1111_does_not_describe_the_rows(
    host: Host, conds: int, negatives: int, batch: int, reason: str
) -> None:
    """A1111's callback before each step gets CFGDenoiserParams, with the conditions of the prompt and of the negative
    one.

    conds, negatives: the rows of these conditions; 0: the callback is never called. batch: the rows of the UNet call.
    reason: a part of the reason in the status.
    """
    guided = Guided(host, 1, [0] * batch)
    guided.start()
    prompts = random(conds, 77, CONTEXT_WIDTH, seed=4)
    negative = random(negatives, 77, CONTEXT_WIDTH, seed=3)
    # Without a reference, the params are deleted when the step ends.
    params = SimpleParams(prompts, negative) if conds else None
    guided.params = lambda: params or SimpleParams(prompts, negative)
    if params is None:
        guided.host.adapter.before_step = lambda params: None
    assert reason in reason_for_skipping_nothing(guided)


class Euler(Sampler12):
    """A sampler with Euler's function, which DeepCache supports: it adds no noise between its steps."""

    def sample_euler(self, model: Any, x: Any, sigmas: Any) -> None:
        """The sampling function. OneDiff reads its name, and nothing calls it."""

    func = sample_euler


def is_inactive_for_few_steps(host: Host, **generation: Any) -> bool:
    """Whether DeepCache is inactive in a sampling of 12 steps, because its CFG scale is that of a few-step model.
    generation: attributes of the WebUI's processing object p."""
    guided = Guided(host)
    guided.sampler = Euler
    guided.generation = generation
    guided.start(deepcache_interval=3, skip_negative_after=0)
    before = runtime.status()["deepcache"]["cached"]
    list(guided.steps())
    now = runtime.status()["deepcache"]
    cached = now["cached"] - before
    assert bool(cached) is (now["reason"] == "") and runtime.guard.faults == []
    assert now["reason"].partition(" is inactive: ")[2] in ("", FEW_STEP_MODEL)
    return not cached


def test_deepcache_is_inactive_for_few_step_models(host: Host) -> None:
    """A CFG scale of at most 2 marks a few-step model (such as Lightning). The second pass of Hires. fix has its own
    scale, hr_cfg, which Forge sets to 1 by default: it only counts if this pass has a checkpoint of its own."""
    assert is_inactive_for_few_steps(host, cfg_scale=1.5) and not is_inactive_for_few_steps(host, cfg_scale=7.0)
    second: dict[str, Any] = {"is_hr_pass": True, "cfg_scale": 7.0, "hr_cfg": 1.0}
    assert not is_inactive_for_few_steps(host, hr_checkpoint_info=None, **second)
    assert is_inactive_for_few_steps(host, hr_checkpoint_info=SimpleNamespace(name="a lightning checkpoint"), **second)
