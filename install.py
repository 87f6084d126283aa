"""Installs and starts OneDiff's demo or tests. Needs nothing but Python 3.10 or newer.

    python install.py
        Run by the WebUI when it starts. Does nothing: a WebUI has everything that OneDiff needs.

    python install.py --demo [--model FILE_OR_FOLDER] [--host 127.0.0.1] [--port N] [--allowed-hosts NAME]
        [--gradio-auth USER:PASSWORD]
        Makes .venv beside this file, installs missing packages and starts a small WebUI with OneDiff in it.

    python install.py --test [pytest arguments]
        Does the same for the tests, and runs them in several processes; -n 0 runs them in one.
"""
# No "from __future__ import annotations", so that Python 3.6 can parse this file and print the sentence below.
import sys

if sys.version_info < (3, 10):  # noqa: UP036
    sentence = "OneDiff needs Python 3.10 or newer, and this is {}.{}.{}: run it with a newer one, such as python3.11."
    print(sentence.format(*sys.version_info[:3]))
    # Without arguments, the WebUI runs this, and must start in any case.
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
# tests/conftest.py decides how many processes "auto" is. The user's arguments follow these, and override them.
SIDE_BY_SIDE = ("-n", "auto", "--dist", "loadfile")

# The model that comes with the demo beside its usual one, and is chosen by its name.
EMOJI_DIT = "emoji-dit"

REPOSITORY = Path(__file__).resolve().parent
VENV = REPOSITORY / ".venv"
VENV_PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMPS = VENV / "onediff-installed.json"
LOCK = VENV / "onediff-install.lock"
# The exception raised if another process has locked the file.
HELD = OSError if os.name == "nt" else BlockingIOError


class CannotInstall(Exception):
    """The installation is not possible. The message is the reason, as a sentence for the user."""


def written(release: tuple[int, ...]) -> str:
    """The version (3, 10) as "3.10"."""
    return ".".join(map(str, release))


def requirements_of(extra: str) -> tuple[list[str], list[str]]:
    """The requirements of an extra, for pip: those to install as usual, and those to install without dependencies."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    usual = read_strings(text, "project", "dependencies")
    for requirement in read_strings(text, "project.optional-dependencies", extra):
        own_extra = re.fullmatch(r"sd-webui-onediff\[(\w+)\]", requirement)
        usual += requirements_of(own_extra[1])[0] if own_extra else [requirement]
    return list(dict.fromkeys(usual)), read_strings(text, "tool.onediff.without-dependencies", extra)


def tested(which: str) -> list[str]:
    """The requirements for the "oldest" or the "newest" versions that are tested."""
    return read_strings((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"), "tool.onediff.tested", which)


def within_tested(requirement: str) -> str:
    """The requirement, limited to the newest version that is tested."""
    name = re.match(r"[\w-]+", requirement)[0]
    bounds = [bound.removeprefix(name) for bound in tested("newest") if re.match(r"[\w-]+", bound)[0] == name]
    return ",".join([requirement, *bounds])


def read_strings(toml: str, table: str, key: str) -> list[str]:
    """The array of strings at a key of a TOML table; [] if there is none."""
    # Python 3.10 has no TOML parser, but a TOML array of plain strings with comments is also a Python list.
    section = re.search(rf"^\[{re.escape(table)}\]\n(.*?)(?=^\[|\Z)", toml, re.MULTILINE | re.DOTALL)
    array = section and re.search(rf'^{re.escape(key)} = (\[(?:"[^"\n]*"|#.*|[,\s])*\])', section[1], re.MULTILINE)
    return ast.literal_eval(array[1]) if array else []


def prepare_venv(extra: str) -> None:
    """Install the extra's requirements into .venv, if they are missing. Raises CannotInstall with a sentence."""
    usual, without_dependencies = requirements_of(extra)
    usual = [within_tested(requirement) for requirement in usual]
    wanted = usual + without_dependencies
    if read_stamps().get(extra) == wanted and has_pip():
        return
    with sole_installer():
        refuse_full_disk()
        if not has_pip():
            make_venv()
        print(f"Installing the packages for --{extra} into .venv: the first time minutes, and a few GB.", flush=True)
        # An interrupted installation continues with the packages that are missing.
        run_pip(usual)
        if without_dependencies:
            run_pip(without_dependencies, "--no-deps")
        STAMPS.write_text(json.dumps({**read_stamps(), extra: wanted}, indent=1), encoding="utf-8")


def read_stamps() -> dict[str, list[str]]:
    """The requirements that were installed, by extra."""
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
    """A context that holds the lock file. Raises CannotInstall if another process holds it."""
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
            raise CannotInstall("Another install.py is installing into .venv. Wait until it has finished.") from None
        yield


def venv_bytes() -> int:
    """The approximate size of a complete .venv in bytes."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    sizes = read_strings(text, "tool.onediff.venv-gib", "linux" if sys.platform == "linux" else "other")
    return int(float(sizes[0]) * 2**30)


def refuse_full_disk() -> None:
    """Raise CannotInstall if the disk has too little room for a complete .venv."""
    there = sum(path.lstat().st_size for path in VENV.rglob("*"))
    free = shutil.disk_usage(VENV).free
    missing = venv_bytes() - there
    if free < missing:
        raise CannotInstall(f"{VENV} needs {missing / 2**30:.1f} GB more, and {free / 2**30:.1f} GB are free there.")


def empty_venv() -> None:
    """Delete everything in .venv except the lock file, which this process holds."""
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != LOCK:
            path.unlink()


def make_venv() -> None:
    """Make a new virtual environment with pip. Raises CannotInstall if this Python cannot make one."""
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
    """The environment variables, without those that would make .venv's Python or pip use other folders."""
    misleading = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {**{name: value for name, value in os.environ.items() if name not in misleading}, "PIP_USER": "0"}


def run_pip(requirements: list[str], *options: str) -> None:
    """Install requirements into .venv with pip, which prints its progress. Raises CannotInstall with the reason."""
    command = [VENV_PYTHON, "-m", "pip", "install", "--no-input", "--prefer-binary", *options, *requirements]
    # errors="replace", because with PYTHONIOENCODING set, pip may write in another encoding.
    pip = subprocess.run(command, env=own_environment(), stderr=subprocess.PIPE, errors="replace")
    if pip.returncode:
        raise CannotInstall(why_failed(pip.stderr) or f"pip stopped with exit code {pip.returncode}:\n{pip.stderr}")


def why_failed(output: str) -> str | None:
    """The reason for a failure of pip or venv, as a sentence for the user, by its output; None if it is unknown."""
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
        return f"pip cannot find {missing[1]}, because PIP_NO_INDEX keeps it offline. Remove that setting, or {wheels}"
    if unbuilt:
        return f"There is no wheel of {unbuilt[1]}, and building it failed, {here}"
    return f"There is no wheel of {missing[1]} {here}" if missing else None


def demo_command(arguments: list[str]) -> list[str]:
    """The command that starts the demo, which parses its arguments itself (--help lists them).

    Ends the process with a sentence now, before an installation of minutes, if the model does not exist or the port is
    in use.
    """
    parser = argparse.ArgumentParser(prog="install.py --demo", allow_abbrev=False, add_help=False)
    parser.add_argument("--model", type=model_argument)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    chosen, others = parser.parse_known_args(arguments)
    try:
        family = socket.AF_INET6 if ":" in chosen.host else socket.AF_INET
        socket.create_server((chosen.host, chosen.port), family=family).close()
    except (OSError, OverflowError, ValueError) as error:
        parser.error(f"port {chosen.port} on {chosen.host} cannot be used ({error}); choose another with --port")
    model = [] if chosen.model is None else ["--model", chosen.model]
    port = ["--port", str(chosen.port)] if chosen.port else []
    return [str(VENV_PYTHON), "-m", "lib_onediff.demo", *others, "--host", chosen.host, *port, *model]


def model_argument(text: str) -> str:
    """A model's absolute path, because the demo runs in another folder than the caller; or EMOJI_DIT."""
    if text == EMOJI_DIT:
        return text
    if not os.path.exists(text):
        shown = "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_PATH_SHOWN])
        raise argparse.ArgumentTypeError(f"there is no file or folder {shown}")
    return str(Path(text).absolute())


def hand_over(command: list[str]) -> int:
    """Replace this process by the command, run in OneDiff's folder, so that it gets Ctrl-C and sets the exit code."""
    os.chdir(REPOSITORY)
    sys.stdout.flush()
    if os.name != "nt":
        os.execve(command[0], command, own_environment())
    child = subprocess.Popen(command, env=own_environment())
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # The child gets Ctrl-C too, and decides.
            return child.wait()


def install_and_run(extra: str, command: list[str]) -> int:
    """Prepare .venv for the extra, then run the command. Returns its exit code, or prints why it cannot run."""
    try:
        prepare_venv(extra)
    except CannotInstall as reason:
        print(reason, file=sys.stderr)
    except OSError as error:
        print(why_failed(str(error)) or f"Cannot work in {VENV}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        return 130
    else:
        return hand_over(command)
    return 1


def main(arguments: list[str]) -> int:
    """Run the command line's command. Returns the exit code."""
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
