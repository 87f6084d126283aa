"""Calls on two real GPUs: exactness, overlap, and what the second card follows. The second card is any other."""
from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, host
from test_pipelines import latents, pipeline

from lib_onediff import compile_pipe, compile_unet, status, uncompile_pipe, uncompile_unet
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = [
    pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed"),
]
SPLIT = "cuda:0 + cuda:1, 1+1 rows"
MIB = 2**20
# Of one value of an 8-bit image's 255, where a latent's are a few units wide.
LEVEL = 1 / 255


@pytest.fixture(autouse=True)
def wait_for_compile() -> Iterator[None]:
    """Not for whole tests: calls that wait for kernels are found out anew each time."""
    yield
    runtime.release_all()
    torch.cuda.set_device(0)


def second() -> dict[str, Any]:
    return status()["second_gpu"]


@torch.no_grad()
def call(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    return unet(**given, return_dict=False)[0]


def ready(unet: nn.Module, given: dict[str, Any], split: str = SPLIT, calls: int = 4) -> Tensor:
    """The output of a call that both cards replay."""
    with runtime.wait_for_compile():
        for _ in range(2):
            call(unet, given)
    for _ in range(calls):
        output = call(unet, given)
    assert second()["split"] == split, second()["reason"]
    assert status()["route"] == "graph", status()["reason"]
    return output


def widened(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.float() if isinstance(value, Tensor) else {key: one.float() for key, one in value.items()}
            for name, value in given.items()}


def in_float32(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """The model's own output in float32 without TF32, from the values as they are rounded."""
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dtype = next(unet.parameters()).dtype
    output = host(unet.float(), widened(given))
    unet.to(dtype)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    return output


@pytest.mark.parametrize(("name", "side", "backend"), [("sd15", 512, "native"), ("sdxl", 768, "cudagraph")])
def test_in_half_precision_no_farther_from_float32_than_the_host(name: str, side: int, backend: str) -> None:
    unet = random_unet(name, torch.device("cuda")).half()
    given = inputs(unet, side, side, 2, 77, torch.float16)
    own = host(unet, given)
    compile_unet(unet, second_gpu="auto", backend=backend)
    output = ready(unet, given)
    uncompile_unet(unet)
    exact = in_float32(unet, given)
    for row in range(2):
        assert relative_error(output[row], exact[row]) <= 1.1 * relative_error(own[row], exact[row])


@pytest.fixture
def no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 in float32, so that rounding differs little."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.usefixtures("no_tf32")
def test_in_float32_an_image_is_that_of_one_card_within_a_level() -> None:
    # With more guidance, a network of random weights makes another image of any rounding.
    size = {"width": 256, "height": 256, "num_inference_steps": 8, "guidance_scale": 2.0}
    options: dict[str, Any] = {"ignores": ("vae",), "backend": "cudagraph"}
    pipe = compile_pipe(pipeline("StableDiffusionXLPipeline", torch.float32), **options)
    one = latents(pipe, **size)
    compile_pipe(pipe, **options, second_gpu="1")
    latents(pipe, **size)
    two = latents(pipe, **size)
    assert second()["split"] == SPLIT, second()["reason"]
    assert float((two - one).abs().max()) <= LEVEL


def test_all_rows_of_a_batch_come_back_in_their_places(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    for batch, split in ((4, "cuda:0 + cuda:1, 2+2 rows"), (3, "cuda:0 + cuda:1, 2+1 rows")):
        given = arguments(tiny, batch=batch)
        output = ready(tiny, given, split)
        expected = host(tiny, given)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(batch))


def test_a_replay_waits_for_no_gpu_and_reads_each_call_s_inputs(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    ready(tiny, given)
    calls = [{**given, "sample": torch.randn_like(given["sample"])} for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [call(tiny, one) for one in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert second()["split"] == SPLIT and torch.cuda.current_device() == 0
    for output, one in zip(outputs, calls, strict=True):
        assert relative_error(output, host(tiny, one)) < 1e-2


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_by_data(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.data = parameter.data * 1.05


def change_every_parameter(unet: nn.Module) -> None:
    for module in unet.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.detach().clone(memory_format=torch.contiguous_format)
            module.weight = nn.Parameter(weight * 1.05, requires_grad=False)


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict({name: value * 0.95 for name, value in unet.state_dict().items()})


def change_by_moving(unet: nn.Module) -> None:
    unet.cpu()
    unet.cuda()


CHANGES = change_in_place, change_by_data, change_every_parameter, change_by_loading, change_by_moving


def test_changed_weights_are_never_replayed_stale(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    ready(tiny, given)
    for change in CHANGES:
        with torch.no_grad():
            change(tiny)
        # A pipeline makes a new context tensor for every image.
        given["encoder_hidden_states"] = given["encoder_hidden_states"].clone()
        for _ in range(3):
            output, expected = call(tiny, given), host(tiny, given)
            assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2)), change.__name__
        assert second()["split"] == SPLIT, second()["reason"]


def test_a_change_in_place_within_a_sampling_is_seen(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    ready(tiny, given)
    for _ in range(3):
        with torch.no_grad():
            change_in_place(tiny)
        output, expected = call(tiny, given), host(tiny, given)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2))


def test_another_checkpoint_and_unloading_leave_nothing_on_the_second_card(tiny: nn.Module) -> None:
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(1)

    other = random_unet("tiny-sd15", torch.device("cuda")).half()
    for unet in (tiny, other):
        compile_unet(unet, second_gpu="auto")
        given = arguments(unet)
        assert relative_error(ready(unet, given), host(unet, given)) < 1e-2
    weights = sum(parameter.nbytes for unet in (tiny, other) for parameter in unet.parameters())
    assert second()["bytes"] == weights and allocated() >= weights
    for unet in (tiny, other):
        uncompile_unet(unet)
    # What the matrix libraries keep for a stream stays.
    assert second()["bytes"] == 0 and allocated() < weights + 160 * MIB
    before = allocated()
    compile_unet(tiny, second_gpu="auto")
    ready(tiny, arguments(tiny))
    uncompile_unet(tiny)
    assert allocated() - before < MIB


def test_out_of_memory_on_the_second_card_leaves_one(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.two_gpus.cards, "room", lambda device: 2**50)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6, 1)
    given = arguments(tiny)
    try:
        compile_unet(tiny, second_gpu="auto")
        for _ in range(3):
            output = call(tiny, given)
        assert "out of memory on cuda:1" in second()["reason"] and second()["bytes"] == 0
        assert relative_error(output, host(tiny, given)) < 1e-2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)
    compile_unet(tiny, second_gpu="1")
    ready(tiny, given)


def test_a_full_second_card_is_told_before_anything_is_copied(tiny: nn.Module) -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6, 1)
    try:
        compile_unet(tiny, second_gpu="auto")
        call(tiny, arguments(tiny))
        call(tiny, arguments(tiny))
        assert "has room for" in second()["reason"]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 1)


def test_switched_off_in_the_middle_of_a_queue(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny)
    ready(tiny, given)
    compile_unet(tiny, second_gpu="off")
    outputs = [call(tiny, given) for _ in range(3)]
    expected = host(tiny, given)
    assert all(relative_error(output, expected) < 1e-2 for output in outputs)
    assert second()["split"] == "" and second()["bytes"] == 0
    compile_unet(tiny, second_gpu="auto")
    assert relative_error(ready(tiny, given), expected) < 1e-2


def test_residuals_of_a_controlnet_are_cut(tiny: nn.Module) -> None:
    given = arguments(tiny)
    shapes: list[torch.Size] = []
    hooks = [tiny.conv_in.register_forward_hook(lambda module, args, out: shapes.append(out.shape))]
    for block in tiny.down_blocks:
        hooks.append(block.register_forward_hook(lambda module, args, out: shapes.extend(o.shape for o in out[1])))
    hooks.append(tiny.mid_block.register_forward_hook(lambda module, args, out: shapes.append(out.shape)))
    host(tiny, given)
    for hook in hooks:
        hook.remove()
    compile_unet(tiny, second_gpu="auto")
    for strength in (0.5, 2.0):
        residuals = [strength * torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]
        controlled = {**given, "down_block_additional_residuals": tuple(residuals[:-1]),
                      "mid_block_additional_residual": residuals[-1]}
        output, expected = ready(tiny, controlled), host(tiny, controlled)
        assert all(relative_error(output[row], expected[row]) < 1e-2 for row in range(2))


@pytest.mark.usefixtures("no_tf32")
def test_deepcache_keeps_a_feature_on_each_card() -> None:
    # With less guidance, so few steps would be those of a few-step model, which DeepCache leaves alone.
    size = {"width": 256, "height": 256, "num_inference_steps": 10, "guidance_scale": 2.5}
    options: dict[str, Any] = {
        "ignores": ("vae",), "backend": "cudagraph", "deepcache_interval": 3, "deepcache_depth": 2,
    }
    pipe = pipeline("StableDiffusionXLPipeline", torch.float32)

    def drawn(**more: Any) -> Tensor:
        compile_pipe(pipe, **options, **more)
        for _ in range(3):
            output = latents(pipe, **size)
        return output

    one, two = drawn(), drawn(second_gpu="auto")
    assert second()["split"] == SPLIT, second()["reason"]
    before, replayed = status()["deepcache"], status()["calls"]["graph"]
    again = latents(pipe, **size)
    after = status()["deepcache"]
    assert (after["full"] - before["full"], after["cached"] - before["cached"]) == (5, 5)
    assert status()["calls"]["graph"] - replayed == 10
    assert float((two - one).abs().max()) <= LEVEL and float((again - two).abs().max()) <= LEVEL
    uncompile_pipe(pipe)


def test_a_call_of_one_row_has_one_card(tiny: nn.Module) -> None:
    compile_unet(tiny, second_gpu="auto")
    given = arguments(tiny, batch=1)
    assert relative_error(call(tiny, given), host(tiny, given)) < 1e-2
    assert second()["split"] == "" and "one row" in second()["reason"]
