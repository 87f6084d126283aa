"""The README says what the code says."""
from __future__ import annotations

import re
from pathlib import Path

from lib_onediff.options.infotext import options_of_a_run
from lib_onediff.options.settings import markdown_table

MEASURING = (Path(__file__).parents[2] / ".readme" / "measuring.md").read_text(encoding="utf-8")
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_option_table_is_the_one_that_settings_give() -> None:
    assert markdown_table() in README


def test_every_picture_and_file_that_it_names_is_there() -> None:
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (Path(__file__).parents[2] / target).is_file(), target


def test_the_python_in_it_compiles() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_its_commands_name_the_python_that_has_what_they_need() -> None:
    """Only install.py runs in any Python: it makes the other one."""
    commands = re.findall(r"[^\s`]*python(?:\.exe)? (?:-m|\w+\.py)[^`\n]*", README + MEASURING)
    assert len(commands) > 10
    for command in commands:
        assert command.startswith((".venv/bin/python -m ", "FOLDER/venv/bin/python -m ", "python install.py")), command


def test_the_black_box_test_of_options_knows_every_one() -> None:
    """tests/webui does not import lib_onediff, so the options that it names are compared with settings.py here."""
    source = (Path(__file__).parents[1] / "webui" / "test_every_option.py").read_text()
    known = re.findall(r'^    "(\w+)": \(', source, re.M)
    assert sorted(known) == sorted(options_of_a_run())
