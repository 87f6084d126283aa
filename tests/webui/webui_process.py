"""The demo in a process of its own."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

from busy import attempts, patience

ROOT = Path(__file__).resolve().parents[2]
# The demo's command line, as for a user; and with A1111's REST API added, for tests.
AS_A_USER = [sys.executable, "-m", "lib_onediff.demo"]
WITH_REST = [sys.executable, str(Path(__file__).with_name("demo_rest.py"))]
# The demo's address in its output. It does not include the end of the line: without buffering, print writes that
# separately, and another thread may write between the two.
ADDRESS = re.compile(r"http://(?:\[[\w:]+\]|[\w.-]+):\d+")
SECONDS_TO_START = 180


def environment() -> dict[str, str]:
    """The environment of a demo under test: one thread, so that several tests can share a small machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


# The modules that the demo imports. It imports the rest of diffusers when it first needs them.
IMPORTED = ["demo_rest", "lib_onediff.demo.server", "lib_onediff.demo.models", *(
    f"diffusers.pipelines.{name}.pipeline_{name}" for name in ("stable_diffusion", "stable_diffusion_xl")
)]


@cache
def forking() -> Any:
    """The multiprocessing context whose processes are forks of one that has imported this module."""
    from lib_onediff.demo.__main__ import stay_offline_and_quiet

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    with mock.patch.dict(os.environ, {**environment(), "PYTHONPATH": paths}):
        stay_offline_and_quiet(tempfile.gettempdir())
        forkserver.ensure_running()
    return context


def become_host(arguments: list[str], environment: dict[str, str], output: str) -> NoReturn:
    """Run the demo's command line in this process, a fork, and end the process. output: the path of a pipe for its
    output."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(ROOT)
    opened = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(opened, stream)
    from demo_rest import with_rest

    from lib_onediff.demo.__main__ import leave, main

    with_rest()
    code: Any = 1
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    leave(code)


class ForkedHost:
    """A demo with the interface of subprocess.Popen, made by a fork: it starts in two seconds instead of fifteen."""

    def __init__(self, arguments: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            pipe = os.path.join(folder, "output")
            os.mkfifo(pipe)
            self._process = forking().Process(target=become_host, args=(arguments, environment(), pipe), daemon=True)
            self._process.start()
            self.stdout: IO[str] = open(pipe, encoding="utf-8")  # noqa: SIM115

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("host", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


class HostProcess:
    """A running demo of the checkout at root. lines: everything that it has printed.

    from_nothing: start it by the command line, as a user does. Otherwise it has A1111's REST API too, and is a fork
    where the system has forks.
    """

    def __init__(self, *arguments: str, root: Path = ROOT, from_nothing: bool = False) -> None:
        self.lines: list[str] = []
        self._arrived: queue.Queue[str | None] = queue.Queue()
        if from_nothing or root != ROOT or not hasattr(os, "fork"):
            self.process: subprocess.Popen[str] | ForkedHost = subprocess.Popen(
                [*(AS_A_USER if from_nothing else WITH_REST), *arguments], cwd=root, text=True,
                env={**environment(), "PYTHONPATH": str(root)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        else:
            self.process = ForkedHost(list(arguments))
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._arrived.put(line)
        self._arrived.put(None)

    def url(self) -> str:
        """Wait until the demo prints its address, and return it. Raises AssertionError, with the output, if it does
        not."""
        for _ in attempts(SECONDS_TO_START, pause=0):
            try:
                line = self._arrived.get(timeout=1)
            except queue.Empty:
                continue
            if line is None:
                break
            address = ADDRESS.search(line)
            if address:
                return address.group()
        self.stop()
        raise AssertionError("the host did not start; it printed:\n" + "\n".join(self.lines))

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    @classmethod
    @contextlib.contextmanager
    def running(cls, *arguments: str) -> Iterator[HostProcess]:
        """A context with a running demo, which is stopped at the end."""
        host = cls(*arguments)
        try:
            yield host
        finally:
            host.stop()

    def stop(self) -> int:
        """Stop the demo and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30 * patience())
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(30 * patience())


@dataclass(frozen=True)
class Ended:
    """The exit code and the output of a process that has ended."""

    returncode: int
    output: str


def run_to_end(*arguments: str, from_nothing: bool = False) -> Ended:
    """Run the demo with arguments that it must refuse, until it ends. from_nothing: see HostProcess."""
    host = HostProcess(*arguments, from_nothing=from_nothing)
    returncode = host.process.wait(SECONDS_TO_START * patience())
    host.reader.join()
    return Ended(returncode, host.output)
