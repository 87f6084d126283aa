"""Reads the files of a model: text and JSON of bounded size, and the shapes in .safetensors files. Runs nothing.

Somebody else may have made these files. A pipe among them must not be waited for, and no number in them decides how
much is read.
"""
from __future__ import annotations

import json
import os
import stat
import unicodedata
from importlib.machinery import all_suffixes
from pathlib import Path
from typing import Any

from ...core.logs import readable
from ...core.refusal import Refusal

Shapes = dict[str, tuple[int, ...]]

WEIGHTS = ".safetensors"
# transformers loads the model that this file names in place of the one in the folder.
ADAPTER = "adapter_config.json"
# A Stable Diffusion XL folder has some 60 files, its UNet 1,680 tensors, and a merge's header carries its recipe.
MOST_FILES, MOST_TENSORS = 10_000, 20_000
# Opening a pipe waits for its other end, unless it is opened without blocking.
READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
LARGEST_TEXT, LARGEST_HEADER, LENGTH_BYTES = 32 << 20, 32 << 20, 8


def read_text(file: Path, most: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """The UTF-8 text of a regular file of at most so many bytes. errors: as bytes.decode has it. Raises Refusal."""
    shown = f"{file.name} in {file.parent.name}"
    try:
        with open(os.open(file, READING), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise Refusal(readable(f"{shown} is no regular file."))
            content = opened.read(most + 1)
        if len(content) > most:
            raise Refusal(readable(f"{shown} is larger than {most >> 20} MiB, which no such file is."))
        return content.decode("utf-8", errors)
    except (OSError, ValueError) as error:
        raise Refusal(readable(f"{shown} cannot be read: {error}.")) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model. Raises Refusal."""
    text = read_text(file)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it holds no JSON object")
    except (ValueError, RecursionError) as error:
        raise Refusal(readable(f"{file.name} in {file.parent.name} cannot be read: {error}.")) from error
    return content


def read_shapes(file: Path) -> Shapes:
    """The shape of each tensor in a .safetensors file, by name. Raises Refusal for any other file."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != WEIGHTS:
        # Libraries choose how to load by the name's end, and loading any other can run code.
        raise Refusal(readable(f"{file.name} is not a .safetensors file."))
    try:
        check_header(file)
        with safe_open(str(file), framework="pt") as opened:
            names = list(opened.keys())
            if len(names) > MOST_TENSORS:
                raise Refusal(readable(f"{file.name} holds more than {MOST_TENSORS} tensors."))
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        raise Refusal(readable(f"{file.name} is not a complete .safetensors file ({error}).")) from error


def check_header(file: Path) -> None:
    """Raise Refusal or OSError for a file that is not regular, or whose header is too large to be a model's."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise Refusal(readable(f"{file.name} is no regular file."))
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
    if length > LARGEST_HEADER:
        raise Refusal(readable(f"{file.name} is not a complete .safetensors file (its header has {length} bytes)."))


def weight_files(part: Path) -> list[str]:
    """The names of the .safetensors files in a part's folder. Raises Refusal where there are none, or where an index
    among the folder's JSON files names any other file: a library loads what an index names, also a pickle."""
    names = sorted(os.listdir(part))
    found = [name for name in names if name.endswith(WEIGHTS) and (part / name).is_file()]
    if not found:
        raise Refusal(f"There are no weights of the {part.name} as .safetensors.")
    for name in names:
        if as_systems_compare(name).endswith(".json") and name.count(".") > 1:
            check_index(part / name, found)
    return found


def check_index(file: Path, weights: list[str]) -> None:
    """Raise Refusal unless an index of weights in parts, if the file is one, names these files alone."""
    content = read_json(file)
    by_tensor = content.get("weight_map")
    if by_tensor is None and "index" not in as_systems_compare(file.name):
        return
    shown = f"{file.name} in {file.parent.name}"
    if not isinstance(by_tensor, dict) or not by_tensor or not isinstance(content.get("metadata", {}), dict):
        raise Refusal(readable(f"{shown} is no index of weights."))
    if len(by_tensor) > MOST_TENSORS:
        raise Refusal(readable(f"{shown} names more than {MOST_TENSORS} tensors."))
    others = [one for one in by_tensor.values() if not isinstance(one, str) or one not in weights]
    if others:
        raise Refusal(readable(f"{shown} names {others[0]!r}, which is no .safetensors file in that folder."))


def check_files(folder: Path) -> None:
    """Raise Refusal for what no model needs: Python code, an adapter, a pipe or a device, and a link that leads out of
    the folder (out of the model's part of a Hugging Face cache)."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    count = 0
    for below, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > MOST_FILES:
            raise Refusal(readable(f"The folder {folder.name} holds more than {MOST_FILES} files: it is no model's."))
        # The file system says whether a name in other letters is this file.
        brought = [ADAPTER] if os.path.lexists(Path(below, ADAPTER)) else []
        for name in (*folders, *files, *brought):
            check_file(Path(below, name), folder, root)


def check_file(path: Path, folder: Path, root: Path) -> None:
    """See check_files. path: in the folder. root: what links may lead into."""
    shown, name = path.relative_to(folder), as_systems_compare(path.name)
    # A link whose target is missing, or that leads to itself, can be read by nobody.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
        raise Refusal(readable(f"{shown} in the model folder {folder.name} is a link that leads out of it."))
    if name == ADAPTER or name.endswith(tuple(all_suffixes())):
        kind = "an adapter" if name == ADAPTER else "Python code"
        raise Refusal(readable(
            f"The model folder {folder.name} brings {kind} ({shown}), and this host runs nothing that comes "
            "with a model: take it out, or use a model without it."
        ))
    if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise Refusal(readable(f"{shown} in the model folder {folder.name} is neither a file nor a folder."))


def as_systems_compare(name: str) -> str:
    """A file's name as file systems may compare it: macOS and Windows by letters of any case, Windows without dots and
    spaces at the end."""
    return unicodedata.normalize("NFKC", name).casefold().rstrip(". ")
