"""Hosts as forks of one process that has imported what a host imports: each starts in two seconds, not in fifteen.

Run as a program it is that process. It answers each line of JSON on its standard input with one on its output.
"""
from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any, NoReturn

SECONDS_BETWEEN_LOOKS = 0.05


class ForkingProcess:
    """The tests' side: the process that forks. It ends when its standard input is closed."""

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], cwd=root, env={**environment, "PYTHONPATH": str(root)}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        atexit.register(self._process.stdin.close)

    def ask(self, **order: Any) -> Any:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that starts hosts has ended"
        return json.loads(answer)


class ForkedHost:
    """A host as subprocess.Popen has it."""

    def __init__(self, parent: ForkingProcess, arguments: list[str], environment: dict[str, str]) -> None:
        self._parent = parent
        self.returncode: int | None = None
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "output")
            os.mkfifo(pipe)
            self.pid: int = parent.ask(start=arguments, environment=environment, output=pipe)
            self.stdout: IO[str] = open(pipe, encoding="utf-8")  # noqa: SIM115

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._parent.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("host", timeout)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # Until somebody polls, a process that has ended keeps its id.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)


def import_what_a_host_imports() -> None:
    from lib_onediff.demo.__main__ import stay_offline_and_quiet

    stay_offline_and_quiet(tempfile.gettempdir())
    from lib_onediff.demo.modules import modules_importable

    with modules_importable():
        import diffusers
        from demo_rest import with_rest

        import lib_onediff.demo.models
        import lib_onediff.demo.server  # noqa: F401

        with_rest()
        # They are imported when they are first asked for.
        _ = diffusers.StableDiffusionPipeline, diffusers.StableDiffusionXLPipeline
    gc.freeze()


def become_host(arguments: list[str], environment: dict[str, str], output: str) -> NoReturn:
    """In the new process: run the command line, whatever happens."""
    code = 1
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for stream, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY)):
        opened = os.open(path, mode)
        os.dup2(opened, stream)
        os.close(opened)
    os.dup2(1, 2)
    from lib_onediff.demo.__main__ import leave, main

    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    leave(code)


def ended(pid: int) -> int | None:
    """The exit code of a child as Popen has it, None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve() -> None:
    import_what_a_host_imports()
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            print(json.dumps(ended(order["poll"])), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            become_host(order["start"], order["environment"], order["output"])
        print(pid, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        serve()
