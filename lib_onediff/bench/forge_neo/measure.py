"""What a user waits for with one variant: the first image and later ones, after changes too, and how exact they are."""
from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...runtime.verify import relative_error
from ..clock import MIB, give_back_memory
from ..measure import without_tf32
from .generation import Image, exact_call, generate, one_call
from .host import Checkpoint, Size
from .variants import HOST, CannotRun, NeoVariant, switched_on

START, NEW_SIZE, LORA = CHANGES = ("start", "new size", "LoRA")
MOST_UNSETTLED = 6
WARM_UP_SIZE = (256, 256)


@dataclass
class After:
    """The images after a change. Seconds are whole samplings, the loading included.

    unsettled: images between the first and the later ones, until nothing gets faster any more. error: of one UNet call
    against the host's in float32. distance: of the final latent from the host's.
    """

    first_s: float
    later_s: float | None = None
    step_ms: float | None = None
    unsettled: list[float] = field(default_factory=list)
    first_routes: dict[str, int] = field(default_factory=dict)
    peak_mib: float | None = None
    error: float | None = None
    distance: float | None = None


@dataclass
class Measured:
    """One variant. problem: why something was not measured."""

    model: str
    variant: str
    after: dict[str, After] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str = ""
    note: str = ""


class Reference:
    """What the host gave after each change: its own latents, and one UNet call's output in float32."""

    def __init__(self) -> None:
        self.latents: dict[str, Tensor] = {}
        self.exact: dict[str, Tensor] = {}


def warm_up(checkpoint: Checkpoint) -> None:
    """One step at a size that is not measured: the libraries are loaded, whichever variant comes first."""
    host = NeoVariant(HOST)
    with switched_on(host, checkpoint):
        generate(checkpoint, host, WARM_UP_SIZE, 1)


def measure(checkpoint: Checkpoint, variant: NeoVariant, options: argparse.Namespace, reference: Reference) -> Measured:
    row = Measured(checkpoint.name, variant.name)
    began = time.perf_counter()
    change = START
    try:
        with switched_on(variant, checkpoint), time_limit(options.limit):
            for change, size, done in changes(checkpoint):
                measure_change(checkpoint, variant, options, reference, row, change, size, done)
    except OutOfTime:
        row.problem = f"not done within {options.limit:.0f} s ({change})"
    except CannotRun as reason:
        row.problem = str(reason)
    except Exception as error:
        traceback.print_exc()
        row.problem = f"{change}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    row.note, row.seconds = variant.note(), time.perf_counter() - began
    give_back_memory()
    return row


def changes(checkpoint: Checkpoint) -> Iterator[tuple[str, Size, Callable[[], None] | None]]:
    """What the user does, the size from then on, and how it is done."""
    first, second = checkpoint.sizes
    yield START, first, None
    yield NEW_SIZE, second, None
    yield LORA, first, checkpoint.apply_lora


def measure_change(
    checkpoint: Checkpoint, variant: NeoVariant, options: argparse.Namespace, reference: Reference, row: Measured,
    change: str, size: Size, done: Callable[[], None] | None,
) -> None:
    gpu = checkpoint.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(checkpoint.device)

    def image(first: Callable[[], None] | None = None) -> tuple[Image, Counter[str]]:
        before = variant.routes()
        made = generate(checkpoint, variant, size, options.steps, first=first)
        return made, variant.routes() - before

    made, routes = image(done)
    row.after[change] = after = After(made.seconds, first_routes=dict(routes))
    while not variant.settled(routes) and len(after.unsettled) < MOST_UNSETTLED:
        made, routes = image()
        after.unsettled.append(made.seconds)
    images = []
    for _ in range(options.later):
        made, _ = image()
        images.append(made)
    after.later_s = statistics.median(made.seconds for made in images)
    after.step_ms = statistics.median(step for made in images for step in made.step_ms)
    if gpu:
        after.peak_mib = torch.cuda.max_memory_allocated(checkpoint.device) / MIB
    compare(checkpoint, variant, reference, after, change, size, made.latent)


def compare(
    checkpoint: Checkpoint, variant: NeoVariant, reference: Reference, after: After, change: str, size: Size,
    latent: Tensor,
) -> None:
    """The last image and one call more, against the host's; the host comes first."""
    output = one_call(checkpoint, variant, size)
    if variant.name == HOST:
        reference.latents[change] = latent
        with without_tf32():
            reference.exact[change] = exact_call(checkpoint, size)
        gc.collect()
    if change in reference.exact:
        after.error = relative_error(output, reference.exact[change])
        after.distance = relative_error(latent, reference.latents[change])


class OutOfTime(BaseException):
    """Not an Exception: Neo's Torch Compile has torch swallow those and carry on."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside when they are over; on the main thread alone. 0: no limit."""

    def over(signum: int, frame: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
