"""Compiled code lies where nobody else can write, and no link that somebody else made is followed."""
from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import lib_onediff
from lib_onediff.store import private_folder as module
from lib_onediff.store.compiler_caches import CompilerCaches
from lib_onediff.store.history import History
from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.private_folder import private_folder
from lib_onediff.store.rows import TUNED
from lib_onediff.store.store import Store

pytestmark = pytest.mark.skipif(os.name != "posix", reason="on Windows a folder's mode tells nothing")
as_root = pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can give a folder away")
MACHINE = Fingerprint("a GPU", "580.1", "2.9.0", "3.5.0", "0.1.0")
SOMEBODY = 12345


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def mode(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_a_folder_that_only_its_owner_can_write_to_is_taken(tmp_path: Path, home: Path) -> None:
    wanted = tmp_path / "cache" / "onediff" / "compiled"
    assert private_folder(wanted) == (wanted, "") and mode(wanted) == 0o700
    wanted.chmod(0o755)
    assert private_folder(wanted) == (wanted, "")
    assert not list(home.iterdir())


@pytest.mark.parametrize("which", ["cache/onediff/compiled", "cache/onediff", "cache"])
@pytest.mark.parametrize("rights", [0o777, 0o757, 0o775])
def test_where_others_can_write_it_is_a_folder_at_home(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, which: str, rights: int
) -> None:
    monkeypatch.setattr(module, "is_own_group", lambda number: False)
    wanted = tmp_path / "cache" / "onediff" / "compiled"
    wanted.mkdir(parents=True)
    (tmp_path / which).chmod(rights)
    taken, sentence = private_folder(wanted)
    assert taken.is_relative_to(home) and mode(taken) == 0o700
    assert sentence == (
        f"What OneDiff compiles is kept in {taken}, because other users can write to {tmp_path / which}."
    )
    assert private_folder(wanted)[0] == taken != private_folder(wanted.parent / "other")[0]


def test_the_group_that_linux_makes_for_a_user_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = tmp_path / "cache" / "compiled"
    wanted.mkdir(parents=True)
    wanted.parent.chmod(0o775)
    wanted.chmod(0o775)
    monkeypatch.setattr(module, "is_own_group", lambda number: number == wanted.stat().st_gid)
    assert private_folder(wanted) == (wanted, "")


def test_a_folder_like_tmp_is_no_danger_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert private_folder(tmp_path / "tmp" / "mine" / "compiled")[1] == ""
    (tmp_path / "tmp" / "mine" / "compiled").chmod(0o1777)
    assert "other users can write" in private_folder(tmp_path / "tmp" / "mine" / "compiled")[1]


@as_root
@pytest.mark.parametrize("which", ["cache/compiled", "cache"])
def test_a_folder_of_another_user(tmp_path: Path, home: Path, which: str) -> None:
    wanted = tmp_path / "cache" / "compiled"
    wanted.mkdir(parents=True)
    os.chown(tmp_path / which, SOMEBODY, SOMEBODY)
    taken, sentence = private_folder(wanted)
    assert taken.is_relative_to(home) and f"{tmp_path / which} belongs to another user" in sentence


def test_a_link_is_not_taken(tmp_path: Path, home: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "compiled").symlink_to(tmp_path / "theirs")
    taken, sentence = private_folder(tmp_path / "compiled")
    assert taken.is_relative_to(home) and sentence.endswith(f"because {tmp_path / 'compiled'} is a link.")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    through = tmp_path / "link" / "compiled"
    assert private_folder(through) == (through, ""), "the cache folder is where the user says"


@pytest.mark.parametrize("kind", ["a circle", "a file"])
def test_what_cannot_be_a_folder(tmp_path: Path, home: Path, kind: str) -> None:
    if kind == "a file":
        (tmp_path / "cache").touch()
    else:
        (tmp_path / "cache").symlink_to(tmp_path / "cache")
    taken, sentence = private_folder(tmp_path / "cache" / "compiled")
    assert taken.is_relative_to(home) and str(tmp_path / "cache") in sentence
    history = History()
    history.open(tmp_path / "cache")
    assert history.trouble and "What OneDiff compiles is kept in" in history.trouble


def test_without_a_home_it_lasts_as_long_as_the_process(tmp_path: Path) -> None:
    script = (
        "import sys, os; from pathlib import Path\n"
        "from lib_onediff.store.private_folder import private_folder\n"
        "wanted = Path(sys.argv[1]) / 'compiled'; wanted.mkdir(); wanted.chmod(0o777)\n"
        "taken, sentence = private_folder(wanted); (taken / 'code').touch()\n"
        "print(taken, oct(taken.stat().st_mode & 0o777), sentence, sep='\\n')\n"
    )
    (tmp_path / "file").touch()
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=Path(lib_onediff.__file__).parents[1], check=True,
        env={**os.environ, "HOME": str(tmp_path / "file"), "TMPDIR": str(tmp_path)}, capture_output=True, text=True,
    )
    taken, rights, sentence = ended.stdout.splitlines()
    assert Path(taken).parent == tmp_path and rights == "0o700" and not Path(taken).exists()
    assert sentence.startswith("What OneDiff compiles is forgotten when this WebUI is closed, because other users can")


def test_measurements_stay_and_code_goes_home_with_a_sentence(tmp_path: Path, home: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    history = History()
    history.open(folder)
    history.tune("tile", 64)
    history._store.close()
    assert "What OneDiff compiles is kept in" in history.trouble and str(folder) in history.trouble
    compiled = history.compiled.folder
    assert compiled.is_relative_to(home) and list(folder.glob("*.sqlite3"))
    environment: dict[str, str] = {}
    CompilerCaches(compiled).use(environment)
    assert all(Path(value).is_relative_to(home) for value in environment.values())
    (compiled / "triton" / "KEY").mkdir(parents=True)
    (compiled / "triton" / "KEY" / "kernel").write_bytes(bytes(1000))
    os.utime(compiled / "triton" / "KEY" / "kernel", (1, 1))
    assert history.size_bytes() > 1000
    history.forget()
    assert not (compiled / "triton" / "KEY").exists()
    again = History()
    again.open(folder)
    assert again.tuned() == {} and again.compiled.folder == compiled


# --- links in the cache folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "onediff-2-1.sqlite3", "onediff-2-1.sqlite3-wal", "onediff-2-1.sqlite3-shm", "onediff-2-1.sqlite3-journal",
    "onediff-2-7.sqlite3",
])
@pytest.mark.parametrize("content", [b"", b"precious" * 1000])
def test_nobody_elses_file_is_written_through_a_link(tmp_path: Path, name: str, content: bytes) -> None:
    theirs, folder = tmp_path / "theirs", tmp_path / "cache"
    theirs.write_bytes(content)
    folder.mkdir()
    (folder / name).symlink_to(theirs)
    store = Store.open(folder, MACHINE)
    store.save(TUNED, "tile", 64)
    assert not store.flush() and store.saved(TUNED) == {"tile": 64}
    assert f"{folder / name} is a link, which OneDiff does not follow: delete it." in store.trouble
    assert theirs.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "theirs"]
    (folder / name).unlink()
    assert store.flush() and store.trouble is None
    store.close()


@pytest.mark.parametrize("name", ["triton", "inductor", "."])
def test_purging_leaves_what_a_link_leads_to(tmp_path: Path, name: str) -> None:
    theirs, compiled = tmp_path / "theirs", tmp_path / "cache" / "compiled"
    for folder in (theirs, theirs / "triton"):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "file").write_bytes(bytes(1000))
        os.utime(folder / "deep" / "file", (1, 1))
    (compiled if name != "." else compiled.parent).mkdir(parents=True)
    (compiled / name if name != "." else compiled).symlink_to(theirs, target_is_directory=True)
    caches = CompilerCaches(compiled)
    assert caches.size_bytes() == caches.purge() == caches.evict() == 0
    assert (theirs / "deep" / "file").exists() and (theirs / "triton" / "deep" / "file").exists()
