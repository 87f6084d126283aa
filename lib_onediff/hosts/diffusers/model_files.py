"""Reads the files of a model that may be malicious: text and JSON of limited size, and the shapes in .safetensors
files. Runs no code from them.

A named pipe among the files must not block the reader, and no number in a file may decide how much is read.
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

# The shapes of tensors, by the tensors' names.
Shapes = dict[str, tuple[int, ...]]

# The ending of the name of each file with weights.
WEIGHTS = ".safetensors"
# If this file is in a folder, transformers loads the model that it names, and not the one in the folder.
ADAPTER = "adapter_config.json"
# The largest numbers of files and folders in a model folder, and of tensors in a file. A Stable Diffusion XL folder has
# some 60 files, and its UNet 1,680 tensors.
MOST_FILES = 10_000
MOST_TENSORS = 20_000
# Without O_NONBLOCK, opening a named pipe would wait for its other end.
READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
# In bytes. The header of a .safetensors file may be large: merged models have their recipe in it.
LARGEST_TEXT = 32 << 20
LARGEST_HEADER = 32 << 20
# The bytes at the beginning of a .safetensors file that have the header's length.
LENGTH_BYTES = 8


def read_text(file: Path, most: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """The UTF-8 text of a regular file. Raises Refusal for a file that cannot be read or decoded, is larger than `most`
    bytes, or is not a regular file. errors: how invalid UTF-8 is decoded; see bytes.decode."""
    shown = f"{file.name} in {file.parent.name}"
    try:
        with open(os.open(file, READING), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise Refusal(readable(f"{shown} is not a regular file."))
            content = opened.read(most + 1)
        if len(content) > most:
            raise Refusal(readable(f"{shown} is larger than {most >> 20} MiB, which is too large."))
        return content.decode("utf-8", errors)
    except (OSError, ValueError) as error:
        raise Refusal(readable(f"{shown} cannot be read: {error}.")) from error


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model, as a dictionary. Raises Refusal if the file cannot be read (read_text), is
    not valid JSON, or has no object at its top."""
    text = read_text(file)
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except (ValueError, RecursionError) as error:
        raise Refusal(readable(f"{file.name} in {file.parent.name} cannot be read: {error}.")) from error
    return content


def read_shapes(file: Path) -> Shapes:
    """The shape of each tensor in a .safetensors file, by the tensor's name. Reads no weights. Raises Refusal for a
    file of another kind, an incomplete one, or one with too many tensors."""
    from safetensors import SafetensorError, safe_open

    if file.suffix != WEIGHTS:
        # Libraries choose the file format by the ending of the name, and loading other formats can run code.
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
    """Raise Refusal for a file that is not a regular one, or whose .safetensors header is too large, which safetensors
    would read into memory; OSError for a file that cannot be read."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise Refusal(readable(f"{file.name} is not a regular file."))
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
    if length > LARGEST_HEADER:
        raise Refusal(readable(f"{file.name} is not a complete .safetensors file (its header has {length} bytes)."))


def weight_files(part: Path) -> list[str]:
    """The names of the .safetensors files in one network's folder of a model (unet), sorted. part: the folder.

    Raises Refusal if there are none; if an index of weights in the folder is damaged, or names any other file, because
    libraries load the files that an index names, even a pickle (check_index); and if a JSON file that may be an index
    cannot be read.
    """
    names = sorted(os.listdir(part))
    found = [name for name in names if name.endswith(WEIGHTS) and (part / name).is_file()]
    if not found:
        raise Refusal(
            f"There are no .safetensors weights in the folder {part.name}, so the model is not loaded: of a folder, "
            "OneDiff loads no other kind of weights."
        )
    for name in names:
        if as_systems_compare(name).endswith(".json") and name.count(".") > 1:
            check_index(part / name, found)
    return found


def check_index(file: Path, weights: list[str]) -> None:
    """Raise Refusal if a JSON file is an index of weights (diffusers' and transformers' *.index.json) and is damaged,
    names other files than `weights`, or has too many tensors; also if the file cannot be read. Accepts a JSON file of
    another kind. weights: names of files."""
    content = read_json(file)
    by_tensor = content.get("weight_map")
    if by_tensor is None and "index" not in as_systems_compare(file.name):
        return
    shown = f"{file.name} in {file.parent.name}"
    if not isinstance(by_tensor, dict) or not by_tensor or not isinstance(content.get("metadata", {}), dict):
        raise Refusal(readable(f"{shown} is not an index of weights."))
    if len(by_tensor) > MOST_TENSORS:
        raise Refusal(readable(f"{shown} names more than {MOST_TENSORS} tensors."))
    others = [one for one in by_tensor.values() if not isinstance(one, str) or one not in weights]
    if others:
        raise Refusal(readable(f"{shown} names {others[0]!r}, which is not a .safetensors file in that folder."))


def check_files(folder: Path) -> None:
    """Raise Refusal if a model folder, or a folder in it, contains something that could harm and that no model needs:
    Python code, an adapter (ADAPTER), a pipe, a device, a link to something outside of the folder, or more than
    MOST_FILES files. A folder in a Hugging Face cache may link to the other files of its model in the cache. Call this
    before anything is loaded."""
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    count = 0
    for below, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > MOST_FILES:
            raise Refusal(readable(f"The folder {folder.name} has more than {MOST_FILES} files: it is not a model."))
        # On some file systems, ADAPTER also opens a file whose name is written in other letters.
        brought = [ADAPTER] if os.path.lexists(Path(below, ADAPTER)) else []
        for name in (*folders, *files, *brought):
            check_file(Path(below, name), folder, root)


def check_file(path: Path, folder: Path, root: Path) -> None:
    """Raise Refusal if this file or folder must not be in a model folder; see check_files. folder: the model folder.
    root: the folder that links may lead into."""
    shown = path.relative_to(folder)
    name = as_systems_compare(path.name)
    # Links inside of the folder that have no target, or lead to themselves, are harmless: nothing can read them.
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
        raise Refusal(readable(f"{shown} in the model folder {folder.name} is a link that leads out of it."))
    if name == ADAPTER or name.endswith(tuple(all_suffixes())):
        kind = "an adapter" if name == ADAPTER else "Python code"
        raise Refusal(readable(
            f"The model folder {folder.name} contains {kind} ({shown}). OneDiff runs no code that comes with a model: "
            "remove it, or use a model without it."
        ))
    if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise Refusal(readable(f"{shown} in the model folder {folder.name} is neither a file nor a folder."))


def as_systems_compare(name: str) -> str:
    """A file's name in one form for all names that some file system takes for the same: macOS and Windows ignore case
    and Unicode variants, Windows also dots and spaces at the end. So a forbidden name is found in any spelling."""
    return unicodedata.normalize("NFKC", name).casefold().rstrip(". ")
