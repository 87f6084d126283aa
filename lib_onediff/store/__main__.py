"""Let other machines of the same kind start warm: python -m lib_onediff.store --help."""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .history import CACHE_VARIABLE, History, chosen_folder
from .pack import DoesNotFit, export, take


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lib_onediff.store", allow_abbrev=False,
        description="Export what OneDiff has measured and compiled on this machine, and import it on others with the "
        "same GPU, driver, torch, Triton and OneDiff. Run it in the WebUI's Python, in this extension's folder.",
    )
    parser.add_argument(
        "--folder", type=Path, default=chosen_folder(),
        help=f"the cache folder: cache/onediff in the WebUI's data folder (default: what {CACHE_VARIABLE} says)",
    )
    jobs = parser.add_subparsers(dest="job", required=True)
    jobs.add_parser("export", help="write FILE and print its digest").add_argument("file", type=Path)
    taking = jobs.add_parser("import", help="add what FILE holds")
    taking.add_argument("file", type=Path)
    taking.add_argument("--digest", help="as export printed it; without it, compiled code is left out")
    options = parser.parse_args(arguments)
    if options.folder is None:
        parser.error(f"say where the cache is: --folder, or the environment variable {CACHE_VARIABLE}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command's exit status; what could not be done is one line."""
    options = parse(arguments)
    history = History()
    try:
        if options.job == "export" and not options.folder.is_dir():
            raise DoesNotFit(f"There is no folder {options.folder}.")
        history.open(options.folder)
        if history.trouble:
            print(history.trouble, file=sys.stderr)
        if options.job == "export":
            with options.file.open("w+b") as target:
                digest = export(history, target)
            print(f"{options.file}: {options.file.stat().st_size / 2**20:.1f} MiB\ndigest: {digest}")
            return 0
        with options.file.open("rb") as source:
            taken = take(history, source, options.digest)
    except (DoesNotFit, OSError) as problem:
        print(f"Nothing was {options.job}ed. {problem}", file=sys.stderr)
        return 1
    finally:
        history.close()
    print(f"new here: {taken.choices} measured choices, {taken.sizes} sizes, {taken.files} compiled files")
    if taken.left_out:
        print(f"left out: {taken.left_out} compiled files. They are code: give --digest, as export printed it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
