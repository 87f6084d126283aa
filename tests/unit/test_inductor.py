"""The inductor backend, really compiled for the CPU: each part once, for every size, LoRA and checkpoint."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from builders import (
    ATTENTION_DOWN,
    ATTENTION_UP,
    SD1,
    SDXL,
    a_call,
    diffusers_output,
    diffusers_unet,
    relative_error,
    served,
)
from torch import nn

import lib_onediff
from lib_onediff.accelerator import runtime
from lib_onediff.backends import inductor as backend_module
from lib_onediff.backends import inductor_cache, inductor_helper
from lib_onediff.backends.inductor import Allowance, Inductor
from lib_onediff.backends.inductor_cache import path_of
from lib_onediff.backends.inductor_helper import compile_in_processes
from lib_onediff.ops import artifact, inductor_availability, inductor_ops
from lib_onediff.ops.compiled import CompiledRegion
from lib_onediff.ops.inductor_availability import why_no_inductor
from lib_onediff.ops.inductor_ops import InductorOperators, channels_last, image_of, pixels
from lib_onediff.ops.regions import ADDITION, Region, Shapes, group_norm, layer_norm, region_for
from lib_onediff.unet.call import UNetCall

CLOSE = 1e-5
LACK = why_no_inductor(torch.device("cpu"))
needs_inductor = pytest.mark.skipif(LACK is not None, reason=LACK or "")

ONE_LEVEL = {
    "block_out_channels": (16,), "layers_per_block": 1, "down_block_types": (ATTENTION_DOWN,),
    "up_block_types": (ATTENTION_UP,), "attention_head_dim": 2,
}
SMALL_SD1 = {**SD1, **ONE_LEVEL}
SMALL_SDXL = {**SDXL, **ONE_LEVEL, "transformer_layers_per_block": 2}
# Height, width, batch and tokens: never seen before, odd, and square.
LATER = [(8, 16, 2, 77), (45, 23, 2, 154), (8, 8, 3, 77), (23, 12, 1, 77), (9, 9, 1, 231)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder, and a runtime whose Inductor has compiled nothing yet."""
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.setattr(runtime.operators, "inductor", Inductor(runtime.operators.attention, helpers=0))
        yield folder
        runtime.operators.inductor.finish()


@pytest.fixture
def graphs(cache: Path) -> Iterator[None]:
    """What was compiled fitted every call."""
    before = refused()
    yield
    assert refused() == before


def ours(config: dict[str, Any], seed: int = 0) -> nn.Module:
    return lib_onediff.compile_unet(diffusers_unet(seed, **config), backend="inductor")


def check(unet: nn.Module, call: UNetCall) -> None:
    with runtime.patience():
        output = served(unet, call)
    assert relative_error(output, diffusers_output(unet, call)) < CLOSE
    status = lib_onediff.status()
    assert (status["backend"], status["route"], status["reason"]) == ("inductor", "plain", "")


def count() -> int:
    runtime.operators.inductor.finish()
    return runtime.operators.inductor.operators.graphs()


def refused() -> int:
    return lib_onediff.status()["inductor"]["refused"]


@needs_inductor
def test_the_host_serves_until_it_is_compiled_and_nothing_is_compiled_for_later_sizes(graphs: None) -> None:
    unet = ours(SMALL_SD1)
    call = a_call(unet, 12, 10)
    assert torch.equal(served(unet, call), diffusers_output(unet, call))
    assert lib_onediff.status()["route"] == "host"
    assert "in the background" in lib_onediff.status()["reason"]
    check(unet, call)
    check(unet, a_call(unet, 12, 10, batch=1))
    before = count()
    assert before > 0
    for number, (height, width, batch, tokens) in enumerate(LATER):
        check(unet, a_call(unet, height, width, batch, tokens, seed=number))
    assert count() == before


@needs_inductor
def test_a_lora_and_another_checkpoint_compile_nothing(graphs: None) -> None:
    unet, other = ours(SMALL_SD1), ours(SMALL_SD1, seed=7)
    check(unet, a_call(unet))
    before = count()
    with torch.no_grad():
        for module in unet.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight += 0.1 * torch.randn_like(module.weight)
    check(unet, a_call(unet, seed=1))
    for module in unet.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            module.weight = nn.Parameter(module.weight.detach() * 1.1)
    check(unet, a_call(unet, seed=2))
    check(other, a_call(other, seed=3))
    assert count() == before


@needs_inductor
def test_no_call_is_the_hosts_where_another_network_has_left_nothing_to_do(graphs: None) -> None:
    unet = ours(SMALL_SD1)
    for batch in (2, 1):
        check(unet, a_call(unet, batch=batch))
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
    call = a_call(unet)
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < CLOSE
    status = lib_onediff.status()
    assert (status["backend"], status["route"], status["reason"]) == ("inductor", "plain", "")


@needs_inductor
def test_a_network_of_another_layout_shares_what_it_has_alike(graphs: None) -> None:
    unet = ours(SMALL_SD1)
    for batch in (2, 1):
        check(unet, a_call(unet, batch=batch))
    before = count()
    sdxl = ours(SMALL_SDXL)
    for height, width, batch, tokens in LATER:
        check(sdxl, a_call(sdxl, height, width, batch, tokens))
    assert count() == before


@needs_inductor
def test_tensors_of_inference_mode(graphs: None) -> None:
    with torch.inference_mode():
        unet = diffusers_unet(**SMALL_SD1)
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
    lib_onediff.compile_unet(unet, backend="inductor")
    ordinary = ours(SMALL_SD1)
    check(ordinary, a_call(ordinary))
    before = count()
    with torch.inference_mode():
        check(unet, a_call(unet))
    assert count() == before


@needs_inductor
def test_an_image_of_one_pixel_is_computed_without_the_compiler(graphs: None) -> None:
    unet = ours(SMALL_SD1)
    for batch in (2, 1):
        check(unet, a_call(unet, batch=batch))
    before = count()
    check(unet, a_call(unet, 1, 1, batch=1))
    check(unet, a_call(unet, 1, 8))
    assert count() == before


@needs_inductor
def test_what_would_be_compiled_anew_is_counted_says_which_guard_and_is_served_otherwise(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unet = ours(SMALL_SD1)
    for batch in (2, 1):
        check(unet, a_call(unet, batch=batch))
    before, fitted = count(), refused()
    monkeypatch.setattr(inductor_ops, "too_small", lambda region, tensors: False)
    call = a_call(unet, 1, 1)
    output = served(unet, call)
    assert relative_error(output, diffusers_output(unet, call)) < CLOSE
    status = lib_onediff.status()
    assert status["backend"] == "eager"
    assert "anew" in status["reason"] and "2 <= " in status["reason"], status["reason"]
    assert (count(), refused()) == (before, fitted + 1)


@needs_inductor
def test_what_cannot_be_compiled_is_served_by_the_next_backend(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(region: CompiledRegion, shapes: Any, path: Path) -> None:
        raise OSError("No space left on device\nand more")

    monkeypatch.setattr(CompiledRegion, "compile", broken)
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(runtime.operators.attention, helpers=0))
    unet = ours(SMALL_SD1)
    for size in (8, 16):
        call = a_call(unet, size)
        with runtime.patience():
            assert relative_error(served(unet, call), diffusers_output(unet, call)) < CLOSE
        status = lib_onediff.status()
        assert (status["backend"], status["route"]) == ("eager", "plain")
        assert "Inductor could not compile its group norm: No space left on device" in status["reason"]


A_PROCESS = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import lib_onediff, torch
assert "torch._dynamo" not in sys.modules, "importing OneDiff is slow"
torch.set_num_threads(1)
from test_inductor import SMALL_SD1, a_call, check, ours
unet = ours(SMALL_SD1, seed=5)
check(unet, a_call(unet, 10, 11))
from torch._dynamo.utils import counters
from lib_onediff.accelerator import runtime
runtime.operators.inductor.finish()
names = "frames", "inductor", "aot_autograd"
print(json.dumps([runtime.operators.inductor.operators.graphs(), {name: counters[name] for name in names}]))
"""


@needs_inductor
def test_the_next_process_reads_what_one_has_compiled(cache: Path) -> None:
    unet = ours(SMALL_SD1)
    check(unet, a_call(unet))
    here = Path(__file__).parent
    folders = json.dumps([str(here.parents[1]), str(here)])
    finished = subprocess.run(
        [sys.executable, "-c", A_PROCESS, folders], capture_output=True, text=True, timeout=900,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    assert finished.returncode == 0, finished.stderr
    number, counters = json.loads(finished.stdout.splitlines()[-1])
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    read = max(inductor.get("fxgraph_cache_hit", 0), autograd.get("autograd_cache_hit", 0))
    assert read == number > 0 and not inductor.get("fxgraph_cache_miss"), counters
    if artifact.are_possible():
        assert not counters["frames"], "something was traced"


@pytest.mark.parametrize(
    ("version", "device", "sentence"),
    [
        ("2.3.1+cu121", "cpu", "Inductor needs torch 2.4 or newer, and this is torch 2.3.1+cu121"),
        (None, "mps", "OneDiff uses Inductor on CUDA and the CPU only, and this UNet is on the mps"),
    ],
)
def test_why_not(monkeypatch: pytest.MonkeyPatch, version: str | None, device: str, sentence: str) -> None:
    if version:
        monkeypatch.setattr(inductor_availability.torch, "__version__", version)
    assert why_no_inductor(torch.device(device)) == sentence


def test_why_not_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX names 'no-such-compiler', which is not there" in str(why_no_inductor(torch.device("cpu")))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "C++ compiler on the CPU" in str(why_no_inductor(torch.device("cpu")))


def test_a_machine_without_a_compiler_is_served_eagerly_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(helpers=0))
    monkeypatch.setenv("CXX", "no-such-compiler")
    unet = ours(SMALL_SD1)
    call = a_call(unet)
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < CLOSE
    assert lib_onediff.status()["backend"] == "eager"
    assert "no-such-compiler" in lib_onediff.status()["reason"]


@pytest.mark.parametrize("shape", [(2, 16, 9, 5), (1, 16, 9, 5), (1, 16, 1, 1), (3, 16, 1, 4)])
def test_pixels_lie_as_compiled_code_was_told(shape: tuple[int, ...]) -> None:
    image = torch.randn(shape)
    batch, channels, height, width = shape
    again = pixels(channels_last(image))
    assert again.stride() == (channels * height * width, channels, 1)
    assert torch.equal(image_of(again, image), image)


@pytest.mark.parametrize("width", [320, 1031])
def test_a_layer_norm_with_what_is_owed(width: int) -> None:
    tokens, owed, weight, bias = torch.randn(7, width), torch.randn(width), torch.randn(width), torch.randn(width)
    settled, normed = layer_norm(tokens, owed, weight, bias, 1e-5)
    expected = functional.layer_norm((tokens + owed).double(), (width,), weight.double(), bias.double(), 1e-5)
    assert torch.equal(settled, tokens + owed)
    assert relative_error(normed, expected.float()) < 1e-6


@pytest.mark.parametrize("shifted", [False, True])
def test_a_group_norm_by_channels_keeps_its_digits_far_from_zero(shifted: bool) -> None:
    pixel, weight, bias = torch.randn(2, 35, 64) + 1000, torch.randn(64), torch.randn(64)
    shift = torch.randn(2, 64) * 10 * shifted
    image = pixel.double() + shift.double()[:, None]
    expected = functional.group_norm(image.transpose(1, 2), 32, weight.double(), bias.double(), 1e-5).transpose(1, 2)
    normed = group_norm(pixel, shift, weight, bias, 32, 1e-5, False)
    assert relative_error(normed, expected.float()) < 1e-3


@pytest.mark.parametrize(("size", "wanted"), [((3, 5), (6, 10)), ((3, 5), (5, 9)), ((3, 5), (6, 9)), ((1, 4), (2, 8))])
def test_resize(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    image = torch.randn(2, 7, *size)
    assert torch.equal(InductorOperators().resize(image, *wanted), functional.interpolate(image, wanted))


def test_work_between_steps_takes_its_share_of_the_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(backend_module.time, "perf_counter", lambda: now)
    allowance = Allowance(0.1)

    def work() -> None:
        nonlocal now
        now += 0.25

    steps = worked = 0
    while worked < 8:
        now, steps = now + 0.5, steps + 1
        allowance.step()
        while not allowance.is_spent:
            allowance.spend(work)
            worked += 1
    assert 0.25 * worked <= 0.1 * 0.5 * steps + 0.25
    # A long halt saves nothing up but one step.
    now += 3600
    allowance.step()
    allowance.spend(work)
    allowance.spend(work)
    allowance.spend(work)
    assert allowance.is_spent


@needs_inductor
def test_what_was_deleted_before_it_was_read_is_compiled_by_others_again(
    empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def compile_elsewhere(missing: inductor_helper.Share, most: int) -> None:
        asked.append(len(missing))
        for region, shapes in missing:
            artifact.write(path_of(region, shapes), "")

    def compile_here(compiled: CompiledRegion, shapes: Shapes) -> None:
        pytest.fail("a call has compiled")

    monkeypatch.setattr(backend_module, "compile_in_processes", compile_elsewhere)
    monkeypatch.setattr(backend_module, "compile_region", compile_here)
    inductor = Inductor(runtime.operators.attention, helpers=1)
    monkeypatch.setattr(runtime.operators, "inductor", inductor)
    monkeypatch.setattr(inductor, "_allowance", Allowance(0.0))
    unet = ours(SMALL_SD1)
    for purged in (False, True):
        served(unet, a_call(unet))
        inductor.finish()
        if purged:
            for file in inductor_cache.folder().iterdir():
                file.unlink()
        assert lib_onediff.status()["route"] == "host"
    served(unet, a_call(unet))
    inductor.finish()
    batches, singles, again = asked
    assert again == batches > singles


Addition = tuple[Region, Shapes, tuple[torch.Tensor, ...]]


def an_addition(width: int = 16) -> Addition:
    """A small region, and inputs for it."""
    inputs = torch.randn(6, width), torch.randn(6, width), torch.randn(width)
    return region_for(ADDITION, inputs), tuple(tuple(tensor.shape) for tensor in inputs), inputs


def check_what_is_compiled(region: Region, shapes: Shapes, inputs: tuple[torch.Tensor, ...]) -> None:
    compiled = CompiledRegion(region)
    compiled.compile(shapes, path_of(region, shapes))
    assert relative_error(compiled(*inputs), sum(inputs)) < CLOSE


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on the disk yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@needs_inductor
def test_copies_of_a_process_compile_what_this_one_reads(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_helper, "REGIONS_FOR_A_HELPER", 1)
    additions = [an_addition(width) for width in (16, 24)]
    compile_in_processes([(region, shapes) for region, shapes, _ in additions], most=2)
    for addition in additions:
        assert path_of(*addition[:2]).exists()
        check_what_is_compiled(*addition)


def test_what_another_version_has_compiled_is_not_read(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    region, shapes, _ = an_addition()
    before = path_of(region, shapes)
    monkeypatch.setattr(inductor_cache, "SOURCES", inductor_cache.SOURCES + b"# changed")
    after = path_of(region, shapes)
    assert before.name == after.name and before != after


@needs_inductor
def test_code_on_the_disk_that_is_damaged_is_compiled_anew(empty: None) -> None:
    addition = an_addition()
    path = path_of(*addition[:2])
    check_what_is_compiled(*addition)
    files = list(path.parent.iterdir())
    assert path in files and {file.name for file in files} <= {path.name, path.name + artifact.CODE}, "one is not whole"
    for file in files:
        file.write_bytes(b"{}")
    check_what_is_compiled(*addition)
