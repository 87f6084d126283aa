"""The command line: python -m lib_onediff.bench step|image|quality|schedules|webui."""
from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import logging
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ..core.refusal import Refusal
from ..core.settings import Settings, parse_value
from ..core.sizes import parse_size
from ..demo import SHIPPED_CFG_SCALE
from ..runtime.cache import Fingerprint
from . import images, models, schedules, steps
from .share import joined, share
from .steps import HOSTS, Row

COMMANDS = {
    "step": steps.step, "image": images.image, "quality": images.quality, "schedules": schedules.schedules,
    "webui": images.webui,
}
EPILOG = """\
commands:
  step      one UNet call by each backend, alternately: time, first call, and error against float32
  image     whole images through diffusers: seconds, and difference from diffusers' own
  quality   difference of images from diffusers' own in float32, with trained weights
  schedules the steps that DeepCache should compute completely, searched with trained weights; --json FILE has them
  webui     images of a running WebUI with OneDiff off and on, over its REST API; with --share, off and with each
            preset, for the table of cards

examples:
  python -m lib_onediff.bench step --model sdxl sd15 --batch 2 8 --runs 40
  python -m lib_onediff.bench step --model sdxl --backend host native --set low_bit=fp8 --set low_bit=int8
  python -m lib_onediff.bench image --model sdxl --steps 30 --set deepcache_interval=3 --set second_gpu=auto
  python -m lib_onediff.bench quality --images 200 --steps 30 --set deepcache_interval=3 deepcache_depth=2
  python -m lib_onediff.bench webui http://127.0.0.1:7860 --size 512x512 960x720
  python -m lib_onediff.bench webui http://127.0.0.1:7860 --share
"""


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """The values of OneDiff's options, by name, from words such as "low_bit=int8". A word without "=" has the value "";
    of several words for one option, the last counts. Raises ValueError for an unknown option or a wrong value. Its
    message is a sentence for users, except where an option takes a number and the value is none."""
    known = {option.name: option for option in fields(Settings)}
    chosen = {}
    for word in words:
        name, _, value = word.partition("=")
        chosen[name] = parse_value(known[name], value) if name in known else value
    Settings.from_mapping(chosen)
    return chosen


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line's options, with the defaults of the command. Ends the process (SystemExit), and prints a
    sentence, for a wrong one. arguments: by default sys.argv's."""
    gpu = torch.cuda.is_available()
    everyone = [*HOSTS, *next(option.metadata["choices"] for option in fields(Settings) if option.name == "backend")]
    parser = argparse.ArgumentParser(
        prog="python -m lib_onediff.bench", description="Measure OneDiff and the host side by side.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS))
    parser.add_argument("url", nargs="?", help="webui: its address, such as http://127.0.0.1:7860")
    parser.add_argument("--set", nargs="+", action="append", default=[], metavar="OPTION=VALUE",
                        help="add a row with these options of OneDiff; repeat it for more rows")
    parser.add_argument("--size", nargs="+", default=[], metavar="WxH", help="pixels (default: 1024x1024 or 512x512)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows, with all times, to this file")
    parser.add_argument("--share", nargs="?", type=Path, const=Path(), metavar="FOLDER", help="webui: write the files "
                        "for the table of cards to this folder (default: the current one)")
    parser.add_argument("--dtype", choices=list(steps.DTYPES), default="fp16" if gpu else "fp32")
    parser.add_argument("--model", nargs="+", help=f"{', '.join(models.CONFIGURATIONS)} with random weights; or a "
                        "checkpoint's file or folder; for image, quality and schedules a diffusers folder")
    parser.add_argument("--backend", nargs="+", choices=everyone, metavar="NAME",
                        default=[*HOSTS, "native", "cudagraph", "eager"] if gpu else ["host", "eager"],
                        help=f"step: one row for each of these backends: {', '.join(everyone)}")
    parser.add_argument("--batch", nargs="+", type=int, help="step: rows of a call (2: one image with CFG); image: "
                        "images at once")
    parser.add_argument("--tokens", type=int, default=77, help="step: tokens of the prompt")
    parser.add_argument("--offload", action="store_true", help="step: keep all weights in main memory, with diffusers' "
                        "group offloading and streams")
    parser.add_argument("--runs", type=int, help="timed calls for each row (default: step 40, else 5)")
    parser.add_argument("--steps", type=int, help="all but step: steps of an image (default: 20, quality and schedules "
                        "30)")
    parser.add_argument("--images", type=int, default=200, help="quality, schedules: number of images")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="quality: write a picture of the first images of "
                        "each --set to this file")
    parser.add_argument("--guidance", type=float, default=SHIPPED_CFG_SCALE, help="quality, schedules: the CFG scale "
                        f"(default: {SHIPPED_CFG_SCALE:g}, which suits these models)")
    parser.add_argument("--whole", type=int, nargs="+", help="schedules: how many steps to compute completely; one "
                        "search for each number (default: the numbers of intervals 2 to 5)")
    options = parser.parse_args(arguments)
    if options.picture and options.command != "quality":
        parser.error("--picture works with quality only")
    options.runs = options.runs or (40 if options.command == "step" else 5)
    options.batch = options.batch or [1 if options.command == "image" else 2]
    options.steps = options.steps or (30 if options.command in ("quality", "schedules") else 20)
    if options.model is None and options.command not in ("quality", "schedules"):
        options.model = ["sdxl", "sd15"] if gpu else ["tiny-sdxl", "tiny-sd15"]
    if (options.url is not None) != (options.command == "webui"):
        parser.error("webui needs an address, and the other commands take none")
    if options.share and (options.command != "webui" or options.set):
        parser.error("--share works with webui only, and not with --set")
    if options.share and not options.share.is_dir():
        parser.error(f"--share: {options.share} is not a folder")
    try:
        options.set = [options_of(words) for words in options.set]
        options.size = [parse_size(text) for text in options.size]
        if any(size.batch > 1 for size in options.size):
            raise ValueError("--size takes only pixels, such as 768x512; use --batch for several images at once")
    except ValueError as problem:
        parser.error(str(problem))
    return options


def machine() -> dict[str, Any]:
    """The facts about this machine on which times and errors depend, by name: GPU, driver, versions, CPU threads."""
    facts = {**asdict(Fingerprint.of()), "python": platform.python_version(), "threads": torch.get_num_threads()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        facts["diffusers"] = importlib.metadata.version("diffusers")
    return facts


def cells(row: Row) -> dict[str, str]:
    """The values of a row as printed, by name. Those named all_..., such as lists of all times, are left out."""
    return {name: shown(value) for name, value in row.items() if not name.startswith("all_")}


def shown(value: Any) -> str:
    """A value of a row as printed: floats with four significant digits, "" for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table of the rows, with a column for every name that any row has; served_by and note come last."""
    printed = [cells(row) for row in rows]
    names = sorted(dict.fromkeys(name for row in printed for name in row), key=("served_by", "note").__contains__)
    heads = [name.replace("_", " ") for name in names]
    lines = [[row.get(name, "") for name in names] for row in printed]
    return "\n".join(map(joined, [heads, ["---"] * len(names), *lines]))


@torch.no_grad()
def main() -> int:
    """Run the command of sys.argv, and print its rows as a table; with --share, share() prints its own. With --json,
    the file is written again after each row.

    Returns the exit code: 1 after a failure, or if a row has a note, such as a variant that this machine does not
    support; else 0.

    A failure is an OSError, a Refusal, a RuntimeError or a ValueError of the command. It is printed as one line, after
    the table of the rows made until then; other exceptions are passed on. Wrong options end the process: see parse."""
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # On Windows, output that is redirected to a file only supports the letters of one code page.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    # With --share, the GPU's memory is left to the WebUI.
    here = torch.cuda.is_available() and not options.share
    device = torch.device("cuda", torch.cuda.current_device()) if here else torch.device("cpu")
    facts = {} if options.share else machine()
    rows = []
    problem = ""
    try:
        for row in (share if options.share else COMMANDS[options.command])(options, device):
            rows.append(row)
            # Print and write each row at once, so that a run that is stopped keeps its results.
            print(", ".join(f"{name} {value}" for name, value in cells(row).items()), file=sys.stderr)
            if options.json:
                document = {"command": sys.argv[1:], "machine": facts, "rows": rows}
                options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except (OSError, Refusal, RuntimeError, ValueError) as error:
        problem = str(error).splitlines()[0]
    if rows and not options.share:
        print(", ".join(f"{name} {value}" for name, value in facts.items()) + "\n\n" + table(rows))
    if problem:
        print(f"OneDiff bench: {problem}", file=sys.stderr)
    return 1 if problem or any("note" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
