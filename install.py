"""Explains, installs and starts OneDiff. Needs nothing but Python 3.10 or newer.

    python install.py
        Run by the WebUI at its start. Does nothing: a WebUI brings all that OneDiff needs.

    python install.py --demo [--model FILE_OR_FOLDER] [--host 127.0.0.1] [--port N] [--allowed-hosts NAME]
        [--gradio-auth USER:PASSWORD]
        Makes .venv beside this file, installs what is missing and starts a small WebUI with OneDiff in it.

    python install.py --test [pytest arguments]
        The same for the tests, in several processes at once; -n 0 runs them in one.
"""
# No "from __future__ import annotations": Python 3.6 could not even read the sentence for it.
import sys

if sys.version_info < (3, 10):  # noqa: UP036
    told = "OneDiff needs Python 3.10 or newer, and this is {}.{}.{}: run it with a newer one, such as python3.11."
    print(told.format(*sys.version_info[:3]))
    # The WebUI must start whatever we find.
    sys.exit(1 if sys.argv[1:] else 0)

import argparse
import ast
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

FULL_DISK_BYTES = 64 << 20
LONGEST_PATH_SHOWN = 300
# How many processes "auto" is, tests/conftest.py says. What the user gives comes behind it and counts.
SIDE_BY_SIDE = ("-n", "auto", "--dist", "loadfile")

REPOSITORY = Path(__file__).resolve().parent
VENV = REPOSITORY / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMPS = VENV / "onediff-installed.json"
LOCK = VENV / "onediff-install.lock"
HELD = OSError if os.name == "nt" else BlockingIOError  # what is raised where another has locked it

class CannotInstall(Exception):
    """What stands in the way, as a sentence for the user."""


def written(release: tuple[int, ...]) -> str:
    """(3, 10) as 3.10."""
    return ".".join(map(str, release))


def requirements_of(extra: str) -> tuple[list[str], list[str]]:
    """What an extra asks pip for: requirements, and those that it installs without their dependencies."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    usual = read_strings(text, "project", "dependencies")
    for requirement in read_strings(text, "project.optional-dependencies", extra):
        own_extra = re.fullmatch(r"sd-webui-onediff\[(\w+)\]", requirement)
        usual += requirements_of(own_extra[1])[0] if own_extra else [requirement]
    return list(dict.fromkeys(usual)), read_strings(text, "tool.onediff.without-dependencies", extra)


def tested(which: str) -> list[str]:
    """The "oldest" or "newest" versions that are tested, each as pip is told of it."""
    return read_strings((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"), "tool.onediff.tested", which)


def within_tested(requirement: str) -> str:
    """A requirement that asks for nothing newer than is tested."""
    name = re.match(r"[\w-]+", requirement)[0]
    bounds = [bound.removeprefix(name) for bound in tested("newest") if re.match(r"[\w-]+", bound)[0] == name]
    return ",".join([requirement, *bounds])


def read_strings(toml: str, table: str, key: str) -> list[str]:
    """The strings at a key of a TOML table, [] if there is none."""
    # Python 3.10 has no TOML reader, and a TOML array of plain strings with comments is also a Python list.
    section = re.search(rf"^\[{re.escape(table)}\]\n(.*?)(?=^\[|\Z)", toml, re.MULTILINE | re.DOTALL)
    array = section and re.search(rf'^{re.escape(key)} = (\[(?:"[^"\n]*"|#.*|[,\s])*\])', section[1], re.MULTILINE)
    return ast.literal_eval(array[1]) if array else []


def prepare_venv(extra: str) -> None:
    """Make .venv hold what the extra needs; nothing is done where it does. Raises CannotInstall with a sentence."""
    usual, without_dependencies = requirements_of(extra)
    usual = [within_tested(requirement) for requirement in usual]
    wanted = usual + without_dependencies
    if read_stamps().get(extra) == wanted and has_pip():
        return
    with sole_installer():
        refuse_full_disk()
        if not has_pip():
            make_venv()
        print(f"Installing what --{extra} needs into .venv. The first time takes minutes and a few GB.", flush=True)
        # What was cut short goes on, package by package.
        run_pip(usual)
        if without_dependencies:
            run_pip(without_dependencies, "--no-deps")
        STAMPS.write_text(json.dumps({**read_stamps(), extra: wanted}, indent=1), encoding="utf-8")


def read_stamps() -> dict[str, list[str]]:
    """By extra: the requirements that were installed."""
    try:
        stamps = json.loads(STAMPS.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def has_pip() -> bool:
    """Whether .venv has a Python that starts and a pip."""
    try:
        return subprocess.run([VENV_PYTHON, "-I", "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def sole_installer():
    """Hold the lock file."""
    VENV.mkdir(exist_ok=True)
    with open(LOCK, "a") as lock:
        try:
            if os.name == "nt":
                import msvcrt
                msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except HELD:
            raise CannotInstall("Another install.py is at work in .venv. Wait until it has finished.") from None
        yield


def venv_bytes() -> int:
    """Roughly what a finished .venv takes."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    sizes = read_strings(text, "tool.onediff.venv-gib", "linux" if sys.platform == "linux" else "other")
    return int(float(sizes[0]) * 2**30)


def refuse_full_disk() -> None:
    """Raise CannotInstall where there is no room for what is missing in .venv."""
    there = sum(path.lstat().st_size for path in VENV.rglob("*"))
    free = shutil.disk_usage(VENV).free
    missing = venv_bytes() - there
    if free < missing:
        raise CannotInstall(f"{VENV} needs {missing / 2**30:.1f} GB more, and {free / 2**30:.1f} GB are free there.")


def empty_venv() -> None:
    """Remove all of .venv but the lock file, which this process holds."""
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != LOCK:
            path.unlink()


def make_venv() -> None:
    """A new virtual environment with pip. Raises CannotInstall where this Python cannot make one."""
    python = f"python{written(sys.version_info[:2])}"
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        way = f"On Debian and Ubuntu: apt install {python}-venv" if os.name != "nt" else "Use an installed Python."
        raise CannotInstall(f"This Python cannot make a .venv: its module venv or ensurepip is missing. {way}")
    print(f"Making .venv with {python}.", flush=True)
    empty_venv()
    command = [sys.executable, "-m", "venv", VENV]
    own = own_environment()
    answer = subprocess.run(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    if answer.returncode != 0:
        raise CannotInstall(why_failed(answer.stdout) or f"Making .venv failed: {answer.stdout.strip()}")


def own_environment() -> dict[str, str]:
    """The environment without what would lead the Python of .venv, or its pip, to another place."""
    misleading = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {**{name: value for name, value in os.environ.items() if name not in misleading}, "PIP_USER": "0"}


def run_pip(requirements: list[str], *options: str) -> None:
    """pip install into .venv, with pip's own progress on the screen. Raises CannotInstall with the reason."""
    command = [VENV_PYTHON, "-m", "pip", "install", "--no-input", "--prefer-binary", *options, *requirements]
    # Where PYTHONIOENCODING is set, pip writes in another encoding than we read.
    pip = subprocess.run(command, env=own_environment(), stderr=subprocess.PIPE, errors="replace")
    if pip.returncode:
        raise CannotInstall(why_failed(pip.stderr) or f"pip stopped with exit code {pip.returncode}:\n{pip.stderr}")


def why_failed(output: str) -> str | None:
    """The sentence for a failure that the output of pip or venv shows, None for one that we do not know."""
    missing = re.search(r"No matching distribution found for ([^\s(]+)", output)
    unbuilt = re.search(r"(?:Failed building wheel for|Failed to build) '?([\w.-]+)", output)
    wheels = "set PIP_FIND_LINKS to a folder of wheels, then run the same command again."
    here = f"for Python {written(sys.version_info[:2])} on {sys.platform}; Python 3.10 to 3.14 are known to work."
    free = min(shutil.disk_usage(folder).free for folder in (VENV.parent, tempfile.gettempdir()))
    if free < FULL_DISK_BYTES or re.search(r"No space left|\[Errno 28\]|\[WinError 112\]|Disk quota exceeded", output):
        return f"The disk is full: {VENV} needs some GB, and so does the folder for temporary files, for a while."
    if "CERTIFICATE_VERIFY_FAILED" in output:
        return "pip does not trust the certificate of its package index: set PIP_CERT to your network's certificate."
    if re.search(r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError", output):
        return f"pip cannot reach its package index: this machine seems to be offline. Connect it, or {wheels}"
    if missing and os.environ.get("PIP_NO_INDEX"):
        return f"pip is kept offline by PIP_NO_INDEX and finds no {missing[1]}. Take that setting away, or {wheels}"
    if unbuilt:
        return f"There is no wheel of {unbuilt[1]}, and building it failed, {here}"
    return f"There is no wheel of {missing[1]} {here}" if missing else None


def demo_command(arguments: list[str]) -> list[str]:
    """What starts the standalone host, which reads its arguments itself: --help names them. Ends the process with a
    sentence where the model is not there or the port is taken: installing takes minutes."""
    parser = argparse.ArgumentParser(prog="install.py --demo", allow_abbrev=False, add_help=False)
    parser.add_argument("--model", type=model_path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    chosen, others = parser.parse_known_args(arguments)
    try:
        family = socket.AF_INET6 if ":" in chosen.host else socket.AF_INET
        socket.create_server((chosen.host, chosen.port), family=family).close()
    except (OSError, OverflowError, ValueError) as error:
        parser.error(f"port {chosen.port} on {chosen.host} is refused ({error}); choose another with --port")
    model = [] if chosen.model is None else ["--model", str(chosen.model)]
    port = ["--port", str(chosen.port)] if chosen.port else []
    return [str(VENV_PYTHON), "-m", "lib_onediff.demo", *others, "--host", chosen.host, *port, *model]


def model_path(text: str) -> Path:
    """A model's absolute path: the host runs in another folder than the caller."""
    if not os.path.exists(text):
        shown = "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_PATH_SHOWN])
        raise argparse.ArgumentTypeError(f"there is no file or folder {shown}")
    return Path(text).absolute()


def hand_over(command: list[str]) -> int:
    """Run the command in our folder and in this process's place: Ctrl-C and exit code are its own."""
    os.chdir(REPOSITORY)
    sys.stdout.flush()
    if os.name != "nt":
        os.execve(command[0], command, own_environment())
    child = subprocess.Popen(command, env=own_environment())
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # The child gets it as well and decides what it means.
            return child.wait()


def install_and_run(extra: str, command: list[str]) -> int:
    """Prepare .venv for the extra, then run the command. Returns an exit code; says why where it fails."""
    try:
        prepare_venv(extra)
    except CannotInstall as reason:
        print(reason, file=sys.stderr)
    except OSError as error:
        print(why_failed(str(error)) or f"Cannot work in {VENV}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to go on.", file=sys.stderr)
        return 130
    else:
        return hand_over(command)
    return 1


def main(arguments: list[str]) -> int:
    """The exit code."""
    if not arguments:
        return 0
    if arguments[0] == "--demo":
        return install_and_run("demo", demo_command(arguments[1:]))
    if arguments[0] == "--test":
        return install_and_run("test", [str(VENV_PYTHON), "-m", "pytest", *SIDE_BY_SIDE, *arguments[1:]])
    if arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    print(f"install.py takes --demo, --test or nothing, not {arguments[0]!r}.\n\n{__doc__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
