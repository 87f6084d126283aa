"""What one machine has measured, used and compiled, as one file for others of the same kind."""
from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from .compiler_caches import FOLDERS, SIZE_LIMIT
from .history import CHOSEN_BY_USERS, History
from .machine import Fingerprint
from .rows import HistoryRow
from .schema import COLUMNS, row_from

FORMAT = 1
MANIFEST = "pack.json"
LARGEST_MANIFEST = 16 << 20
DEEPEST_CHOICE = 10
# Triton reads an entry only where this is: it is written last.
GROUP = "__grp__"
FACTS = {"gpu": "GPU", "driver": "driver", "torch": "torch", "triton": "Triton", "onediff": "OneDiff"}


class DoesNotFit(Exception):
    """Nothing of a pack may be taken; the message is a sentence for the user."""


class Taken(NamedTuple):
    """How much of a pack was new here: choices that were measured, sizes that were used, compiled files. left_out: how
    many compiled files were not taken, because no digest was given."""

    choices: int
    sizes: int
    files: int
    left_out: int


def export(history: History, target: IO[bytes], machine: Fingerprint | None = None) -> str:
    """Write a pack of what is remembered for this machine. Returns its SHA-256, by which others can trust its code.

    Users' own choices (pins), checks and times stay here: elsewhere every shape is checked at its first use.
    """
    manifest = {
        "format": FORMAT,
        "machine": dataclasses.asdict(machine or Fingerprint.of()),
        "tuned": {name: value for name, value in history.tuned().items() if name not in CHOSEN_BY_USERS},
        "used": [dataclasses.asdict(row) for row in history.rows()],
    }
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as pack:
        pack.writestr(MANIFEST, json.dumps(manifest))
        for name, file in compiled_files(history):
            # A compiler may be tidying up.
            with contextlib.suppress(OSError):
                pack.write(file, name)
    target.seek(0)
    return digest_of(target)


def take(history: History, source: IO[bytes], digest: str | None = None, machine: Fingerprint | None = None) -> Taken:
    """Add what a pack holds and this cache folder lacks. digest: the pack's, as export returned it to somebody who is
    trusted; without it compiled code, which is run as it is, stays out.

    Raises DoesNotFit.
    """
    if digest is not None and digest_of(source) != digest.strip().lower():
        raise DoesNotFit("The pack has another digest than the one given: it was changed, or is another one.")
    try:
        with zipfile.ZipFile(source) as pack:
            manifest = read_manifest(pack)
            refuse_another_machine(manifest["machine"], machine or Fingerprint.of())
            used = list(map(row_of, manifest["used"]))
            names = [name for name in pack.namelist() if is_compiled(name)]
            if sum(pack.getinfo(name).file_size for name in names) > SIZE_LIMIT:
                raise DoesNotFit(f"The pack holds more than {SIZE_LIMIT >> 20} MiB of compiled code.")
            files = [] if digest is None or history.compiled is None else [
                name for name in sorted(names, key=lambda name: GROUP in name)
                if unpack(pack, name, history.compiled.folder)
            ]
    except DoesNotFit:
        raise
    except Exception as problem:
        # zipfile and what it unpacks with raise a dozen kinds for damaged, encrypted and foreign files.
        raise DoesNotFit(f"This is no pack that OneDiff can read ({problem}).") from problem
    known = history.tuned()
    tuned = {
        name: value for name, value in manifest["tuned"].items()
        if name not in known and name not in CHOSEN_BY_USERS
    }
    for name, value in tuned.items():
        history.tune(name, value)
    here = {row.shape for row in history.rows()}
    rows = [row for row in used if row.shape not in here]
    history.add(rows)
    return Taken(len(tuned), len(rows), len(files), len(names) if digest is None else 0)


def compiled_files(history: History) -> Iterator[tuple[str, Path]]:
    """What compilers have left in the cache folder, by its name in a pack."""
    if history.compiled is None:
        return
    root = history.compiled.folder
    for folder in FOLDERS.values():
        for parent, inside, names in os.walk(root / folder):
            inside.sort()
            for name in sorted(names):
                path = Path(parent, name)
                if path.is_file() and not path.is_symlink():
                    yield path.relative_to(root).as_posix(), path


def read_manifest(pack: zipfile.ZipFile) -> dict[str, Any]:
    if pack.getinfo(MANIFEST).file_size > LARGEST_MANIFEST:
        raise ValueError("its list is too long")
    manifest: dict[str, Any] = json.loads(pack.read(MANIFEST))
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']!r}, known is {FORMAT}")
    if not isinstance(manifest["tuned"], dict) or not isinstance(manifest["used"], list):
        raise ValueError("its list is of another kind")
    if not is_flat(manifest["tuned"], DEEPEST_CHOICE):
        raise ValueError("its list has no end")
    return manifest


def is_flat(value: Any, depth: int) -> bool:
    """Whether lists and mappings lie in each other at most so deep."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(is_flat(inner, depth - 1) for inner in inside)


def refuse_another_machine(packed: dict[str, str], machine: Fingerprint) -> None:
    """Raises DoesNotFit, with everything by which two machines differ."""
    here = dataclasses.asdict(machine)
    differing = [
        f"{label} {packed[name]} there, {here[name]} here"
        for name, label in FACTS.items() if packed[name] != here[name]
    ]
    if differing:
        raise DoesNotFit(f"The pack is of another machine: {'; '.join(differing)}.")


def is_compiled(name: str) -> bool:
    """Whether a member of a pack is a compiled file, and lies where compilers look. Raises ValueError for a name that
    leads out of there."""
    if name == MANIFEST:
        return False
    parts = PurePosixPath(name).parts
    if not parts or parts[0] not in FOLDERS.values() or ".." in parts or "\\" in name or ":" in name:
        raise ValueError(f"it holds {name!r}")
    return not name.endswith("/")


def unpack(pack: zipfile.ZipFile, name: str, folder: Path) -> bool:
    """Write a compiled file, whole or not at all, unless there is one of that name. Returns whether it was written."""
    target = folder / name
    if target.exists() or target.is_symlink():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with pack.open(name) as packed, unfinished.open("xb") as written:
            shutil.copyfileobj(packed, written)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def row_of(values: dict[str, Any]) -> HistoryRow:
    """A size that was used elsewhere: without its times and its check, which are made here."""
    row = row_from(tuple(values[name] for name in COLUMNS))
    return dataclasses.replace(row, step_ms=None, host_ms=None, relative_error=None)


def digest_of(file: IO[bytes]) -> str:
    """The SHA-256 of a file, which is read from its beginning and left there."""
    file.seek(0)
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    file.seek(0)
    return digest.hexdigest()
