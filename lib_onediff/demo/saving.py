"""Keeping pictures as files in the data folder."""
from __future__ import annotations

import datetime
from pathlib import Path

from .modules import errors, paths
from .modules.processed import Processed
from .png_info import png_bytes


def save(processed: Processed, kind: str) -> None:
    """Write every picture to <data folder>/<kind>-images/<day>/<number>-<seed>.png; a full disk is reported only."""
    day = datetime.date.today().isoformat()
    folder = Path(paths.data_path, f"{kind}-images", day)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = max((leading_number(file) for file in folder.glob("*.png")), default=-1) + 1
        for index, image in enumerate(processed.images):
            file = folder / f"{number + index:05}-{processed.all_seeds[index]}.png"
            file.write_bytes(png_bytes(image))
    except OSError as error:
        errors.report(f"The pictures could not be saved to {folder}: {error}")


def leading_number(file: Path) -> int:
    """The number that a saved picture's name starts with; -1 for other files."""
    number = file.name.split("-")[0]
    return int(number) if number.isdigit() else -1
