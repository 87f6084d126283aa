"""Installs and starts OneDiff's demo or tests. Needs nothing but Python 3.10 or newer.

    python install.py
        Run by the WebUI when it starts. Does nothing: a WebUI has everything that OneDiff needs.

    python install.py --demo [OPTIONS]
        Makes .venv beside this file, installs missing packages and starts a small WebUI with OneDiff in it.
        --help lists the options.

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

import ast
import contextlib
import json
import os
import platform
import re
import select
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

# A disk with less free space than this counts as full when pip or venv has failed.
FULL_DISK_BYTES = 64 << 20
# A command that prints nothing for so long gets a line that counts the seconds.
SILENT_SECONDS = 3
# After Ctrl-C, pip has so long to restore the terminal.
SECONDS_TO_STOP = 10
ESCAPE_CODES_AT_END = re.compile(rb"(\x1b\[[0-9;?]*[A-Za-z])+\Z")
# tests/conftest.py decides how many processes "auto" is. The user's arguments follow these, and override them.
SIDE_BY_SIDE = ("-n", "auto", "--dist", "loadfile")

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
    """A version such as (3, 10) as text: "3.10"."""
    return ".".join(map(str, release))


def requirements_of(extra: str) -> tuple[list[str], list[str]]:
    """The requirements of an extra of pyproject.toml ("demo", "test") and of the project itself, as written there.

    Returns (those to install with their dependencies, those to install without). An extra of ours among them is
    replaced by its own requirements.
    """
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    usual = read_strings(text, "project", "dependencies")
    for requirement in read_strings(text, "project.optional-dependencies", extra):
        own_extra = re.fullmatch(r"sd-webui-onediff\[(\w+)\]", requirement)
        usual += requirements_of(own_extra[1])[0] if own_extra else [requirement]
    return list(dict.fromkeys(usual)), read_strings(text, "tool.onediff.without-dependencies", extra)


def tested(which: str) -> list[str]:
    """The limits of the "oldest" or of the "newest" tested versions, such as ["torch<=2.14.1", ...]."""
    return read_strings((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"), "tool.onediff.tested", which)


def within_tested(requirement: str) -> str:
    """The requirement, with the package's limit of tested("newest") added; unchanged if it has none."""
    name = re.match(r"[\w-]+", requirement)[0]
    bounds = [bound.removeprefix(name) for bound in tested("newest") if re.match(r"[\w-]+", bound)[0] == name]
    return ",".join([requirement, *bounds])


def read_strings(toml: str, table: str, key: str) -> list[str]:
    """The array of strings at a key of a table in a TOML text, such as "project" and "dependencies"; [] if there is
    none. Strings with escapes are not read."""
    # Python 3.10 has no TOML parser, but a TOML array of plain strings with comments is also a Python list.
    section = re.search(rf"^\[{re.escape(table)}\]\n(.*?)(?=^\[|\Z)", toml, re.MULTILINE | re.DOTALL)
    array = section and re.search(rf'^{re.escape(key)} = (\[(?:"[^"\n]*"|#.*|[,\s])*\])', section[1], re.MULTILINE)
    return ast.literal_eval(array[1]) if array else []


def prepare_venv(extra: str) -> None:
    """Install the extra's requirements into .venv, and print what is done. A .venv without a working pip is deleted and
    made anew. Does nothing if exactly these requirements were installed before. Raises CannotInstall, and OSError if
    .venv cannot be written."""
    usual, without_dependencies = requirements_of(extra)
    usual = [within_tested(requirement) for requirement in usual]
    wanted = usual + without_dependencies
    if read_stamps().get(extra) == wanted and has_pip():
        return
    with sole_installer():
        refuse_full_disk()
        if not has_pip():
            make_venv()
        print(what_it_installs(extra, wanted), flush=True)
        # An interrupted installation continues with the packages that are missing.
        run_pip(usual)
        if without_dependencies:
            run_pip(without_dependencies, "--no-deps")
        STAMPS.write_text(json.dumps({**read_stamps(), extra: wanted}, indent=1), encoding="utf-8")


def what_it_installs(extra: str, wanted: list[str]) -> str:
    """A sentence for the user that names the missing packages, without their dependencies. wanted: the extra's
    requirements, also those that are installed already."""
    folders = [str(path) for path in (*VENV.glob("lib/python*/site-packages"), VENV / "Lib" / "site-packages")]
    installed = {plain_name(found.metadata["Name"] or "") for found in distributions(path=folders)}
    missing = [re.match(r"[\w-]+", wish)[0] for wish in wanted if is_for_this_system(wish)]
    missing = [name for name in missing if plain_name(name) not in installed]
    if "torch" in missing:
        size = f"{venv_bytes() / 2**30:.0f} GB"
        return f"Installing the packages for --{extra} into .venv. This takes minutes, and up to {size} of disk space."
    if not missing:
        return f"Bringing the packages for --{extra} in .venv up to date."
    return f"Installing what --{extra} needs and .venv lacks: {', '.join(missing)}."


def plain_name(name: str) -> str:
    """A package's name in its normal form: "DeepCache" and "deepcache", or "a_b" and "a-b", are one package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_for_this_system(requirement: str) -> bool:
    """Whether pip installs the requirement on this operating system: it has no platform_system marker, or one that
    names this system."""
    marker = requirement.partition(";")[2]
    return "platform_system" not in marker or platform.system() in marker


def read_stamps() -> dict[str, list[str]]:
    """The requirements that were installed completely, by extra; {} if none were, or if their file is damaged."""
    try:
        stamps = json.loads(STAMPS.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return stamps if isinstance(stamps, dict) else {}


def has_pip() -> bool:
    """Whether .venv has a Python that starts and can import pip."""
    try:
        return subprocess.run([VENV_PYTHON, "-I", "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


@contextlib.contextmanager
def sole_installer():
    """A context that holds the lock file, so that only one process installs into .venv. Raises CannotInstall at once if
    another process holds it."""
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
    """The approximate size of a .venv with everything installed, in bytes."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    # Elsewhere, and in the CPU build for Linux, torch brings no CUDA libraries.
    brings_cuda = sys.platform == "linux" and not is_cpu_build()
    sizes = read_strings(text, "tool.onediff.venv-gib", "cuda" if brings_cuda else "cpu")
    return int(float(sizes[0]) * 2**30)


def is_cpu_build() -> bool:
    """Whether .venv has the CPU build of torch, or will get it because a file of PIP_CONSTRAINT names that build."""
    if any(VENV.glob("lib/python*/site-packages/torch-*+cpu.dist-info")):
        return True
    for file in os.environ.get("PIP_CONSTRAINT", "").split():
        with contextlib.suppress(OSError, ValueError):
            if re.search(r"^torch *==[^#\n]*\+cpu\b", Path(file).read_text(encoding="utf-8"), re.MULTILINE):
                return True
    return False


def refuse_full_disk() -> None:
    """Raise CannotInstall if the disk has too little room for what .venv still lacks."""
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
    """Delete what is in .venv, and make a new virtual environment with pip there. Raises CannotInstall if this Python
    cannot make one."""
    python = f"python{written(sys.version_info[:2])}"
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        way = f"On Debian and Ubuntu: apt install {python}-venv" if os.name != "nt" else "Use an installed Python."
        raise CannotInstall(f"This Python cannot make a .venv: its module venv or ensurepip is missing. {way}")
    print(f"Making .venv with {python}.", flush=True)
    empty_venv()
    exit_code, output = run_long([sys.executable, "-m", "venv", str(VENV)], shows_output=False)
    if exit_code:
        raise CannotInstall(why_failed(output) or f"Making .venv failed: {output.strip()}")


def own_environment() -> dict[str, str]:
    """A copy of the environment variables in which none makes .venv's Python or pip use other folders."""
    misleading = ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX", "PIP_USER")
    return {**{name: value for name, value in os.environ.items() if name not in misleading}, "PIP_USER": "0"}


def run_pip(requirements: list[str], *options: str) -> None:
    """Install requirements into .venv with pip, which prints its progress. options: further options of pip install.
    Raises CannotInstall if pip fails, with the reason, or with pip's errors if the reason is unknown."""
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--no-input", "--prefer-binary", *options, *requirements]
    exit_code, errors = run_long(command, shows_output=True)
    if exit_code:
        raise CannotInstall(why_failed(errors) or f"pip stopped with exit code {exit_code}:\n{errors}")


def run_long(command: list[str], shows_output: bool) -> tuple[int, str]:
    """Run a command that may take minutes. Returns (its exit code, the text that the user did not see).

    shows_output: if True, the user sees the command's standard output, and only its standard error is returned; if
        False, the user sees nothing, and standard output and standard error are returned.

    While the command shows nothing, a line counts the seconds (LiveLine). There is no such line on Windows, where a
    program cannot be given a terminal of ours, which pip needs for its progress bars; nor if our output is no terminal.
    If the user presses Ctrl-C, the command is stopped and KeyboardInterrupt raised.
    """
    is_live = os.name != "nt" and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    hidden, its_errors = os.pipe()
    shown = None
    its_output = None if shows_output else its_errors
    if is_live and shows_output:
        shown, its_output = os.openpty()
    # A new terminal does not know how wide ours is.
    environment = {**own_environment(), "COLUMNS": str(shutil.get_terminal_size().columns)}
    try:
        process = subprocess.Popen(command, env=environment, stdout=its_output, stderr=its_errors)
    finally:
        for file in {its_output, its_errors} - {None}:
            os.close(file)
    try:
        text = read_to_end(hidden, shown, LiveLine() if is_live else None)
        return process.wait(), text
    except KeyboardInterrupt:
        # The command gets Ctrl-C too.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_STOP)
        process.kill()
        raise
    finally:
        for file in {hidden, shown} - {None}:
            os.close(file)


class LiveLine:
    """A line at the end of a terminal's text that counts the seconds since a command has last written something. All of
    the command's output must go through write()."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._is_at_start = True
        self._is_there = False

    def write(self, data: bytes) -> None:
        """Write the next bytes of a command's output, in place of this line if it is shown."""
        self.erase()
        put(data)
        self._last = time.monotonic()
        text = ESCAPE_CODES_AT_END.sub(b"", data)
        if text:
            # Otherwise a progress bar or a question is on the line.
            self._is_at_start = text.endswith(b"\n")

    def tick(self) -> None:
        """Show the seconds if the command has written nothing for SILENT_SECONDS. Call it about once a second."""
        silent = int(time.monotonic() - self._last)
        if self._is_at_start and silent >= SILENT_SECONDS:
            put(f"\r    still working ({silent // 60}:{silent % 60:02})\x1b[K".encode())
            self._is_there = True

    def erase(self) -> None:
        """Remove this line from the terminal, if it is shown."""
        if self._is_there:
            put(b"\r\x1b[K")
            self._is_there = False


def put(data: bytes) -> None:
    """Write bytes to our standard output at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def read_to_end(hidden: int, shown: "int | None", line: "LiveLine | None") -> str:
    """Read two file descriptors to their ends. Returns the text of `hidden`, and writes the bytes of `shown` to `line`.

    hidden: has the output that the user does not see. shown: has the output for the terminal; None if there is none.
    line: None without a terminal; then `shown` must be None too.
    """
    text = b""
    files = {hidden, shown} - {None}
    while files:
        ready = files if line is None else select.select(files, [], [], 1)[0]
        if not ready:
            line.tick()
        for file in list(ready):
            data = read_some(file)
            if not data:
                files.discard(file)
            elif file == hidden:
                text += data
            else:
                line.write(data)
    if line is not None:
        line.erase()
    # A command may write in another encoding, for example with PYTHONIOENCODING set.
    return text.decode(errors="replace")


def read_some(file: int) -> bytes:
    """The next bytes of a file descriptor, waiting for them; b"" at its end."""
    try:
        return os.read(file, 1 << 16)
    except OSError:
        # So Linux reports the end of a terminal.
        return b""


def why_failed(output: str) -> str | None:
    """Why pip or venv has failed, as a sentence for the user that tells what to do. output: the text that it printed.
    None for an unknown reason. A full disk is found even if the output does not tell it."""
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
    """The command that starts the demo with these arguments.

    Checks them now, before an installation of minutes: ends the process after --help, and with exit code 2 after a
    sentence about a wrong option, a missing model or an address that cannot be used.
    """
    # Needed where Python leaves a script's folder off the path, as Windows' embeddable one does.
    sys.path.insert(0, str(REPOSITORY))
    from lib_onediff.core.refusal import Refusal
    from lib_onediff.demo.command_line import words_for_the_demo

    try:
        words = words_for_the_demo(arguments)
    except Refusal as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
    return [str(VENV_PYTHON), "-m", "lib_onediff.demo", *words]


def hand_over(command: list[str]) -> int:
    """Replace this process by the command, run in OneDiff's folder, so that the command gets Ctrl-C and its exit code
    is ours. Only returns on Windows, which cannot replace a process: the exit code of the command, run as a child."""
    os.chdir(REPOSITORY)
    sys.stdout.flush()
    if os.name != "nt":
        os.execve(command[0], command, own_environment())
    child = subprocess.Popen(command, env=own_environment())
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # The child gets Ctrl-C too, and decides.
            return child.wait()


def install_and_run(extra: str, command: list[str]) -> int:
    """Prepare .venv for the extra, then run the command by hand_over. If .venv cannot be prepared, prints why and
    returns 1."""
    try:
        prepare_venv(extra)
    except CannotInstall as reason:
        print(reason, file=sys.stderr)
    except OSError as error:
        print(why_failed(str(error)) or f"Cannot work in {VENV}: {error}", file=sys.stderr)
    else:
        return hand_over(command)
    return 1


def main(arguments: list[str]) -> int:
    """Do what the command line asks for, and return the exit code (see run_arguments); 130 after Ctrl-C."""
    try:
        return run_arguments(arguments)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            # pip hides the cursor while it draws progress bars, and the terminal has written ^C.
            print("" if os.name == "nt" else "\x1b[?25h", flush=True)
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        return 130


def run_arguments(arguments: list[str]) -> int:
    """Do what the command line asks for (see the module). arguments: without the program's name. Returns the exit code:
    0 without arguments, 2 after a usage message for unknown ones. --help ends the process with exit code 0."""
    if not arguments:
        return 0
    if arguments[0] == "--demo":
        return install_and_run("demo", demo_command(arguments[1:]))
    if arguments[0] == "--test":
        return install_and_run("test", [str(VENV_PYTHON), "-m", "pytest", *SIDE_BY_SIDE, *arguments[1:]])
    if arguments[0] in ("-h", "--help"):
        print(__doc__)
        # Prints the demo's options too, and ends the process.
        demo_command(["--help"])
    print(f"install.py takes --demo, --test or nothing, not {arguments[0]!r}.\n\n{__doc__}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
