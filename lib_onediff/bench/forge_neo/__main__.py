"""Forge Neo as it comes, with its Torch Compile, with SageAttention and with OneDiff, on its own backend:

    python -m lib_onediff.bench.forge_neo --forge-neo CHECKOUT
"""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..report import machine
from .host import UNETS, Checkpoint, import_backend
from .measure import Measured, Reference, measure, warm_up
from .partial import FREE_GIB, measure_partial
from .report import table
from .variants import ALL, COMPILE_PRESETS, HOST, NeoVariant, OneDiff, variants_for

PACKAGES = ("triton", "sageattention", "comfy-kitchen", "diffusers", "numpy")
SMALL_STEPS = 2
SMALL_LATER = 2


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lib_onediff.bench.forge_neo",
        description="Images on Forge Neo's own backend: as it comes, with its Torch Compile, SageAttention, and ours.",
    )
    parser.add_argument("--forge-neo", type=Path, required=True, metavar="FOLDER", help="a checkout of Forge Neo")
    parser.add_argument("--models", type=names(UNETS), default=["sd15", "sdxl"], metavar="NAME,NAME",
                        help=f"of: {', '.join(UNETS)}; random weights")
    parser.add_argument("--variants", type=names(ALL), default=list(ALL), metavar="NAME,NAME",
                        help=f"of: {', '.join(ALL)}; the host always")
    parser.add_argument("--steps", type=int, help=f"steps of an image; 20, or {SMALL_STEPS} with --small")
    parser.add_argument("--later", type=int, help="images after the first one, of which the median is told; 5")
    parser.add_argument("--limit", type=float, default=160.0, metavar="SECONDS",
                        help="how long a variant may take for all its images; 0: as long as it likes")
    parser.add_argument("--small", action="store_true", help="tiny networks and sizes, on the CPU")
    parser.add_argument("--partial", action="store_true", help="with a card too full for the model")
    parser.add_argument("--no-images", action="store_true", help="only what --partial asks for")
    parser.add_argument("--free-gib", type=float, help="how much --partial leaves free; 4 for SDXL, 2 for SD1.5")
    parser.add_argument("--json", type=Path, default=Path("onediff-forge-neo.json"))
    options = parser.parse_args(arguments)
    options.steps = options.steps or (SMALL_STEPS if options.small else 20)
    options.later = options.later or (SMALL_LATER if options.small else 5)
    options.variants = [name for name in ALL if name == HOST or name in options.variants]
    return options


def names(known: Any) -> Any:
    def split(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return chosen

    return split


class Results:
    """What was measured so far; written whenever there is more of it, should the run be ended."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path = path
        self.rows: list[Measured] = []
        self.document: dict[str, Any] = {"machine": facts, "images": [], "partial": []}

    def add_row(self, row: Measured) -> None:
        self.rows.append(row)
        self.add("images", asdict(row))

    def add(self, section: str, found: dict[str, Any]) -> None:
        self.document[section].append(found)
        self._path.write_text(json.dumps(self.document, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.small and not torch.cuda.is_available():
        print("this needs an NVIDIA GPU; on a CPU: --small", file=sys.stderr)
        return 2
    if options.small:
        # Threads cost such networks more than they give, above all on a busy machine.
        torch.set_num_threads(1)
    try:
        release = import_backend(options.forge_neo, options.small)
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.small else "cuda")
    facts = {**machine(device, PACKAGES), "Forge Neo": release, "steps": options.steps}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    results = Results(options.json, facts)
    for name in options.models:
        measure_model(name, options, results)
    if results.rows:
        print(table(results.rows))
    print(f"written to {options.json}")
    return 0


def measure_model(name: str, options: argparse.Namespace, results: Results) -> None:
    began = time.perf_counter()
    checkpoint = Checkpoint(name, options.small)
    say(f"{name}: random weights made in {time.perf_counter() - began:.1f} s")
    warm_up(checkpoint)
    reference = Reference()

    def images(variants: list[str]) -> None:
        for variant in variants_for([] if options.no_images else variants, options.forge_neo):
            row = measure(checkpoint, variant, options, reference)
            results.add_row(row)
            say(f"{name}, {row.variant}: {row.seconds:.1f} s{', ' + row.problem if row.problem else ''}")

    images([variant for variant in options.variants if variant not in COMPILE_PRESETS])
    if options.partial:
        partly_loaded(checkpoint, options, results)
    images([variant for variant in options.variants if variant in COMPILE_PRESETS])
    checkpoint.unload()


def partly_loaded(checkpoint: Checkpoint, options: argparse.Namespace, results: Results) -> None:
    """With a card too full for the model; where that fails, the rest is still measured."""
    free = options.free_gib or FREE_GIB[checkpoint.name]
    try:
        for stage in measure_partial(checkpoint, NeoVariant(HOST), OneDiff(), options.steps, free):
            results.add("partial", asdict(stage))
            say(stage.line())
    except Exception as error:
        traceback.print_exc()
        problem = f"partial: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        results.add("partial", {"problem": problem})
        say(problem)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A compiler that was stopped half-way would have the interpreter wait for its workers.
    os._exit(code)
