"""install.py: its arguments, the requirements that it reads, and the .venv that a real pip makes from tiny wheels."""
from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import install
from lib_onediff.core.version import NEWEST_TORCH
from lib_onediff.demo import EMOJI_DIT

REPOSITORY = Path(install.__file__).parent
EMPTY_PACKAGE_INDEX = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}

# The part of OneDiff that install.py imports.
READ_BY_INSTALL = (
    "__init__.py", "core/__init__.py", "core/logs.py", "core/refusal.py", "demo/__init__.py", "demo/command_line.py",
)
TINY_PYPROJECT = """
[project]
name = "sd-webui-onediff"
dependencies = ["tiny-torch>=2"]

[project.optional-dependencies]
demo = [
    "tiny-host==1.0; python_version >= '3.0'",  # a comment with a ]
]
test = ["sd-webui-onediff[demo]", "pytest==1.0"]

[tool.onediff.without-dependencies]
test = ["tiny-oracle==1.0"]

[tool.onediff.tested]
newest = ["tiny-torch<3"]

[tool.onediff.venv-gib]
cuda = ["0.125"]
cpu = ["0.0625"]
"""
SAY_ARGUMENTS = "import json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\nsys.exit(7)\n"
WAIT_FOR_INTERRUPT = """
import sys, time
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(5)
"""


@pytest.fixture(autouse=True)
def without_constraints(monkeypatch):
    """.ci/run may constrain torch to its CPU build, which install.py reads."""
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)


def run_install(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a folder's install.py from that folder's parent. environment: additional variables."""
    command = [sys.executable, folder / "install.py", *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder.parent, env=environment, capture_output=True, text=True)


def write_wheel(folder: Path, name: str, version: str, requires: str = "", main: str = "") -> None:
    """Write a wheel of one package that can be run with python -m."""
    module = name.replace("-", "_")
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": "",
        f"{module}/__main__.py": main,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


def make_checkout(folder: Path) -> Path:
    """A folder with the real install.py, small requirements, and a demo that prints how it was started."""
    for name in READ_BY_INSTALL:
        file = folder / "lib_onediff" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "lib_onediff" / name, file)
    (folder / "lib_onediff" / "demo" / "__main__.py").write_text(SAY_ARGUMENTS)
    (folder / "pyproject.toml").write_text(TINY_PYPROJECT)
    shutil.copy(install.__file__, folder)
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    write_wheel(folder, "tiny-torch", "2.5")
    write_wheel(folder, "tiny-torch", "3.0")
    write_wheel(folder, "tiny-host", "1.0")
    write_wheel(folder, "tiny-oracle", "1.0", requires="Requires-Dist: nowhere-to-be-found\n")
    write_wheel(folder, "pytest", "1.0", main=SAY_ARGUMENTS)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheels) -> tuple[Path, dict[str, str]]:
    """A checkout whose .venv has the test extra, and the environment in which pip finds the wheels."""
    checkout = make_checkout(tmp_path_factory.mktemp("checkout") / "sd-webui-onediff")
    environment = {**EMPTY_PACKAGE_INDEX, "PIP_FIND_LINKS": str(wheels)}
    first = run_install(checkout, "--test", **environment)
    assert first.returncode == 7, first.stdout + first.stderr
    return checkout, environment


def test_install_py_at_a_webuis_start_imports_nothing_from_site_or_its_folder():
    """A WebUI runs install.py of each extension without arguments. The test runs it with -I -S, like the embeddable
    Python for Windows, which uses neither PYTHONPATH nor the script's folder."""
    command = [sys.executable, "-I", "-S", REPOSITORY / "install.py"]
    answer = subprocess.run(command, cwd=REPOSITORY.anchor, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr, answer.stdout) == (0, "", "")


# Arguments


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--demo", "--model", "no-such.safetensors"], "There is no model file or folder no-such.safetensors."),
        (["--demo", "--port", "TAKEN"], "; choose another with --port"),
        (["--demo", "--port", "99999"], "Port 99999 on 127.0.0.1 cannot be used"),
        (["--demo", "--prot", "7861"], "install.py --demo: error: unrecognized arguments: --prot 7861"),
        (["--demo", "--gradio-auth", "nobody"], "give accounts as user:password,user:password"),
        (["--demo", "--host", "nosuch.invalid"], "There is no address for the host name 'nosuch.invalid'"),
        (["--demo", "--host", "192.0.2.1"], "192.0.2.1 is not an address of this machine; choose another --host."),
        (["--demmo"], "install.py takes --demo, --test or nothing, not '--demmo'."),
    ],
)
def test_bad_arguments_are_refused_before_a_venv_is_made(tmp_path, arguments, sentence):
    checkout = make_checkout(tmp_path / "checkout")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        answer = run_install(checkout, *(port if word == "TAKEN" else word for word in arguments))
    assert answer.returncode == 2
    assert sentence in answer.stderr and "Traceback" not in answer.stderr
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--demo", "--help"]])
def test_help_needs_no_installation(tmp_path, arguments):
    checkout = make_checkout(tmp_path / "checkout")
    answer = run_install(checkout, *arguments)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "--data-dir" in answer.stdout and "--gradio-auth" in answer.stdout
    assert not (checkout / ".venv").exists()


def test_relative_paths_in_arguments_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    """They are made absolute for the demo, which runs in another folder. The name of a shipped model is not a path."""
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    command = install.demo_command(["--model", "mine", "--data-dir", "data"])
    assert command[-4:] == ["--data-dir", str(tmp_path / "data"), "--model", str(tmp_path / "mine")]
    assert str(tmp_path / EMOJI_DIT.name) not in install.demo_command(["--model", EMOJI_DIT.name])


def test_too_little_disk_space_is_refused_and_a_partial_venv_needs_less(tmp_path, monkeypatch):
    """1 GiB is free. A .venv that is complete except for 1 GiB is not refused."""
    monkeypatch.setattr(install, "VENV", tmp_path)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 30))
    with pytest.raises(install.CannotInstall, match=r" needs [26789]\.0 GB more, and 1\.0 GB are free there\.$"):
        install.refuse_full_disk()
    with open(tmp_path / "torch.whl", "wb") as sparse:
        sparse.truncate(install.venv_bytes() - (1 << 30))
    install.refuse_full_disk()


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings CUDA's libraries on Linux alone")
@pytest.mark.parametrize("by", ["constraint", "installation"])
def test_a_cpu_build_of_torch_needs_less_disk_space(tmp_path, monkeypatch, by):
    """by: how install.py finds out that torch is a CPU build: from the file in PIP_CONSTRAINT, or because this build is
    installed already."""
    venv = tmp_path / ".venv"
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("# torch==1.0+cpu\ntorch==2.13.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    monkeypatch.setattr(install, "VENV", venv)
    with_cuda = install.venv_bytes()
    if by == "constraint":
        constraints.write_text("torch==2.13.0+cpu\n")
    else:
        (venv / "lib" / "python3.10" / "site-packages" / "torch-2.13.0+cpu.dist-info").mkdir(parents=True)
    assert install.venv_bytes() < with_cuda


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--demo"], 1)])
def test_a_python_that_is_too_old_gets_a_sentence_instead_of_a_syntax_error(monkeypatch, capsys, arguments, code):
    """The whole of install.py must be valid syntax for Python 3.6. code: the exit code; 0 without arguments, as a WebUI
    runs it, so that the WebUI's start does not fail."""
    text = Path(install.__file__).read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 6))
    assert not any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    # Everything before it must be valid in every version of Python.
    first, second, third = tree.body[:3]
    assert isinstance(first, ast.Expr) and ast.unparse(second) == "import sys" and isinstance(third, ast.If)
    monkeypatch.setattr(sys, "version_info", (3, 6, 15))
    monkeypatch.setattr(sys, "argv", ["install.py", *arguments])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(install.__file__, run_name="__main__")
    sentence = "OneDiff needs Python 3.10 or newer, and this is 3.6.15: run it with a newer one, such as python3.11.\n"
    assert (left.value.code, capsys.readouterr().out) == (code, sentence)


# Requirements


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no TOML reader to compare with")
@pytest.mark.parametrize("text", [TINY_PYPROJECT, (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")])
def test_requirements_are_read_as_by_a_toml_parser(text):
    """install.py reads pyproject.toml without tomllib, which Python 3.10 lacks."""
    import tomllib

    project = tomllib.loads(text)
    assert install.read_strings(text, "project", "dependencies") == project["project"]["dependencies"]
    for extra, requirements in project["project"]["optional-dependencies"].items():
        assert install.read_strings(text, "project.optional-dependencies", extra) == requirements
    for table in ("without-dependencies", "tested"):
        for extra, requirements in project["tool"]["onediff"][table].items():
            assert install.read_strings(text, f"tool.onediff.{table}", extra) == requirements


def test_packages_that_users_have_already_get_no_upper_bound():
    """pip would replace a newer torch, and break packages that depend on it. The lowest tested versions satisfy the
    lower bounds."""
    requirements = pytest.importorskip("packaging.requirements")
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert install.read_strings(text, "project", "dependencies") == ["torch>=2.1.2"]
    (extras,) = re.findall(r"^\[project.optional-dependencies\]\n(.*?)^\[", text, re.MULTILINE | re.DOTALL)
    wanted = [requirements.Requirement(one) for extra in re.findall(r"^(\w+) = \[", extras, re.MULTILINE)
              for one in install.requirements_of(extra)[0]]
    tested = [requirements.Requirement(one) for which in ("oldest", "newest") for one in install.tested(which)]
    users = {"torch", *(one.name for one in tested)}
    bounds = {f"{one.name}{bound}" for one in wanted if one.name in users for bound in one.specifier}
    assert len(bounds) >= len(users) and all(">=" in bound for bound in bounds)
    lows = {one.name: one.specifier for one in wanted if one.name in users}
    for pin in tested:
        assert all(lows[pin.name].contains(bound.version) for bound in pin.specifier), pin


def test_tested_versions_are_documented():
    """The newest torch is that of core/version.py, and all are in the row of diffusers in .readme/hosts.md."""
    assert install.tested("newest")[0] == f"torch<={NEWEST_TORCH}"
    releases = (REPOSITORY / ".readme" / "hosts.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| diffusers \|.*$", releases, re.MULTILINE)
    for which in ("oldest", "newest"):
        torch, diffusers, transformers = (re.split("[<=]=", pin)[1] for pin in install.tested(which)[:3])
        assert re.search(rf" {diffusers} \((torch )?{torch}, (transformers )?{transformers}\)", row)


# Making and updating a .venv


def test_pytest_gets_the_users_arguments_last_and_its_exit_code_is_returned(installed):
    """The pytest of the tiny wheels prints its folder and arguments, and exits with 7. All arguments after --test are
    passed to pytest, even install.py's own."""
    checkout, environment = installed
    words = ["-k", "a b", "--demo", "--port", "x", "--test"]
    answer = run_install(checkout, "--test", *words, **environment)
    assert (answer.returncode, answer.stderr) == (7, "")
    assert json.loads(answer.stdout) == [str(checkout), *install.SIDE_BY_SIDE, *words]
    assert list((checkout / ".venv").rglob("tiny_torch-2.5.dist-info")), "a newer one than is tested was installed"


@pytest.mark.skipif(os.name == "nt", reason="a console's Ctrl-C cannot be sent to one process on Windows")
def test_ctrl_c_is_handled_by_the_started_program(installed):
    """install.py leaves Ctrl-C to the demo, whose exit code 5 it returns; it does not end before the demo."""
    checkout, environment = installed
    host = checkout / "lib_onediff" / "demo" / "__main__.py"
    host.write_text(WAIT_FOR_INTERRUPT)
    run_install(checkout, "--test", **environment)
    command = [sys.executable, checkout / "install.py", "--demo"]
    environment = {**os.environ, **environment}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
        # A process that a shell has started in the background ignores Ctrl-C otherwise.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert any(line == "ready\n" for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=120) == 5
    finally:
        process.kill()
        process.stdout.close()
        host.write_text(SAY_ARGUMENTS)


def test_a_second_installer_is_refused_while_one_runs(installed, monkeypatch):
    checkout, environment = installed
    for name in ("STAMPS", "LOCK", "VENV"):
        monkeypatch.setattr(install, name, checkout / getattr(install, name).relative_to(REPOSITORY))
    install.STAMPS.unlink()
    with install.sole_installer():
        answer = run_install(checkout, "--test", **environment)
    assert answer.returncode == 1
    assert answer.stderr == "Another install.py is installing into .venv. Wait until it has finished.\n"


def test_output_of_pip_that_is_not_utf_8_is_read(tmp_path, monkeypatch):
    """pip's message about a missing package is found behind bytes that are not UTF-8, and raised as CannotInstall."""
    said = rb"import sys; sys.stderr.buffer.write(b'\x81\xff No matching distribution found for tiny'); sys.exit(1)"
    (tmp_path / "pip.py").write_bytes(said)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(install, "VENV_PYTHON", sys.executable)
    with pytest.raises(install.CannotInstall, match="There is no wheel of tiny"):
        install.run_pip(["tiny"])


def test_only_missing_packages_are_announced(installed, monkeypatch):
    """There are three messages: for a first installation, for packages that .venv lacks, and for outdated ones."""
    checkout, _ = installed
    monkeypatch.setattr(install, "VENV", checkout / ".venv")
    first = install.what_it_installs("demo", ["tiny_torch>=2", "torch>=2"])
    said = r"Installing the packages for --demo into \.venv\. This takes minutes, and up to [37] GB of disk space\."
    assert re.fullmatch(said, first)
    lacking = install.what_it_installs("test", ["Tiny-Torch>=2", "ruff>=1", "wine; platform_system == 'Other'"])
    assert lacking == "Installing what --test needs and .venv lacks: ruff."
    newer = install.what_it_installs("test", ["tiny-torch>=3"])
    assert newer == "Bringing the packages for --test in .venv up to date."


class InTerminal:
    """A Python program that runs in a terminal of its own."""

    def __init__(self, code: str) -> None:
        import fcntl
        import termios

        self._terminal, its = os.openpty()

        def become_foreground() -> None:
            fcntl.ioctl(its, termios.TIOCSCTTY, 0)
            # A shell that starts the tests in the background ignores Ctrl-C for them.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        self.process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdin=its, stdout=its, stderr=its, start_new_session=True,
            env={**os.environ, "TERM": "xterm"}, preexec_fn=become_foreground,
        )
        os.close(its)

    def type(self, text: bytes) -> None:
        os.write(self._terminal, text)

    def read(self, until: bytes = b"") -> str:
        """What the program writes, up to a text or to its end."""
        text = b""
        while not until or until not in text:
            data = install.read_some(self._terminal)
            if not data:
                break
            text += data
        return text.decode()


@pytest.mark.skipif(os.name == "nt", reason="Windows gives programs no such terminals")
def test_a_terminal_shows_that_a_silent_command_is_still_running():
    """After SILENT_SECONDS without output, a line counts the seconds until the command writes again."""
    command = "import sys, time; print('begun', flush=True); time.sleep(4); print('over'); sys.exit('a problem')"
    program = InTerminal(
        "import sys, install; install.SILENT_SECONDS = 1;"
        f"print(install.run_long([sys.executable, '-c', {command!r}], shows_output=True))"
    )
    shown = program.read().replace("\r", "")
    line = r"    still working \(0:0\d\)\x1b\[K"
    assert re.fullmatch(rf"begun\s+({line})+\x1b\[Kover\s+\(1, 'a problem\\n'\)\s+", shown), repr(shown)
    assert program.process.wait(60) == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows gives programs no such terminals")
def test_ctrl_c_in_a_terminal_shows_the_cursor_again_and_ends_the_line():
    """pip's progress bar has hidden the cursor. install.py exits with 130."""
    command = r"import time; print('\x1b[?25lloading', flush=True); time.sleep(60)"
    program = InTerminal(
        f"import sys, install; command = [sys.executable, '-c', {command!r}];"
        "install.prepare_venv = lambda extra: install.run_long(command, shows_output=True);"
        "sys.exit(install.main(['--demo']))"
    )
    program.read(until=b"loading\r")
    program.type(b"\x03")
    assert program.read().replace("\r", "").endswith(
        "^C\x1b[?25h\nStopped. Run the same command again to continue.\n"
    )
    assert program.process.wait(60) == 130


def test_without_a_package_index_install_py_says_so_and_later_completes_the_partial_venv(tmp_path, wheels):
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / ".venv" / "bin").mkdir(parents=True)

    offline = run_install(checkout, "--demo", **EMPTY_PACKAGE_INDEX)
    assert offline.returncode == 1 and "Traceback" not in offline.stderr
    assert "Making .venv" in offline.stdout
    assert "pip cannot find tiny-torch<3,>=2, because PIP_NO_INDEX keeps it offline." in offline.stderr

    online = run_install(checkout, "--demo", **{**EMPTY_PACKAGE_INDEX, "PIP_FIND_LINKS": str(wheels)})
    assert "Making .venv" not in online.stdout, "a venv that only lacks packages was thrown away"
    assert online.returncode == 7


def test_an_installed_package_has_all_files_of_lib_onediff(tmp_path):
    """A wheel made from a clean copy also has the files that are not Python code, such as style sheets and py.typed."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("this setuptools is older than what pyproject.toml asks for")
    copy = tmp_path / "copy"
    shutil.copytree(REPOSITORY / "lib_onediff", copy / "lib_onediff", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    run = subprocess.run([*pip, "-w", tmp_path, copy], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if name.startswith("lib_onediff/")}
    files = {path.relative_to(copy).as_posix() for path in (copy / "lib_onediff").rglob("*") if path.is_file()}
    assert "lib_onediff/py.typed" in names and names == files
