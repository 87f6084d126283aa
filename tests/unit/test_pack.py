"""What one machine has measured and compiled, taken to another as one file."""
from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from lib_onediff.store import __main__ as command
from lib_onediff.store.history import PINNED, History
from lib_onediff.store.machine import Fingerprint
from lib_onediff.store.pack import MANIFEST, DoesNotFit, Taken, digest_of, export, take
from lib_onediff.store.rows import HistoryRow

ROW = HistoryRow("abc", "SDXL", "1024x1024", 2, 77, "float16", 9, 1.0, 29.2, 56.9, 1e-3)
CODE_FILE = "triton/ABC/kernel.cubin"


def opened(folder: Path) -> History:
    history = History()
    history.open(folder)
    return history


@pytest.fixture
def made(tmp_path: Path) -> io.BytesIO:
    """A pack of a folder with two choices, a size and a kernel; that is closed."""
    history = opened(tmp_path / "from")
    for name, value in (("attention 1024", "flash"), ("rows 4096", 4)):
        history.tune(name, value)
    history.tune(PINNED, [["SDXL", "1024x1024"]])
    history.add([ROW])
    kernel = history.compiled.folder / CODE_FILE
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"machine code")
    pack = io.BytesIO()
    assert export(history, pack) == digest_of(pack)
    history.close()
    return pack


@pytest.fixture
def history(tmp_path: Path) -> History:
    return opened(tmp_path / "to")


def rewritten(pack: io.BytesIO, **changed: Any) -> io.BytesIO:
    """The pack with other files, or with another list (manifest)."""
    result = io.BytesIO()
    with zipfile.ZipFile(pack) as before, zipfile.ZipFile(result, "w") as after:
        files = {name: before.read(name) for name in before.namelist()}
        manifest = {**json.loads(files[MANIFEST]), **changed.pop("manifest", {})}
        for name, content in {**files, MANIFEST: json.dumps(manifest), **changed}.items():
            after.writestr(name, content)
    return result


def test_with_its_digest_all_is_taken_once(made: io.BytesIO, history: History, tmp_path: Path) -> None:
    assert take(history, made, digest_of(made)) == Taken(choices=2, sizes=1, files=1, left_out=0)
    assert (history.compiled.folder / CODE_FILE).read_bytes() == b"machine code"
    assert take(history, made, digest_of(made)) == Taken(0, 0, 0, 0)
    history.close()
    later = opened(tmp_path / "to")
    assert later.tuned() == {"attention 1024": "flash", "rows 4096": 4}
    (row,) = later.rows()
    # Its times are another process's, and its check is made here.
    assert row == dataclasses.replace(ROW, step_ms=None, host_ms=None, relative_error=None)


def test_without_it_nothing_that_is_run_is_taken(made: io.BytesIO, history: History) -> None:
    assert take(history, made) == Taken(choices=2, sizes=1, files=0, left_out=1)
    assert not (history.compiled.folder / CODE_FILE).exists()


def test_what_was_measured_here_stays(made: io.BytesIO, history: History) -> None:
    history.tune("rows 4096", 8)
    kernel = history.compiled.folder / CODE_FILE
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"ours")
    assert take(history, made, digest_of(made)) == Taken(choices=1, sizes=1, files=0, left_out=0)
    assert history.tuned()["rows 4096"] == 8 and kernel.read_bytes() == b"ours"


def test_a_changed_byte_is_refused(made: io.BytesIO, history: History) -> None:
    digest, content = digest_of(made), bytearray(made.getvalue())
    content[len(content) // 2] ^= 1
    with pytest.raises(DoesNotFit, match="another digest"):
        take(history, io.BytesIO(bytes(content)), digest)
    assert not history.tuned() and not history.rows()


@pytest.mark.parametrize("fact, label", [
    ("gpu", "GPU"), ("driver", "driver"), ("torch", "torch"), ("triton", "Triton"), ("onediff", "OneDiff"),
])
def test_another_machine_is_refused_by_name(made: io.BytesIO, history: History, fact: str, label: str) -> None:
    here = dataclasses.replace(Fingerprint.of(), **{fact: "another"})
    with pytest.raises(DoesNotFit, match=f"of another machine: {label} .* there, another here"):
        take(history, made, digest_of(made), here)
    assert not history.tuned() and not history.rows()


@pytest.mark.parametrize("name", ["../above", "/etc/passwd", "triton/../../above", "elsewhere/file", "C:/file", "a"])
def test_a_name_that_leads_out_is_refused(made: io.BytesIO, history: History, tmp_path: Path, name: str) -> None:
    pack = rewritten(made, **{name: b"bad"})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DoesNotFit, match="no pack that OneDiff can read"):
        take(history, pack, digest_of(pack))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("manifest", [
    {"format": 99}, {"tuned": []}, {"used": {}}, {"used": [{"model": "SDXL"}]}, {"used": [1]}, {"machine": {}},
    {"used": [{**dataclasses.asdict(ROW), "uses": "many"}]},
], ids=str)
def test_a_list_that_makes_no_sense_is_refused(
    made: io.BytesIO, history: History, manifest: dict[str, Any]
) -> None:
    with pytest.raises(DoesNotFit, match="no pack that OneDiff can read"):
        take(history, rewritten(made, manifest=manifest))
    assert not history.tuned() and not history.rows()


def test_what_is_no_pack_is_refused(history: History) -> None:
    for content in (b"", b"PK", b"text"):
        with pytest.raises(DoesNotFit, match="no pack"):
            take(history, io.BytesIO(content))


def damaged(made: io.BytesIO, how: str) -> bytes:
    """A pack that zipfile opens and cannot read."""
    content = bytearray(made.getvalue())
    at, central = content.index(b"PK\3\4"), content.index(b"PK\1\2")
    if how == "encrypted":
        content[at + 6] |= 1
        content[central + 8] |= 1
    elif how == "packed by a method that nobody knows":
        content[at + 8] = content[central + 10] = 99
    elif how == "damaged inside":
        start = at + 30 + len(MANIFEST)
        content[start: start + 40] = b"\xff" * 40
    elif how == "cut off":
        content = content[: len(content) // 2]
    return bytes(content)


@pytest.mark.parametrize("how", ["encrypted", "packed by a method that nobody knows", "damaged inside", "cut off"])
def test_a_pack_that_cannot_be_unpacked_is_refused_in_a_line(
    made: io.BytesIO, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    (tmp_path / "pack").write_bytes(damaged(made, how))
    assert command.main(["--folder", str(tmp_path / "to"), "import", str(tmp_path / "pack")]) == 1
    assert capsys.readouterr().err.startswith("Nothing was imported. This is no pack that OneDiff can read (")


@pytest.mark.parametrize("depth", [100, 600, 900, 100_000])
def test_a_choice_without_end_is_refused(made: io.BytesIO, history: History, depth: int) -> None:
    with zipfile.ZipFile(made) as pack:
        manifest = pack.read(MANIFEST)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as pack:
        pack.writestr(MANIFEST, manifest.replace(b'"flash"', b"[" * depth + b"]" * depth))
    with pytest.raises(DoesNotFit, match="no pack that OneDiff can read"):
        take(history, made)
    assert not history.tuned()


def test_the_commands(made: io.BytesIO, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, there = tmp_path / "a.pack", ["--folder", str(tmp_path / "to")]
    assert command.main(["--folder", str(tmp_path / "from"), "export", str(file)]) == 0
    digest = capsys.readouterr().out.split()[-1]
    assert command.main([*there, "import", str(file)]) == 0
    assert "2 measured choices, 1 sizes, 0 compiled files\nleft out: 1 compiled" in capsys.readouterr().out
    assert command.main([*there, "import", str(file), "--digest", digest]) == 0
    assert "0 measured choices, 0 sizes, 1 compiled files" in capsys.readouterr().out
    assert command.main([*there, "import", str(file), "--digest", "0" * 64]) == 1
    assert command.main([*there, "import", str(tmp_path / "missing")]) == 1
    assert command.main(["--folder", str(tmp_path / "no folder"), "export", str(file)]) == 1
    assert capsys.readouterr().err.count("Nothing was ") == 3
