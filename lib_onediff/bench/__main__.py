"""Compare the host's UNet and ours in one run: python -m lib_onediff.bench --help."""
from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import models, report, webui
from .measure import Plan, Row, measure, synchronize
from .variants import VARIANTS, WITHOUT_GPU

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
COLD_START_LIMIT_S = 400


def size_of(text: str) -> tuple[int, int]:
    """(width, height) from "1024x768"."""
    width, _, height = text.partition("x")
    if not (width.isdigit() and height.isdigit()) or int(width) % 8 or int(height) % 8 or not int(width) * int(height):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1024x768 with both sides multiples of 8")
    return int(width), int(height)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m lib_onediff.bench", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(models.CONFIGURATIONS), metavar="NAME",
                        default=["sdxl", "sd15"] if gpu else ["tiny-sd15", "tiny-sdxl"],
                        help=f"configurations with random weights: {', '.join(models.CONFIGURATIONS)}")
    parser.add_argument("--model", type=Path, help="a diffusers folder or a checkpoint file instead")
    parser.add_argument("--sizes", nargs="+", type=size_of, metavar="WxH", help="pixels; several are run in turn")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), metavar="NAME",
                        default=list(VARIANTS) if gpu else list(WITHOUT_GPU), help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16" if gpu else "fp32")
    parser.add_argument("--batch", type=int, default=2, help="latents per call (2: one picture with guidance)")
    parser.add_argument("--tokens", type=int, default=77)
    parser.add_argument("--runs", type=int, default=30, help="timed calls per variant and size")
    parser.add_argument("--cold", action="store_true", help="also time each variant's first call in a fresh process")
    parser.add_argument("--json", type=Path, default=Path("onediff-bench.json"))
    parser.add_argument("--plot", type=Path, default=Path("onediff-bench.png"))
    parser.add_argument("--webui", metavar="URL", help="time the pictures of a running WebUI instead")
    parser.add_argument("--steps", type=int, default=20, help="steps of a picture with --webui")
    parser.add_argument("--cold-child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def sizes_for(model: str, chosen: list[tuple[int, int]] | None) -> list[tuple[int, int]]:
    if chosen:
        return chosen
    if model.startswith("tiny"):
        return [(128, 128), (72, 88)]
    return [(1024, 1024), (832, 1216), (960, 720)] if model == "sdxl" else [(512, 512), (512, 768), (960, 720)]


def unet_for(name: str, options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    return models.load_unet(options.model, device) if options.model else models.random_unet(name, device)


def plan_for(name: str, options: argparse.Namespace) -> Plan:
    return Plan(name, sizes_for(name, options.sizes), options.variants, options.batch, options.tokens,
                DTYPES[options.dtype], options.runs)


def cold_start(name: str, variant: str, options: argparse.Namespace) -> float | None:
    """Seconds of the first two calls in a fresh process with empty compiler caches; None if it fails."""
    command = [sys.executable, "-m", "lib_onediff.bench", "--cold-child", variant, "--models", name,
               "--dtype", options.dtype, "--batch", str(options.batch), "--tokens", str(options.tokens)]
    command += ["--model", str(options.model)] if options.model else []
    command += ["--sizes", *(f"{width}x{height}" for width, height in sizes_for(name, options.sizes)[:1])]
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
        try:
            finished = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True,
                                      timeout=COLD_START_LIMIT_S, check=True)
            return float(json.loads(finished.stdout.splitlines()[-1])["seconds"])
        except (subprocess.SubprocessError, ValueError, KeyError, IndexError):
            return None


def cold_child(options: argparse.Namespace, device: torch.device) -> None:
    """Print the seconds from the first call to the output of the second, by which time every variant is at speed."""
    unet = unet_for(options.models[0], options, device).to(DTYPES[options.dtype])
    arguments = models.inputs(unet, *options.sizes[0], options.batch, options.tokens, DTYPES[options.dtype])
    synchronize(device)
    start = time.perf_counter()
    with torch.no_grad():
        run = VARIANTS[options.cold_child](unet)
        for _ in range(2):
            run(arguments)
    synchronize(device)
    print(json.dumps({"seconds": time.perf_counter() - start}))


def pictures(options: argparse.Namespace) -> int:
    """Print how long pictures take in a running WebUI, with OneDiff on and off."""
    running, rows = webui.RunningWebUI(options.webui), []
    try:
        for size in options.sizes or [(512, 512)]:
            rows.append(webui.measure_pictures(running, size, options.steps, options.runs))
    except webui.NoAnswer as problem:
        print(f"OneDiff bench: {problem}")
        return 1
    print(f"{options.steps} steps, medians of {options.runs} pictures each, off and on in turn")
    print(webui.table(rows))
    return 0


def main() -> int:
    options = parse()
    if options.webui:
        return pictures(options)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.cold_child:
        cold_child(options, device)
        return 0
    facts: dict[str, Any] = report.machine(device)
    names = [options.model.name] if options.model else options.models
    print("OneDiff bench: " + ", ".join(f"{name} {value}" for name, value in facts.items())
          + f"; {options.dtype}, batch {options.batch}, {options.tokens} tokens", flush=True)
    rows: list[Row] = []
    cold: dict[str, dict[str, float | None]] = {}
    for name in names:
        try:
            unet = unet_for(name, options, device)
        except ValueError as error:
            print(f"OneDiff bench: {error}")
            return 1
        rows += measure(unet, plan_for(name, options))
        del unet
        if options.cold:
            cold[name] = {variant: cold_start(name, variant, options) for variant in options.variants}
    print(report.table(rows))
    if cold:
        print(report.cold_start_table(cold))
    report.write_json(options.json, rows, facts, cold)
    try:
        report.write_plot(options.plot, rows, facts)
        print(f"written: {options.json}, {options.plot}")
    except ImportError:
        print(f"written: {options.json}; no plot, because matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
