"""Configures all tests: kernels without a GPU, worker processes, and the output of failures and hung tests."""
from __future__ import annotations

import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

MOST_WORKERS = 6
MANY_TESTS = 2000
# A run of more tests than this prints failures when they happen, because it ends long after the first of them.
TESTS_OF_A_LONG_RUN = 50
# The files that --pictures runs.
PICTURES = ("test_screenshots.py", "test_feature_pictures.py")
# A busy machine takes many times as long as an idle one, whose slowest test takes two minutes.
SECONDS_OF_A_HUNG_TEST = float(os.environ.get("ONEDIFF_TEST_HUNG_SECONDS", 3600))


def interpret_kernels_without_a_gpu() -> None:
    """Let Triton's interpreter run our kernels on the CPU. Triton reads this variable when it is imported."""
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def one_thread_for_each_worker() -> None:
    """Let each worker of pytest-xdist, and the processes that it starts, use one thread: they share the cores, and are
    slower with more. torch reads this variable when it is imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def keep_what_workers_compile() -> None:
    """Let each worker store the bytecode of test files in which pytest has rewritten the assertions, so that other
    workers load it. Otherwise each worker would rewrite all files, which takes half of the collection's time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        sys.dont_write_bytecode = False


# Now, and not in a hook: the conftest.py files below this one are imported before any hook is called.
one_thread_for_each_worker()
interpret_kernels_without_a_gpu()
keep_what_workers_compile()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """The number of workers: one more than there are cores, because the tests in a browser mostly wait, and at most
    MOST_WORKERS. With two more than cores, a run took longer.

    None (pytest-xdist decides) if an environment variable sets it. 0 with --webui, because there is one WebUI only, and
    on a GPU, because the tests measure its memory.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    import torch

    if config.getoption("--webui", default=None) or torch.cuda.is_available():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of sharing.py, which distributes tests by files. None, for pytest-xdist's own one, unless the
    command line has --dist loadfile."""
    if config.getoption("dist") != "loadfile":
        return None
    from sharing import Sharing

    # Distribute files in the order of collection, instead of those with many tests first.
    config.option.loadscopereorder = False
    return Sharing(config, log)


class FailuresAtOnce:
    """Prints each failure of a long run when it happens, and not only at the end."""

    def __init__(self, reporter: Any) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        session = self._reporter._session
        # If other processes run the tests, this session has no items.
        is_long = session is None or not hasattr(session, "items") or len(session.items) > TESTS_OF_A_LONG_RUN
        if report.failed and (is_long or hasattr(report, "node")):
            self._reporter.ensure_newline()
            self._reporter.write_sep("_", f"{report.nodeid} has failed ({report.when})", red=True)
            report.toterminal(self._reporter._tw)


class HungTests:
    """Ends the process if a test takes longer than SECONDS_OF_A_HUNG_TEST, after printing the stacks of all threads."""

    def __init__(self) -> None:
        # Now, while pytest does not capture it.
        self._stderr = os.dup(2)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        faulthandler.dump_traceback_later(SECONDS_OF_A_HUNG_TEST, exit=True, file=self._stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


# Last, because the same hook makes the reporter.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(HungTests())
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        config.pluginmanager.register(FailuresAtOnce(reporter))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", action="store_true", help="only draw the pictures of the documentation again")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Let each worker begin collecting at another file. The files that it collects last have then been rewritten and
    stored by other workers."""
    report = yield
    if isinstance(collector, pytest.Dir) and "PYTEST_XDIST_WORKER" in os.environ and report.passed:
        number = os.environ["PYTEST_XDIST_WORKER"][2:]
        count = os.environ["PYTEST_XDIST_WORKER_COUNT"]
        first = len(report.result) * int(number) // int(count)
        report.result[:] = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests into the order in which workers take them. Without an NVIDIA GPU, skip those that need one."""
    if config.getoption("--pictures"):
        items[:] = [item for item in items if item.path.name in PICTURES]
    if find_spec("xdist") is not None:
        from sharing import turn

        items.sort(key=lambda item: (turn(item.nodeid.partition("::")[0]), item.nodeid.partition("::")[0]))
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude all objects that exist after the imports from garbage collection, which took up to a second each time. In
    workers of the whole suite, import diffusers first, so that its objects are excluded as well."""
    if "PYTEST_XDIST_WORKER" in os.environ and len(session.items) > MANY_TESTS and find_spec("diffusers") is not None:
        from diffusers import StableDiffusionPipeline, UNet2DConditionModel  # noqa: F401
    gc.collect()
    gc.freeze()


@pytest.fixture
def exact_products() -> Iterator[None]:
    """Switch TF32 off, so that a GPU multiplies float32 in float32."""
    from torch import backends

    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = False
    yield
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before
