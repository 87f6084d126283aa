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
from collections.abc import Iterator, Sequence
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
from ..hosts.diffusers.model_folder import load_folder
from ..steps.deepcache import FARTHEST
from ..steps.schedules import count_of
from ..weights.binding import Binding
from .images import GUIDANCE, LOWEST, PROMPTS, REDUCTION, SIDE, TOKENS
from .steps import DTYPES, Row

UNET = "unet"
TRANSFORMER = "transformer"
KINDS = {SHIPPED.name: UNET, EMOJI_DIT.name: TRANSFORMER}
# Factors on the line through the last two full passes. The fewer steps, the smaller is the best one.
SLOPES = (0.0, 0.5, 1.0)
INTERVALS = (2, 3, 4, 5)
# The shift of flow matching that Anima uses.
SHIFT = 3.0
RUNS_BEFORE_CAPTURE = 2
# The part of the images, the worst ones, that counts for half of a schedule's score.
WORST = 0.25


# --- noise schedules --------------------------------------------------------------------------------------------------


class Track(NamedTuple):
    """The noise schedule of a sampling: the latent of a step is alpha * image + sigma * noise.

    alphas, sigmas: one for each step, and those of the final image.
    times: the timestep of each step, as the network gets it.
    """

    alphas: list[float]
    sigmas: list[float]
    times: list[float]


def flow_track(steps: int) -> Track:
    """The schedule of flow matching: sigmas at equal distances, shifted."""
    line = [1 - index / steps for index in range(steps + 1)]
    sigmas = [SHIFT * one / (1 + (SHIFT - 1) * one) for one in line]
    return Track([1 - sigma for sigma in sigmas], sigmas, sigmas[:-1])


def diffusion_track(steps: int) -> Track:
    """The schedule of Stable Diffusion at the timesteps of diffusers' Euler."""
    line = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64, device="cpu")
    shares = (1 - line**2).cumprod(0)
    ratios = ((1 - shares) / shares).sqrt()
    times = [float(index * (1000 // steps) + 1) for index in reversed(range(steps))]
    chosen = [float(ratios[int(time)]) for time in times]
    alphas = [1 / math.sqrt(1 + ratio**2) for ratio in chosen]
    sigmas = [ratio * alpha for ratio, alpha in zip(chosen, alphas, strict=True)]
    return Track([*alphas, 1.0], [*sigmas, 0.0], times)


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
        if kind == TRANSFORMER:
            from ..demo.flow_pipeline import load_emoji_dit

            pipe: Any = load_emoji_dit(torch.float32)
            network = pipe.transformer
        else:
            pipe = load_folder(SHIPPED, torch.float32)
            network = pipe.unet
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

    def track(self, steps: int) -> Track:
        return flow_track(steps) if self.kind == TRANSFORMER else diffusion_track(steps)

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
    points: tuple[tuple[int, Tensor], ...] = ()


@dataclass(frozen=True)
class Imitation:
    """Makes samplings as the step policy does, by Euler's method, which equals DDIM. slope: a factor on the slope of
    the line through the features of the last two full passes; 0 reuses the last feature."""

    passes: Passes
    track: Track
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
        latent, points = state
        passes = self.passes
        if index in whole:
            output = passes.run(latent, times[index], reads=False)
            points = (*points[-2:], (index, passes.memory.read().clone()))
        else:
            passes.memory.write(forecast(points, index, self.slope))
            output = passes.run(latent, times[index], reads=True)
        image, noise = passes.model.predicted(output, latent, alphas[index], sigmas[index])
        return State(alphas[index + 1] * image + sigmas[index + 1] * noise, points)


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


def tried(images: Images, whole: frozenset[int]) -> Row:
    """The PSNR of images with these steps whole, as a part of a row."""
    psnr = images.psnr(whole).sort().values.tolist()
    return {"psnr_db": psnr[len(psnr) // 2], "psnr_lowest_5": psnr[int(LOWEST * len(psnr))]}


def schedules(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """The rows with the whole steps of a sampling of --steps steps, one for each slope and number of whole steps
    (--whole): searched with the Euler sampler on --images prompts, and tried on as many others. Raises Refusal."""
    counts = options.whole or [count_of(options.steps, interval) for interval in INTERVALS]
    if not all(1 <= count <= options.steps for count in counts):
        raise Refusal(f"--whole takes numbers from 1 to {options.steps}, the number of steps")
    for name in options.model or KINDS:
        if name not in KINDS:
            raise Refusal(f"schedules are searched on {' and '.join(KINDS)}, not on {name}")
        model = Model.load(KINDS[name], DTYPES[options.dtype], device)
        passes = Passes(model, 1, options.images)
        for slope in SLOPES:
            imitation = Imitation(passes, model.track(options.steps), slope)
            images = Images.of(imitation, *cases(options.images))
            others = Images.of(imitation, *cases(options.images, 1))
            for count, whole in searched(images, counts):
                row = {"model": name, "steps": options.steps, "slope": slope, "whole": count}
                yield {**row, **tried(others, whole), "all_whole": sorted(whole)}
