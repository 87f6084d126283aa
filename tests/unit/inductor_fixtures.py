"""Where the tests of the inductor backend compile: in one folder, so that each kernel is compiled once in a session."""
from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lib_onediff.engines.inductor import disk


@pytest.fixture(scope="session")
def compilers_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for a store that keeps what compilers leave. Inductor's own caches stay there: they save the C++
    compiler, and everything else that a test looks at happens as without them."""
    return tmp_path_factory.mktemp("compilers")


def without_our_files(store: Path, patch: pytest.MonkeyPatch) -> Path:
    """Have Inductor use the folder of a store in which nothing of OneDiff's is on the disk yet; returns that folder."""
    folder = store / "compiled" / "inductor"
    patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    shutil.rmtree(folder / disk.NOTES, ignore_errors=True)
    return folder
