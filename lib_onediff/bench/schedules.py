"""Searches the steps of a sampling that DeepCache should compute completely (whole steps), with trained weights. The
results are in steps/schedules.json.

A greedy search: it begins with all steps whole, and repeatedly makes the step cached that changes the images least.
Then it moves single whole steps by one if the images are closer to the exact ones. It imitates the step policy, by CUDA
graphs of both passes on a GPU, where sampling a batch takes a tenth of a second.
"""
from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.call import Call, Cut, CutMemory
from ..core.refusal import Refusal
from ..demo import EMOJI_DIT, SHIPPED
from ..devices.torch import operators
from ..families.anima.call import AnimaCall
from ..families.registry import FAMILIES
from ..families.unet.call import UNetCall
from ..hosts.diffusers.model_folder import load_folder, load_network
from ..steps.deepcache import FARTHEST
from ..weights.binding import Binding
from .images import GUIDANCE, LOWEST, PROMPTS, REDUCTION, SIDE, TOKENS
from .steps import DTYPES, Row

TRANSFORMER_FOLDER = EMOJI_DIT / "transformer"
UNET = "unet"
TRANSFORMER = "transformer"
KINDS = {"emoji-sd": UNET, "emoji-dit": TRANSFORMER}
# The best factors on the line through the last two full passes, as measured (.readme/developing.md).
SLOPES = {UNET: 0.5, TRANSFORMER: 1.0}
INTERVALS = (2, 3, 4, 5)
# The shift of flow matching that Anima uses.
SHIFT = 3.0
RUNS_BEFORE_CAPTURE = 2
# The part of the images, the worst ones, that counts for half of a schedule's score.
WORST = 0.25


# --- noise schedules and samplers -------------------------------------------------------------------------------------


class Track(NamedTuple):
    """The noise schedule of a sampling: the latent of a step is alpha * image + sigma * noise.

    alphas, sigmas: one for each step, and those of the final image.
    times: the timestep of each step, as the network gets it.
    """

    alphas: list[float]
    sigmas: list[float]
    times: list[float]


def flow_track(steps: int, shift: float = SHIFT) -> Track:
    """The schedule of flow matching: sigmas at equal distances, shifted."""
    line = [1 - index / steps for index in range(steps + 1)]
    sigmas = [shift * one / (1 + (shift - 1) * one) for one in line]
    return Track([1 - sigma for sigma in sigmas], sigmas, sigmas[:-1])


def diffusion_track(steps: int, karras: bool = False) -> Track:
    """The schedule of Stable Diffusion at the timesteps of diffusers' Euler. karras: at those of Karras et al. 2022."""
    line = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64, device="cpu")
    shares = (1 - line**2).cumprod(0)
    ratios = ((1 - shares) / shares).sqrt()
    times = [float(index * (1000 // steps) + 1) for index in reversed(range(steps))]
    chosen = [float(ratios[int(time)]) for time in times]
    if karras:
        most, least = float(ratios[-1]) ** (1 / 7), float(ratios[0]) ** (1 / 7)
        chosen = [(most + index / (steps - 1) * (least - most)) ** 7 for index in range(steps)]
        times = [time_of_ratio(ratio, ratios) for ratio in chosen]
    alphas = [1 / math.sqrt(1 + ratio**2) for ratio in chosen]
    sigmas = [ratio * alpha for ratio, alpha in zip(chosen, alphas, strict=True)]
    return Track([*alphas, 1.0], [*sigmas, 0.0], times)


def time_of_ratio(ratio: float, ratios: Tensor) -> float:
    """The timestep, a fraction, at which sigma / alpha has this value."""
    after = min(int(torch.searchsorted(ratios, ratio)), len(ratios) - 1)
    before = max(after - 1, 0)
    low, high = (math.log(float(ratios[index])) for index in (before, after))
    return before + (math.log(ratio) - low) / (high - low or 1)


class Step(NamedTuple):
    """A step of a sampler.

    number: from 0.
    image, noise: the network's predictions.
    last_image: the image predicted at the step before.
    """

    number: int
    latent: Tensor
    image: Tensor
    noise: Tensor
    last_image: Tensor | None
    track: Track


def euler(step: Step) -> Tensor:
    """The next latent by Euler's method, which equals DDIM."""
    return step.track.alphas[step.number + 1] * step.image + step.track.sigmas[step.number + 1] * step.noise


def dpm_2m(step: Step) -> Tensor:
    """The next latent by DPM++ 2M (Lu et al. 2022, arXiv 2211.01095)."""
    index = step.number
    alphas, sigmas, _ = step.track
    if step.last_image is None or sigmas[index + 1] == 0 or alphas[index - 1] == 0 or alphas[index] == 0:
        return euler(step)
    before, now, after = (math.log(alphas[at] / sigmas[at]) for at in (index - 1, index, index + 1))
    ratio = (after - now) / (now - before) / 2
    image = (1 + ratio) * step.image - ratio * step.last_image
    return sigmas[index + 1] / sigmas[index] * step.latent - alphas[index + 1] * math.expm1(now - after) * image


def er_sde(step: Step) -> Tensor:
    """The next latent by the first-order solver of the extended reverse-time SDE (Cui et al. 2023, arXiv 2309.06169).
    The noise that it adds is the same for the same step."""
    index = step.number
    alphas, sigmas, _ = step.track
    if sigmas[index + 1] == 0:
        return step.image
    generator = torch.Generator(step.latent.device).manual_seed(index)
    noise = torch.randn(
        step.latent.shape, generator=generator, device=step.latent.device, dtype=step.latent.dtype
    )
    after = sigmas[index + 1] / alphas[index + 1]
    if alphas[index] == 0:
        # For pure noise, sigma / alpha is infinite.
        return alphas[index + 1] * step.image + sigmas[index + 1] * step.noise
    now = sigmas[index] / alphas[index]
    scaled = [one * (math.exp(one**0.3) + 10) for one in (now, after)]
    kept = scaled[1] / scaled[0]
    added = math.sqrt(max(0.0, after**2 - (now * kept) ** 2))
    ahead = kept * step.latent / alphas[index] + (1 - kept) * step.image + added * noise
    return alphas[index + 1] * ahead


SAMPLERS: dict[str, Callable[[Step], Tensor]] = {"euler": euler, "dpm_2m": dpm_2m, "er_sde": er_sde}


# --- full and cached passes -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Model:
    """A trained network, with the text encoder and the VAE of emoji-sd. kind: UNET or TRANSFORMER."""

    kind: str
    network: Any
    text_encoder: Any
    tokenizer: Any
    vae: Any
    device: torch.device

    @classmethod
    def load(cls, kind: str, dtype: torch.dtype, device: torch.device) -> Model:
        from diffusers import CosmosTransformer3DModel

        pipe = load_folder(SHIPPED, torch.float32)
        network = pipe.unet
        if kind == TRANSFORMER:
            network = load_network(TRANSFORMER_FOLDER, CosmosTransformer3DModel, torch.float32)
        parts = [part.to(device).eval().requires_grad_(False) for part in (network, pipe.text_encoder, pipe.vae)]
        return cls(kind, parts[0].to(dtype), parts[1], pipe.tokenizer, parts[2], device)

    @cached_property
    def layout(self) -> Any:
        return FAMILIES.read(self.network)

    @cached_property
    def binding(self) -> Binding:
        binding = Binding(self.network, self.layout)
        binding.bind()
        return binding

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = next(self.network.parameters()).dtype
        return dtype

    def track(self, steps: int, **more: Any) -> Track:
        return flow_track(steps, **more) if self.kind == TRANSFORMER else diffusion_track(steps, **more)

    def call(self, latent: Tensor, time: Tensor, context: Tensor, cut: Cut | None) -> Call:
        if self.kind == TRANSFORMER:
            return AnimaCall(latent[:, :, None], time, context, cut=cut)
        return UNetCall(latent, time, context, cut=cut)

    def predicted(self, output: Tensor, latent: Tensor, alpha: float, sigma: float) -> tuple[Tensor, Tensor]:
        """The image and the noise that follow from a velocity, the network's output."""
        if self.kind == TRANSFORMER:
            return latent - sigma * output, latent + alpha * output
        return alpha * latent - sigma * output, alpha * output + sigma * latent

    def context(self, prompts: Sequence[str]) -> Tensor:
        """The text encoder's output, (2 * prompts, tokens, width): first of the empty prompt, then of these prompts."""
        words = [""] * len(prompts) + list(prompts)
        tokens = self.tokenizer(words, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        context: Tensor = self.text_encoder(tokens["input_ids"].to(self.device)).last_hidden_state
        return context.to(self.dtype)

    def decode(self, latent: Tensor) -> Tensor:
        """The images of latents, (n, 3, height, width), from 0 to 1."""
        images: Tensor = self.vae.decode(latent / self.vae.config.scaling_factor).sample
        return (images.float() / 2 + 0.5).clamp(0, 1)


class Passes:
    """The full and the cached pass of a model that is cut at a depth, for this number of images with CFG."""

    def __init__(self, model: Model, depth: int, images: int) -> None:
        self.model = model
        self.depth = depth
        side = SIDE // REDUCTION
        width = model.text_encoder.config.hidden_size
        self.context = torch.zeros(2 * images, TOKENS, width, device=model.device, dtype=model.dtype)
        self.memory = CutMemory()
        self._latent = torch.zeros(images, 4, side, side, device=model.device, dtype=torch.float32)
        self._time = torch.zeros(2 * images, device=model.device, dtype=torch.float32)
        self._graphs: dict[bool, tuple[Any, Tensor]] = {}
        if model.device.type == "cuda":
            for reads in (False, True):
                self._graphs[reads] = self._captured(reads)

    def run(self, latent: Tensor, time: float, reads: bool) -> Tensor:
        """The output after CFG, (images, channels, height, width) in float32. reads: by the cached pass, which
        reads the memory; otherwise by the full pass."""
        self._latent.copy_(latent)
        self._time.fill_(time)
        if reads not in self._graphs:
            return self._compute(reads)
        graph, output = self._graphs[reads]
        graph.replay()
        return output.clone()

    def _captured(self, reads: bool) -> tuple[Any, Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(RUNS_BEFORE_CAPTURE):
                self._compute(reads)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._compute(reads)
        return graph, output

    def _compute(self, reads: bool) -> Tensor:
        model = self.model
        cut = Cut(self.depth, reads, self.memory)
        both = torch.cat([self._latent, self._latent]).to(model.dtype)
        call = model.call(both, self._time, self.context, cut)
        output = FAMILIES.output(model.layout, model.binding.weights(), operators, call).flatten(1)
        without, with_prompt = output.float().view(2, *self._latent.shape)
        return without + GUIDANCE * (with_prompt - without)


# --- samplings with cached steps --------------------------------------------------------------------------------------


class State(NamedTuple):
    """A sampling before a step. points: (step, written feature) of the last three full passes."""

    latent: Tensor
    last_image: Tensor | None = None
    points: tuple[tuple[int, Tensor], ...] = ()


@dataclass(frozen=True)
class Imitation:
    """Makes samplings as the step policy does. slope: a factor on the slope of the line through the features of the
    last two full passes; 0 reuses the last feature."""

    passes: Passes
    track: Track
    sampler: Callable[[Step], Tensor]
    slope: float

    @property
    def steps(self) -> int:
        return len(self.track.times)

    def run(self, whole: frozenset[int], state: State, start: int = 0, kept: list[State] | None = None) -> Tensor:
        """The last latent of a sampling. whole: the indices of the steps with a full pass. state: that before the step
        `start`. kept: a list to which the state before each step is appended."""
        for index in range(start, self.steps):
            if kept is not None:
                kept.append(state)
            state = self.step(index, whole, state)
        return state.latent

    def step(self, index: int, whole: frozenset[int], state: State) -> State:
        alphas, sigmas, times = self.track
        latent, last_image, points = state
        passes = self.passes
        if index in whole:
            output = passes.run(latent, times[index], reads=False)
            points = (*points[-2:], (index, passes.memory.read().clone()))
        else:
            passes.memory.write(forecast(points, index, self.slope))
            output = passes.run(latent, times[index], reads=True)
        image, noise = passes.model.predicted(output, latent, alphas[index], sigmas[index])
        return State(self.sampler(Step(index, latent, image, noise, last_image, self.track)), image, points)


def forecast(points: tuple[tuple[int, Tensor], ...], index: int, slope: float) -> Tensor:
    """The feature at a step, from those of full passes. The same as steps.deepcache.Line.at."""
    step_last, last = points[-1]
    if len(points) < 2 or not slope:
        return last
    step_before, before = points[-2]
    beyond = min((index - step_last) / (step_last - step_before), FARTHEST)
    return torch.lerp(before.float(), last.float(), 1 + slope * beyond).to(last.dtype)


@dataclass(frozen=True)
class Images:
    """Compares the images of a batch of prompts with the exact ones, which have a full pass at every step."""

    imitation: Imitation
    context: Tensor
    begin: State
    exact: Tensor

    @classmethod
    def of(cls, imitation: Imitation, prompts: Sequence[str], seeds: Sequence[int]) -> Images:
        model = imitation.passes.model
        context = model.context(prompts)
        imitation.passes.context.copy_(context)
        side = SIDE // REDUCTION
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        noise = [torch.randn(4, side, side, generator=one, dtype=torch.float32, device="cpu") for one in generators]
        begin = State(torch.stack(noise).to(model.device) * imitation.track.sigmas[0])
        exact = model.decode(imitation.run(frozenset(range(imitation.steps)), begin))
        return cls(imitation, context, begin, exact)

    def psnr(self, whole: frozenset[int], state: State | None = None, start: int = 0) -> Tensor:
        """The PSNR of each image in decibels, with these steps whole. state: that before the step `start`."""
        self.imitation.passes.context.copy_(self.context)
        latent = self.imitation.run(whole, self.begin if state is None else state, start)
        return self.psnr_of(latent)

    def psnr_of(self, latent: Tensor) -> Tensor:
        images = self.imitation.passes.model.decode(latent)
        return -10 * (images - self.exact).square().flatten(1).mean(1).clamp_min(1e-8).log10()

    def states(self, whole: frozenset[int]) -> list[State]:
        """The states before each step, with these steps whole."""
        self.imitation.passes.context.copy_(self.context)
        kept: list[State] = []
        self.imitation.run(whole, self.begin, 0, kept)
        return kept


# --- the search -------------------------------------------------------------------------------------------------------


def score(psnr: Tensor) -> float:
    """The mean of two means of the PSNR: that of all images, and that of the worst ones (WORST)."""
    worst = psnr.sort().values[:max(1, int(WORST * len(psnr)))]
    return float((psnr.mean() + worst.mean()) / 2)


def searched(images: Images, counts: Sequence[int]) -> Iterator[tuple[int, frozenset[int]]]:
    """(number, whole steps) for each of these numbers of whole steps, the largest first."""
    steps = images.imitation.steps
    whole = frozenset(range(steps))
    for count in sorted(counts, reverse=True):
        while len(whole) > count:
            whole = without_one(images, whole)
        whole = moved(images, whole)
        yield count, whole


def without_one(images: Images, whole: frozenset[int]) -> frozenset[int]:
    """The whole steps without the one whose loss changes the images least. The first step always remains."""
    states = images.states(whole)
    found: dict[int, float] = {}
    for index in sorted(whole - {0}):
        found[index] = score(images.psnr(whole - {index}, states[index], index))
    return whole - {max(found, key=lambda index: found[index])}


def moved(images: Images, whole: frozenset[int], rounds: int = 2) -> frozenset[int]:
    """The whole steps, after single ones were moved by one if that raises the score."""
    best = score(images.psnr(whole))
    for _ in range(rounds):
        before = whole
        states = images.states(whole)
        for index in sorted(whole - {0}):
            for other in (index - 1, index + 1):
                if index not in whole or other in whole or not 0 < other < images.imitation.steps:
                    continue
                moved_one = whole - {index} | {other}
                start = min(index, other)
                found = score(images.psnr(moved_one, states[start], start))
                if found > best:
                    best = found
                    whole = moved_one
                    states = images.states(whole)
        if whole == before:
            break
    return whole


def cases(count: int, of: int = 0) -> tuple[list[str], list[int]]:
    """This number of held-out prompts, and their seeds. of: 0 for the search; 1 for the trial, which has other prompts
    and seeds."""
    known = [one["prompt"] for one in json.loads(PROMPTS.read_text(encoding="utf-8"))][of::2]
    return [known[number % len(known)] for number in range(count)], [1000 * of + number for number in range(count)]


def tried(images: Sequence[Images], whole: frozenset[int]) -> Row:
    """The PSNR of many images with these steps whole, as a part of a row."""
    psnr = torch.cat([one.psnr(whole) for one in images]).sort().values.tolist()
    return {"psnr_db": psnr[len(psnr) // 2], "psnr_lowest_5": psnr[int(LOWEST * len(psnr))]}


def schedules(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows with the whole steps of a sampling of --steps steps, one for each interval: searched with the Euler
    sampler on --images prompts, and tried on as many others. Raises Refusal."""
    for name in options.model or KINDS:
        if name not in KINDS:
            raise Refusal(f"schedules are searched on {' and '.join(KINDS)}, not on {name}")
        kind = KINDS[name]
        model = Model.load(kind, DTYPES[options.dtype], device)
        track = model.track(options.steps)
        imitation = Imitation(Passes(model, 1, options.images), track, euler, SLOPES[kind])
        images = Images.of(imitation, *cases(options.images))
        others = Images.of(imitation, *cases(options.images, 1))
        counts = [1 + math.ceil(options.steps / interval) for interval in INTERVALS]
        for count, whole in searched(images, counts):
            row = {"model": name, "steps": options.steps, "whole": count}
            yield {**row, **tried([others], whole), "all_whole": sorted(whole)}
