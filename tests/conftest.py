"""What holds for all tests."""
from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

MOST_WORKERS = 6


def interpret_kernels_without_a_gpu() -> None:
    """Let Triton's interpreter run our kernels on the CPU: Triton looks for this when it is imported."""
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def one_thread_for_each_worker() -> None:
    """Processes that share the cores, and what they start, are slower with threads: torch looks when it is imported."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


# Now, and not in a hook: the conftest.py files below this one are imported before any hook is called.
one_thread_for_each_worker()
interpret_kernels_without_a_gpu()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """One process more than there are cores, because the tests in a browser mostly wait.

    A WebUI that is given with --webui is only one, and on a GPU the tests measure memory.
    """
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    import torch

    if config.getoption("--webui", default=None) or torch.cuda.is_available():
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores + 1, MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have one process wait for a browser while the others compute, and skip what needs an NVIDIA GPU without one."""
    items.sort(key=lambda item: item.path.parent.name != "webui")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU that torch can use"))


@pytest.fixture
def exact_products() -> Iterator[None]:
    """A GPU multiplies float32 in float32, and not in TF32."""
    from torch import backends

    before = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
    backends.cuda.matmul.allow_tf32 = backends.cudnn.allow_tf32 = False
    yield
    backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32 = before
