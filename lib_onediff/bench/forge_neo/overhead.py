"""What our hooks cost where the host's own forward runs: in a call, and in a sampling."""
from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..clock import synchronize
from .generation import COMPARED_SIGMA, NOISE_SEED, PROMPT_SEED, begin, generate
from .host import Checkpoint
from .variants import ONEDIFF, Variant, switched_on

SAMPLINGS = 3
CALLS = 20


@dataclass
class Samples:
    """Seconds of CPU time: before and after a sampling, of the first call and of later ones outside the host's blocks,
    and of whole calls."""

    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Overhead:
    """Medians, with our hooks less without.

    whole_call_ms: of calls as a whole, which the host's own milliseconds make unsteady; call_ms leaves out what lies
    between the host's first block and its last. sampling_ms: before and after it, and its first call over a later one.
    """

    model: str
    call_ms: float
    whole_call_ms: float
    sampling_ms: float
    before_ms: float
    first_call_ms: float
    after_ms: float
    routes: dict[str, int]
    reason: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        told = ", ".join(f"{count} {route}" for route, count in self.routes.items())
        return (
            f"{self.model}: our hooks on the host's route add {self.call_ms:.3f} ms a call"
            f" ({self.whole_call_ms:+.2f} by whole calls) and {self.sampling_ms:.2f} ms a sampling"
            f" (before {self.before_ms:.2f}, first call {self.first_call_ms:.2f}, after {self.after_ms:.2f});"
            f" routes: {told}; {self.reason}"
        )


class Stamps:
    """A block modifier that changes nothing: when the host's first block begins, and when its last one has ended.

    By it, the UNet is another extension's as well: its calls are the host's.
    """

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def modify(self, h: Any, when: str, transformer_options: dict[str, Any]) -> Any:
        block = transformer_options["block"]
        if when == "before" and block == ("input", 0):
            self.began = time.perf_counter()
        if when == "after" and block == ("last", 0):
            self.ended = time.perf_counter()
        return h


def measure_overhead(checkpoint: Checkpoint, host: Variant, ours: Any) -> Overhead:
    samples = {variant.name: Samples() for variant in (host, ours)}
    # In turn, so that a drift of the machine meets both alike.
    taken = Counter[str]()
    for variant in (host, ours, host, ours):
        with switched_on(variant, checkpoint):
            # Our forward is bound to the weights, as it is where one extension comes and goes.
            generate(checkpoint, variant, checkpoint.sizes[0], 1)
            counted = variant.routes()
            for _ in range(SAMPLINGS):
                one_sampling(checkpoint, variant, samples[variant.name])
            taken += variant.routes() - counted
    without, hooked = samples[host.name], samples[ONEDIFF]
    before, after = (milliseconds(times) for times in (hooked.before, hooked.after))
    first = milliseconds(hooked.first) - milliseconds(hooked.later)
    first -= milliseconds(without.first) - milliseconds(without.later)
    return Overhead(
        checkpoint.name, milliseconds(hooked.later) - milliseconds(without.later),
        milliseconds(hooked.whole) - milliseconds(without.whole), before + first + after, before, first, after,
        dict(taken), ours.reason,
    )


@torch.inference_mode()
def one_sampling(checkpoint: Checkpoint, variant: Variant, samples: Samples) -> None:
    from backend.sampling.condition import compile_conditions
    from backend.sampling.sampling_function import calc_cond_uncond_batch, sampling_cleanup, sampling_prepare

    stamps = Stamps()
    noise, prompt = checkpoint.noise(checkpoint.sizes[0], NOISE_SEED), checkpoint.condition(PROMPT_SEED)
    sigma = torch.full((1,), COMPARED_SIGMA, device=checkpoint.device)
    starting = time.perf_counter()
    p = begin(checkpoint, variant)
    samples.before.append(time.perf_counter() - starting)
    patcher = checkpoint.forge_objects.unet.clone()
    patcher.add_block_modifier(stamps.modify)
    checkpoint.forge_objects.unet = patcher
    sampling_prepare(patcher, noise)
    model = patcher.model
    outside = []
    with timed_calls(model) as times:
        for _ in range(CALLS):
            synchronize(checkpoint.device)
            calc_cond_uncond_batch(
                model, compile_conditions(prompt), compile_conditions(prompt), noise, sigma, patcher.model_options
            )
            outside.append(times[-1] - (stamps.ended - stamps.began))
    sampling_cleanup(patcher)
    ending = time.perf_counter()
    variant.after(p)
    samples.after.append(time.perf_counter() - ending)
    samples.first.append(outside[0])
    samples.later += outside[1:]
    samples.whole += times[1:]


@contextlib.contextmanager
def timed_calls(model: Any) -> Iterator[list[float]]:
    """The seconds of every call of a KModel meanwhile: everything of ours runs inside it."""
    below, times = model.apply_model, []

    def apply_model(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = below(*args, **kwargs)
        times.append(time.perf_counter() - began)
        return output

    model.apply_model = apply_model
    try:
        yield times
    finally:
        del model.apply_model


def milliseconds(times: list[float]) -> float:
    return statistics.median(times) * 1e3
