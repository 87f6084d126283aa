"""A folder that nobody else can write to, for files that are run."""
from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

OWNER_ALONE = 0o700


def private_folder(wanted: Path) -> tuple[Path, str]:
    """The wanted folder if nobody else can write to it, else one in the user's home, else one that goes with this
    process; made if need be. And a sentence for the user that says why it is another one, "" where it is not.

    Windows tells nothing by a folder's mode: there every folder is taken but a link.
    """
    why_not = why_not_private(wanted) or why_not_made(wanted) or why_others_can_write(wanted)
    if why_not is None:
        return wanted, ""
    with contextlib.suppress(RuntimeError):  # Nobody knows where this user's home is.
        # One for each cache folder: whoever empties one leaves the others alone.
        name = hashlib.sha256(os.fsencode(wanted.absolute())).hexdigest()[:16]
        at_home = Path.home() / ".cache" / "onediff" / name
        if (why_not_made(at_home) or why_others_can_write(at_home)) is None:
            return at_home, f"What OneDiff compiles is kept in {at_home}, because {why_not}."
    passing = Path(tempfile.mkdtemp(prefix="onediff-"))
    atexit.register(shutil.rmtree, passing, ignore_errors=True)
    return passing, f"What OneDiff compiles is forgotten when this WebUI is closed, because {why_not}."


def why_not_private(wanted: Path) -> str | None:
    """Which folder on the way to this one lets other users exchange it, in half a sentence; None: none does."""
    if os.name == "nt":
        return None
    try:
        parents = wanted.resolve().parents
    except (OSError, RuntimeError):
        return f"{wanted} leads in a circle"
    for folder in parents:
        with contextlib.suppress(OSError):
            found = folder.stat()
            if found.st_uid not in (0, os.getuid()):
                return f"{folder} belongs to another user"
            # In a folder such as /tmp nobody can rename what is not theirs.
            if not found.st_mode & stat.S_ISVTX and is_shared(found):
                return f"other users can write to {folder}"
    return None


def why_not_made(folder: Path) -> str | None:
    """Make a folder; half a sentence where that cannot be done."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(OWNER_ALONE, exist_ok=True)
    except (OSError, ValueError) as error:
        return f"{folder} cannot be made ({getattr(error, 'strerror', None) or error})"
    return None


def why_others_can_write(folder: Path) -> str | None:
    """Why a folder may hold what other users have put there, in half a sentence; None: it does not."""
    if is_link(folder):
        return f"{folder} is a link"
    if os.name == "nt":
        return None
    found = folder.stat()
    if found.st_uid != os.getuid():
        return f"{folder} belongs to another user"
    if is_shared(found):
        return f"other users can write to {folder}"
    return None


def is_link(path: Path) -> bool:
    """Whether a name stands for what lies elsewhere."""
    # Python 3.12 knows Windows' junctions.
    return path.is_symlink() or getattr(os.path, "isjunction", lambda _: False)(path)


def is_shared(found: os.stat_result) -> bool:
    """Whether users besides the owner can write there."""
    group = found.st_mode & stat.S_IWGRP and not is_own_group(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or group)


@functools.cache
def is_own_group(number: int) -> bool:
    """Whether a group is that of this user alone, as Linux makes one for every user."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return number == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
