"""Models on a GPU that is not torch's current one: exact, by graph, timed, tuned under its own card's name, and the
current device is as the caller had it."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, host

from lib_onediff.bench.models import random_unet, random_vae
from lib_onediff.hosts.diffusers import vae as diffusers_vae
from lib_onediff.public import compile_unet, status
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = [
    pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
CLOSE = 1e-2


@pytest.fixture(autouse=True)
def wait_for_compile() -> Iterator[None]:
    """Not for whole tests: calls that wait for kernels are found out anew each time."""
    torch.cuda.set_device(0)
    yield
    runtime.release_all()
    torch.cuda.set_device(0)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cards of different names, where the machine's are of one kind."""
    monkeypatch.setattr(
        torch.cuda, "get_device_name",
        lambda device=None: f"card {torch.cuda.current_device() if device is None else torch.device(device).index}",
    )
    return ["card 0", "card 1"]


def half_unet(card: int) -> nn.Module:
    return random_unet("tiny-sdxl", torch.device("cuda", card)).half()


@torch.no_grad()
def call(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    before = torch.cuda.current_device()
    output: Tensor = unet(**given, return_dict=False)[0]
    assert torch.cuda.current_device() == before, "as the caller had it"
    return output


def ready(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """The output of a call that is replayed."""
    with runtime.wait_for_compile():
        for _ in range(2):
            call(unet, given)
    for _ in range(6):
        output = call(unet, given)
    assert status()["route"] == "graph", status()["reason"]
    return output


@pytest.mark.parametrize("backend", ["auto", "cudagraph"])
@pytest.mark.parametrize(("card", "current"), [(1, 0), (0, 1)], ids=["the second", "the first"])
def test_a_unet(card: int, current: int, backend: str, names: list[str]) -> None:
    torch.cuda.set_device(current)
    before, known = torch.cuda.memory_allocated(current), set(runtime.tuning_cache._values)
    unet = half_unet(card)
    given = arguments(unet)
    expected = host(unet, given)
    compile_unet(unet, backend=backend)
    output = ready(unet, given)
    assert output.device == torch.device("cuda", card) and relative_error(output, expected) < CLOSE
    torch.cuda.synchronize(card)
    shown = status()
    assert shown["step_ms"] > 0 and shown["host_ms"] > 0 and runtime.guard.faults == []
    torch.cuda.synchronize(current)
    assert torch.cuda.memory_allocated(current) - before < 2**26, "nothing of it lies on the current card"
    tuned = [name for name in runtime.tuning_cache._values if name.startswith(("attention, ", "kernel "))]
    assert all(name.endswith(names[card]) for name in tuned if name not in known) and (tuned or backend != "auto")


@torch.no_grad()
def test_a_vae() -> None:
    device = torch.device("cuda", 1)
    vae: Any = random_vae(True, device).half()
    latent = torch.randn(1, 4, 24, 16, device=device, dtype=torch.float16)
    pixels = torch.randn(1, 3, 128, 64, device=device, dtype=torch.float16)
    for half, given in ((vae.decoder, latent), (vae.encoder, pixels)):
        expected = half(given)
        diffusers_vae.attach(half)
        with runtime.wait_for_compile():
            for _ in range(3):
                output = half(given)
        assert runtime.vae.status()["route"] == "ours", runtime.vae.status()["reason"]
        assert output.device == device and relative_error(output, expected) < CLOSE
        assert torch.cuda.current_device() == 0
        diffusers_vae.detach(half)
    assert runtime.guard.faults == []
