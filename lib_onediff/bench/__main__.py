"""Compare the host's UNet with ours in one run: python -m lib_onediff.bench --help."""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..engines.operator_sets import OperatorSets
from ..ops.tuning_cache import TuningCache
from . import cold, first_calls, images, low_bit, models, quality, report, two_gpus, webui
from .children import Task
from .clock import give_back_memory
from .measure import HEADINGS, Plan, measure
from .options import DTYPES, parse, sizes_for
from .patches import PATCHES

SECTIONS = "rows", "cold", "new_sizes", "images", "quality", "products", "two_gpus"
JOBS = {"cold": cold.child, "first calls": first_calls.child}


class Report:
    """Prints every section when it is done, and keeps the file up to date: a run may be stopped at any time."""

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self._options = options
        self._facts = facts
        self.sections: dict[str, list[Any]] = {name: [] for name in SECTIONS}
        self.complete = True

    def add(self, section: str, headings: Sequence[str], rows: list[Any]) -> None:
        self.sections[section] += rows
        print("\n" + report.markdown(headings, [row.cells() for row in rows]), flush=True)
        report.write_json(self._options.json, self._facts, self.sections)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part that fails (out of memory, say) is told in one line, and the others are still measured."""
        try:
            yield
        except RuntimeError as problem:
            self.complete = False
            print(f"\n{name}: {str(problem).splitlines()[0]}", flush=True)

    def finish(self) -> int:
        """Write the file. Returns the command's exit status."""
        report.write_json(self._options.json, self._facts, self.sections)
        print(f"\nwritten: {self._options.json}")
        return 0 if self.complete else 1


def plan_for(name: str, options: argparse.Namespace) -> Plan:
    return Plan(name, sizes_for(name, options.sizes), options.variants, options.batch, options.tokens,
                DTYPES[options.dtype], options.runs)


def measure_patches(unet: Any, name: str, options: argparse.Namespace, done: Report) -> None:
    """UNet calls with each patch that was asked for, at the first size."""
    kind = "sdxl" if unet.config.addition_embed_type == "text_time" else "sd15"
    for patch in options.patches:
        with done.part(f"{name}, {patch}"), PATCHES[patch](unet, kind, options.batch) as patched:
            plan = replace(plan_for(name, options), model=f"{name}, {patch}", patched=patched)
            done.add("rows", HEADINGS, measure(unet, replace(plan, sizes=plan.sizes[:1])))


def unet_for(name: str, options: argparse.Namespace, device: torch.device) -> nn.Module:
    return models.load_unet(options.model, device) if options.model else models.random_unet(name, device)


def measure_model(name: str, options: argparse.Namespace, device: torch.device, done: Report) -> None:
    """Every section that was asked for, for one model. Raises ValueError with a sentence if it cannot be loaded."""
    if options.runs:
        with done.part(f"{name}, UNet calls"):
            unet = unet_for(name, options, device)
            done.add("rows", HEADINGS, measure(unet, plan_for(name, options)))
            measure_patches(unet, name, options, done)
            del unet
    if options.images:
        with done.part(f"{name}, images"):
            done.add("images", images.HEADINGS, told(images.images(name, options, device)))
    # From here on other processes measure, and they need the GPU's memory.
    give_back_memory()
    if options.new_sizes is not None:
        done.add("new_sizes", first_calls.HEADINGS, first_calls.first_calls(name, options))
    if options.cold:
        starts = [cold.start_of(name, variant, options) for variant in options.variants]
        done.add("cold", cold.HEADINGS, starts)


def told(rows: Iterable[Any]) -> list[Any]:
    """All rows, each printed in a line as soon as it is there: a run that is stopped has told what it measured."""
    found = []
    for row in rows:
        print(", ".join(cell for cell in row.cells() if cell), flush=True)
        found.append(row)
    return found


def judge_images(options: argparse.Namespace, device: torch.device, done: Report) -> int:
    """The table of --quality, printed whole when it is done, and a line for each setting on the way."""
    print(f"{options.quality} images of {options.steps} steps a setting", flush=True)
    try:
        rows = told(quality.quality(options, device))
    except ValueError as problem:
        print(f"OneDiff bench: {problem}")
        return 1
    done.add("quality", quality.HEADINGS, rows)
    return done.finish()


def measure_low_bit(options: argparse.Namespace, device: torch.device, done: Report) -> int:
    """The tables of --low-bit."""
    dtype = DTYPES[options.dtype]
    lack = low_bit.why_not(device, dtype, OperatorSets(TuningCache()))
    if lack is not None:
        print(f"OneDiff bench: {lack}")
        return 1
    table = low_bit.ProductTable(dtype, device)
    for kind, reason in table.lacks.items():
        if reason:
            print(f"{kind.name}: {reason}")
    with torch.no_grad():
        for model in low_bit.SHAPES:
            with done.part(f"{model}, products"):
                rows = list(table.rows(model))
                done.add("products", low_bit.HEADINGS, rows)
                print(low_bit.sums(rows), flush=True)
    with done.part("sdxl, step"):
        done.add("rows", HEADINGS, low_bit.step(options, device))
    return done.finish()


def images_of_webui(options: argparse.Namespace) -> int:
    """Print how long images take in a running WebUI, with OneDiff on and off."""
    running, rows = webui.RunningWebUI(options.webui), []
    try:
        for size in options.sizes or [(512, 512)]:
            rows.append(webui.measure_images(running, size, options.steps, options.runs))
    except (OSError, ValueError) as problem:
        print(f"OneDiff bench: {running.asked}: {problem} (is it running, with --api, and with OneDiff?)")
        return 1
    print(f"{options.steps} steps, medians of {options.runs} images each, off and on in turn")
    print(report.markdown(webui.HEADINGS, (row.cells() for row in rows)))
    return 0


def work_for_parent(text: str, device: torch.device) -> int:
    """Do a task in this fresh process, and print the result as JSON for the process that asked."""
    task = Task.from_text(text)
    try:
        with torch.no_grad():
            result = JOBS[task.job](task, device)
    except (RuntimeError, ValueError) as problem:
        result = {"problem": str(problem).splitlines()[0]}
    print(json.dumps(result))
    return 0


def main() -> int:
    options = parse()
    if options.webui:
        return images_of_webui(options)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if options.child:
        return work_for_parent(options.child, device)
    facts = report.machine(device)
    print("OneDiff bench: " + ", ".join(f"{name} {value}" for name, value in facts.items())
          + f"; {options.dtype}, batch {options.batch}, {options.tokens} tokens", flush=True)
    done = Report(options, facts)
    if options.quality:
        return judge_images(options, device, done)
    if options.two_gpus:
        for name in options.models:
            with done.part(f"{name}, two GPUs"):
                done.add("two_gpus", two_gpus.HEADINGS, two_gpus.two_gpus(name, options, device))
        return done.finish()
    if options.low_bit:
        return measure_low_bit(options, device, done)
    for name in [options.model.name] if options.model else options.models:
        try:
            measure_model(name, options, device, done)
        except ValueError as error:
            print(f"OneDiff bench: {error}")
            return 1
    return done.finish()


if __name__ == "__main__":
    sys.exit(main())
