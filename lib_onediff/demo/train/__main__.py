"""`python -m lib_onediff.demo.train`: one command a stage."""
from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .setup import Setup

STAGES = ("judge", "vae", "denoiser", "sheet", "score")


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lib_onediff.demo.train", description="Trains emoji-sd, the model that the demo draws with."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="write the emoji of three unpacked packages as one small file")
    for package in ("noto", "fluent", "names"):
        pack.add_argument(f"--{package}", type=Path, required=True, help="a folder with a package.json")
    pack.add_argument("--data", type=Path, required=True, help="the file to write")
    for stage in STAGES:
        command = commands.add_parser(stage, help=f"the stage {stage}; goes on from what lies in the folder")
        command.add_argument("--out", type=Path, required=True, help="the folder of the training")
        command.add_argument("--data", type=Path, required=True, help="the file that pack wrote")
        command.add_argument("--cache", type=Path, help="a folder for the pixels of all emoji, for the next stage")
        command.add_argument("--seconds", type=float, default=60.0, help="how long this call trains")
        command.add_argument("--total", type=float, default=0.0, help="how long all calls of the stage train together")
        command.add_argument("--until", type=float, help="when to stop at the latest, in seconds since 1970")
        command.add_argument("--steps", type=int, help="at most so many steps, for a trial")
        command.add_argument("--emoji", type=int, help="only so many emoji, for a trial")
        command.add_argument("--batch", type=int, default=256)
        command.add_argument("--scenes", type=int, default=100_000, help="how many different images it sees")
        command.add_argument("--largest", type=int, default=512, help="the side of the largest drawing of an emoji")
        command.add_argument("--images", type=int, default=500, help="how many images sheet and score draw")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--compile", action="store_true", help="compile the UNet")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    if arguments.command == "pack":
        from .sources import read_packages, write_catalogue

        catalogue = read_packages(arguments.noto, arguments.fluent, arguments.names)
        write_catalogue(catalogue, arguments.data)
        print(f"{len(catalogue)} emoji in {arguments.data}")
        return 0
    from .setup import Setup

    setup = Setup(
        folder=arguments.out, data=arguments.data, seconds=arguments.seconds, total=arguments.total,
        steps=arguments.steps, most_emoji=arguments.emoji, batch=arguments.batch, scenes=arguments.scenes,
        largest=arguments.largest, seed=arguments.seed, compiled=arguments.compile, cache=arguments.cache,
        until=arguments.until,
    )
    run(setup, arguments.command, arguments.images)
    return 0


def run(setup: Setup, stage: str, images: int) -> None:
    if stage == "judge":
        from .judge_stage import train_judge

        train_judge(setup)
    elif stage == "vae":
        from .vae_stage import train_vae

        train_vae(setup)
    elif stage == "denoiser":
        from .denoiser_stage import train_denoiser

        train_denoiser(setup)
    else:
        from . import scoring

        if stage == "sheet":
            scoring.draw_sheet(setup, images)
        else:
            scoring.score(setup, images)


if __name__ == "__main__":
    raise SystemExit(main())
