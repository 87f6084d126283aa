"""Too little memory on a real GPU: the picture is made, and the entry says why it was not made faster."""
from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from exact_operators import relative_error
from torch import nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

from gpu_calls import arguments, host
from weather import CLOSE, geglu_that, gpu_is_usable, now, out_of_memory, use, while_capturing

from lib_onediff import compile_unet, status
from lib_onediff.bench.models import random_unet
from lib_onediff.core.table import State
from lib_onediff.devices.cuda.kernels import tokens as triton_tokens
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    runtime.purge()
    yield
    runtime.purge()


@pytest.fixture
def unet() -> nn.Module:
    return compile_unet(random_unet("tiny-sdxl", torch.device("cuda")).half())


def test_out_of_memory_while_capturing(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    use(unet, arguments(unet, 64, 64))
    with monkeypatch.context() as patch:
        patch.setattr(triton_tokens, "geglu", geglu_that(while_capturing(out_of_memory)))
        use(unet, arguments(unet), 4)
    assert now() == ("native", "plain")
    assert status()["reason"].startswith("out of GPU memory while its graph was captured")
    assert gpu_is_usable()
    use(unet, arguments(unet, 64, 64), 2)
    assert now()[0] == "native"
    use(unet, arguments(unet, 64, 64), 1)
    assert now() == ("native", "graph"), "the graphs that were freed come back"


def test_out_of_memory_while_running(unet: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(unet)
    use(unet, given)
    with monkeypatch.context() as patch:
        patch.setattr(triton_tokens, "geglu", geglu_that(out_of_memory))
        other = arguments(unet, 64, 64)
        use(unet, other, 2)
        assert now()[1] == "host" and status()["reason"] == "out of GPU memory: the graphs were freed"
    assert all(entry.state is not State.FAILED for entry in runtime.table.entries())
    use(unet, other)
    assert now() == ("native", "graph")
    use(unet, given, 2)
    use(unet, given, 1)
    assert now() == ("native", "graph")


def test_a_card_that_is_really_full(unet: nn.Module) -> None:
    small, large = arguments(unet), arguments(unet, 1024, 1024, 4)
    use(unet, small)
    expected = host(unet, large)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    for spare in (50, 150, 400):
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + spare * MIB) / total)
        try:
            with torch.no_grad():
                outputs = []
                for _ in range(3):
                    try:
                        outputs.append(unet(**large, return_dict=False)[0])
                    except torch.cuda.OutOfMemoryError:
                        # Then the model's own forward does not fit either.
                        assert status()["route"] == "host"
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert all(relative_error(output, expected) < CLOSE for output in outputs)
        del outputs
        torch.cuda.empty_cache()
    use(unet, small, 2)
    use(unet, small, 1)
    assert now() == ("native", "graph")
