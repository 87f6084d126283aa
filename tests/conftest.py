"""What holds for all tests."""
from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest


def interpret_kernels_without_a_gpu() -> None:
    """Let Triton's interpreter run our kernels on the CPU: Triton looks for this when it is imported."""
    if find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


# Now, and not in a hook: the conftest.py files below this one are imported before any hook is called.
interpret_kernels_without_a_gpu()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs an NVIDIA GPU where there is none."""
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
