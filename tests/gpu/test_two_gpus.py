"""With two real GPUs: calls that both GPUs compute, and models on a GPU that is not torch's current device. The latter
are served by graphs, timed, and tuned under their own GPU's name, and the caller's current device stays the same."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, called, host, last_call, residual_shapes
from test_cudagraph import change_by_moving
from test_edits_replayed import as_in_images

from lib_onediff.bench.models import random_unet, random_vae
from lib_onediff.hosts.diffusers import vae as diffusers_vae
from lib_onediff.public import compile_unet, uncompile_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = [
    pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
SPLIT = "cuda:0 + cuda:1, 1+1 rows"
MIB = 2**20


@pytest.fixture(autouse=True)
def warming_up() -> Iterator[None]:
    """Replaces the fixture of conftest.py: the calls of these tests are no warm-up. The fast path for repeated calls
    (lib_onediff.runtime.plan) refuses calls of a warm-up."""
    torch.cuda.set_device(0)
    yield
    runtime.release_all()
    torch.cuda.set_device(0)


def second() -> dict[str, Any]:
    return last_call()["second_gpu"]


def replayed_by_both(unet: nn.Module, given: dict[str, Any], split: str = SPLIT, calls: int = 4) -> Tensor:
    """Call until both GPUs replay graphs, and return the last output. split: the GPUs and the number of rows (images of
    the batch) of each, as in the status."""
    with runtime.warming_up():
        for _ in range(2):
            called(unet, given)
    for _ in range(calls):
        output = called(unet, given)
    assert second()["split"] == split, second()["reason"]
    assert last_call()["route"] == "graph", last_call()["reason"]
    return output


def test_rows_computed_by_two_gpus_are_close_to_the_host_and_in_the_order_of_the_batch(tiny: nn.Module) -> None:
    """A row is an image of the batch; each is compared with the host's. Batches of 2 rows with a ControlNet's
    residuals, which are split, too, and of 4 and 3 rows without."""
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    shapes = residual_shapes(tiny, given)
    for strength in (0.5, 2.0):
        residuals = [strength * torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]
        controlled = {**given, "down_block_additional_residuals": tuple(residuals[:-1]),
                      "mid_block_additional_residual": residuals[-1]}
        output = replayed_by_both(tiny, controlled)
        expected = host(tiny, controlled)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2))
    for batch, split in ((4, "cuda:0 + cuda:1, 2+2 rows"), (3, "cuda:0 + cuda:1, 2+1 rows")):
        given = arguments(tiny, batch=batch)
        output = replayed_by_both(tiny, given, split)
        expected = host(tiny, given)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(batch))


def test_a_replay_by_two_gpus_never_synchronises_and_uses_the_inputs_of_its_own_call(tiny: nn.Module) -> None:
    """torch is set to raise if a call synchronises with a GPU. Eight calls are made without waiting, so that the second
    GPU may still compute earlier ones. Each output is compared with the host's for the same inputs."""
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    replayed_by_both(tiny, given)
    calls = [{**given, "sample": torch.randn_like(given["sample"])} for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [called(tiny, one) for one in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert second()["split"] == SPLIT and torch.cuda.current_device() == 0
    for output, one in zip(outputs, calls, strict=True):
        assert relative_error(output, host(tiny, one)) < 1e-2


def change_one_row(unet: nn.Module) -> None:
    """Edit a row of a weight through .data, which torch's version counter does not count."""
    unet.mid_block.resnets[0].conv1.weight.data[3] *= 2


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict({name: value * 0.95 for name, value in unet.state_dict().items()})


CHANGES = change_one_row, change_in_place, change_by_loading, change_by_moving, change_in_place


def test_edited_weights_are_copied_to_the_second_gpu_before_the_next_call(tiny: nn.Module) -> None:
    """After each edit, both rows of the batch, one from each GPU, are close to the host's."""
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    replayed_by_both(tiny, given)
    for change in CHANGES:
        with torch.no_grad():
            change(tiny)
        for _ in range(3):
            output = called(tiny, given)
            expected = host(tiny, given)
            assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2)), change.__name__
        assert second()["split"] == SPLIT, second()["reason"]


def test_uncompiled_unets_leave_no_weights_on_the_second_gpu(tiny: nn.Module) -> None:
    """Two UNets are compiled, called and uncompiled, then one of them again. Up to 160 MiB of workspaces of CUDA
    libraries may stay after the first time, and 1 MiB more after the second."""
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(1)

    other = random_unet("tiny-sd15", torch.device("cuda")).half()
    for unet in (tiny, other):
        compile_unet(unet, second_gpu="auto")
        given = arguments(unet)
        assert relative_error(replayed_by_both(unet, given), host(unet, given)) < 1e-2
    weights = sum(parameter.nbytes for unet in (tiny, other) for parameter in unet.parameters())
    assert second()["bytes"] == weights and allocated() >= weights
    for unet in (tiny, other):
        uncompile_unet(unet)
    # The matrix libraries keep their workspaces for a stream.
    assert second()["bytes"] == 0 and allocated() < weights + 160 * MIB
    before = allocated()
    compile_unet(tiny, second_gpu="auto")
    replayed_by_both(tiny, arguments(tiny))
    uncompile_unet(tiny)
    assert allocated() - before < MIB


# --- a card that is not the current one -------------------------------------------------------------------------------


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give both GPUs different names, although they are of one model."""
    monkeypatch.setattr(
        torch.cuda, "get_device_name",
        lambda device=None: f"card {torch.cuda.current_device() if device is None else torch.device(device).index}",
    )
    return ["card 0", "card 1"]


def replayed(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """Call until a graph is replayed, and return the last output."""
    before = torch.cuda.current_device()
    with runtime.warming_up():
        for _ in range(2):
            called(unet, given)
    for _ in range(6):
        output = called(unet, given)
        assert torch.cuda.current_device() == before, "as the caller had it"
    assert last_call()["route"] == "graph", last_call()["reason"]
    return output


@pytest.mark.parametrize("backend", ["auto", "cudagraph"])
@pytest.mark.parametrize(("card", "current"), [(1, 0), (0, 1)], ids=["the second", "the first"])
def test_a_unet_on_another_gpu_than_the_current_one_is_replayed_timed_and_tuned_there(
    card: int, current: int, backend: str, names: list[str]
) -> None:
    """card: the UNet's GPU. current: torch's current device, which does not change, and on which less than 64 MiB are
    allocated. Tuned choices are stored under the name of the UNet's GPU. The output is close to the host's."""
    torch.cuda.set_device(current)
    before = torch.cuda.memory_allocated(current)
    known = set(runtime.tuning_cache._values)
    unet = random_unet("tiny-sdxl", torch.device("cuda", card)).half()
    given = arguments(unet)
    expected = host(unet, given)
    compile_unet(unet, backend=backend)
    output = replayed(unet, given)
    assert output.device == torch.device("cuda", card) and relative_error(output, expected) < 1e-2
    torch.cuda.synchronize(card)
    shown = last_call()
    assert shown["step_ms"] > 0 and shown["host_ms"] > 0 and runtime.guard.faults == []
    torch.cuda.synchronize(current)
    assert torch.cuda.memory_allocated(current) - before < 2**26, "nothing of it lies on the current card"
    tuned = [name for name in runtime.tuning_cache._values if name.startswith(("attention, ", "kernel "))]
    assert all(name.endswith(names[card]) for name in tuned if name not in known) and (tuned or backend != "auto")


@torch.no_grad()
def test_a_vae_on_another_gpu_than_the_current_one_is_served_there() -> None:
    """The outputs of decoder and encoder are on the VAE's GPU and close to those of the VAE's own forward. torch's
    current device stays 0."""
    device = torch.device("cuda", 1)
    vae: Any = random_vae(True, device).half()
    latent = torch.randn(1, 4, 24, 16, device=device, dtype=torch.float16)
    pixels = torch.randn(1, 3, 128, 64, device=device, dtype=torch.float16)
    for half, given in ((vae.decoder, latent), (vae.encoder, pixels)):
        expected = half(given)
        diffusers_vae.attach(half)
        with runtime.warming_up():
            for _ in range(2):
                half(given)
        with as_in_images():
            output = half(given)
        assert runtime.vae.status()["route"] == "ours", runtime.vae.status()["reason"]
        assert output.device == device and relative_error(output, expected) < 1e-2
        assert torch.cuda.current_device() == 0
        diffusers_vae.detach(half)
    assert runtime.guard.faults == []
