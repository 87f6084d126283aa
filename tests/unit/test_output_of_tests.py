"""What tests/conftest.py adds to pytest's output: each failure as it happens, and the stacks of a test that hangs."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MANY = "\n".join(f"def test_{number}(): assert {number} != 0, 'the first of many'" for number in range(60))


def run(folder: Path, source: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file with this source by pytest with tests/conftest.py, in another process."""
    (folder / "test_here.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options]
    paths = {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [*command, folder / "test_here.py"], cwd=folder, env={**mine, **paths, **environment}, capture_output=True,
        text=True, timeout=600, check=False,
    )


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_long_run_prints_a_failure_when_it_happens(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The failure of the first of 60 tests is printed before pytest's own section FAILURES. options: with -n,
    pytest-xdist runs the tests in two processes."""
    finished = run(tmp_path, MANY, *options)
    at_once, rest = finished.stdout.split("= FAILURES =")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "test_here.py::test_0 has failed (call)" in at_once and "the first of many" in at_once
    assert "the first of many" in rest


def test_a_test_that_hangs_is_ended_with_its_stack_printed_and_a_slow_one_is_not(tmp_path: Path) -> None:
    """A test hangs if it takes longer than ONEDIFF_TEST_HUNG_SECONDS."""
    source = "import time\ndef test_slow(): time.sleep({})\n"
    slow = run(tmp_path, source.format(1.5), ONEDIFF_TEST_HUNG_SECONDS="60")
    assert slow.returncode == 0 and slow.stderr == "", slow.stderr
    hung = run(tmp_path, source.format(500), ONEDIFF_TEST_HUNG_SECONDS="1")
    assert hung.returncode != 0 and "in test_slow" in hung.stderr, hung.stdout + hung.stderr
