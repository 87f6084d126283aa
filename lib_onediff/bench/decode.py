"""Measure the VAE's decoding: the host's in both precisions and ours, in turn."""
from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..engines import EAGER, NATIVE
from ..hosts.diffusers import vae as diffusers_decoder
from ..options.settings import Settings
from ..runtime.runtime import runtime
from ..runtime.vae.call_stats import HOST
from ..runtime.verify import relative_error
from .clock import in_turn, memory_use, seconds
from .measure import quotient
from .models import random_vae
from .options import DTYPES, Size, name_of, ours_among
from .profile import Kernel, kernel_times, kernels
from .reference import without_tf32
from .variants import CALLS_UNTIL_READY, VARIANTS

PICTURE = (1024, 1024)
HOST_EXACT = "host fp32"
HEADINGS = (
    "decode", "variant", "median ms", "x host", "x host fp32", "rel. error", "error x host", "first call s", "peak MiB",
)

Decode = Callable[[Tensor], Tensor]


@dataclass
class DecodeRow:
    """One way to decode one picture. Times as in measure.Row; ratio: against the host in the same dtype.

    exact_ratio: against the host in float32, with whatever TF32 torch allows by default.
    """

    size: str
    variant: str
    median_ms: float | None = None
    ratio: float | None = None
    exact_ratio: float | None = None
    relative_error: float | None = None
    host_errors: float | None = None
    first_call_s: float | None = None
    peak_mib: float | None = None
    problem: str = ""
    times_ms: list[float] = field(default_factory=list, repr=False)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        if self.problem:
            return [self.size, self.variant, f"failed: {self.problem}", *[""] * 6]
        forms = (
            (self.median_ms, ".2f"), (self.ratio, ".2f"), (self.exact_ratio, ".2f"), (self.relative_error, ".1e"),
            (self.host_errors, ".2f"), (self.first_call_s, ".2f"), (self.peak_mib, ".0f"),
        )
        return [self.size, self.variant, *("" if value is None else format(value, form) for value, form in forms)]


def decode(options: argparse.Namespace, device: torch.device) -> list[DecodeRow]:
    """Rows for a picture of 1024x1024 and for --sizes; without a GPU a tiny VAE decodes --sizes or 64x64."""
    gpu = device.type == "cuda"
    sizes = list(dict.fromkeys([PICTURE, *(options.sizes or [])])) if gpu else options.sizes or [(64, 64)]
    dtype = DTYPES[options.dtype]
    backend = backend_for(options)
    vae = random_vae(not gpu, device).to(dtype)
    names = f"host {options.dtype}", HOST_EXACT, f"onediff {backend} {options.dtype}"
    rows: list[DecodeRow] = []
    with torch.no_grad():
        # The exact one has the weights as dtype rounds them.
        exact, ours = copy.deepcopy(vae).float(), copy.deepcopy(vae)
        ways: dict[str, tuple[Decode, torch.dtype]] = {
            names[0]: (host(vae), dtype), HOST_EXACT: (host(exact), torch.float32),
        }
        diffusers_decoder.attach(ours.decoder, Settings(backend=backend, verify=False))
        ways[names[2]] = (served(host(ours), backend), dtype)
        for size in sizes:
            rows += at_size(size, ways, exact, options.runs or 20, device)
        diffusers_decoder.detach(ours.decoder)
    return rows


def profile(options: argparse.Namespace, device: torch.device) -> list[Kernel]:
    """The kernels of one decode of ours at 1024x1024. Needs a GPU. Raises Unavailable."""
    backend, dtype = backend_for(options), DTYPES[options.dtype]
    vae = random_vae(False, device).to(dtype)
    diffusers_decoder.attach(vae.decoder, Settings(backend=backend, verify=False))
    run, given = served(host(vae), backend), latents_for(vae, PICTURE, device).to(dtype)
    with torch.no_grad():
        for _ in range(CALLS_UNTIL_READY):
            run(given)
        times = kernel_times(lambda: run(given))
    diffusers_decoder.detach(vae.decoder)
    return kernels(times, "decode", name_of(PICTURE), f"onediff {backend}")


def backend_for(options: argparse.Namespace) -> str:
    """Of our first variant; a decode has no graph, and what cudagraph is without one is eager."""
    return NATIVE if VARIANTS[ours_among(options.variants)].backend == NATIVE else EAGER


def host(vae: nn.Module) -> Decode:
    """Decode as a pipeline does."""
    return lambda latents: vae.decode(latents, return_dict=False)[0]


def served(run: Decode, backend: str) -> Decode:
    """The same, but a RuntimeError where the VAE's own decoder or another backend ran instead of this one."""
    call_stats = runtime.vae.call_stats

    def checked(latents: Tensor) -> Tensor:
        before = call_stats.calls[HOST]
        with runtime.wait_for_compile():
            picture = run(latents)
        if call_stats.calls[HOST] > before:
            raise RuntimeError(f"the VAE's own decoder ran: {call_stats.reason}")
        if call_stats.entry.key.backend != backend:
            raise RuntimeError(f"the backend {call_stats.entry.key.backend} ran: {call_stats.reason}")
        return picture

    return checked


def at_size(
    size: Size, ways: dict[str, tuple[Decode, torch.dtype]], exact: nn.Module, runs: int, device: torch.device
) -> list[DecodeRow]:
    latents = latents_for(exact, size, device)
    deepcache = next(iter(ways.values()))[1]
    with without_tf32():
        reference = host(exact)(latents.to(deepcache).float()).cpu()
    given = {name: latents.to(deepcache).to(dtype) for name, (_, dtype) in ways.items()}
    rows = []
    for name, (run, _) in ways.items():
        row = DecodeRow(name_of(size), name)
        rows.append(row)
        try:
            with memory_use(device) as used:
                row.first_call_s = seconds(lambda run=run, name=name: run(given[name]), device)
                for _ in range(CALLS_UNTIL_READY - 1):
                    output = run(given[name])
                row.relative_error = relative_error(output.cpu(), reference)
                del output
            row.peak_mib = used.peak_mib
        except RuntimeError as error:
            row.problem = str(error).splitlines()[0]
    measured = [row for row in rows if not row.problem]
    calls = [lambda row=row: ways[row.variant][0](given[row.variant]) for row in measured]
    for row, times in zip(measured, in_turn(calls, runs, device), strict=True):
        row.times_ms, row.median_ms = times, statistics.median(times)
    compare(measured, rows[0].variant)
    return rows


def latents_for(vae: nn.Module, size: Size, device: torch.device) -> Tensor:
    """Random latents of a picture, (1, channels, h, w), the same for every way to decode."""
    generator = torch.Generator().manual_seed(size[0] * 10000 + size[1])
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    shape = (1, vae.config.latent_channels, size[1] // scale, size[0] // scale)
    return torch.randn(shape, generator=generator).to(device)


def compare(rows: list[DecodeRow], baseline: str) -> None:
    by_name = {row.variant: row for row in rows}
    host_row, exact_row = by_name.get(baseline), by_name.get(HOST_EXACT)
    for row in rows:
        if host_row is not None:
            row.ratio = quotient(host_row.median_ms, row.median_ms)
            row.host_errors = quotient(row.relative_error, host_row.relative_error)
        if exact_row is not None:
            row.exact_ratio = quotient(exact_row.median_ms, row.median_ms)
