"""The inductor backend, really compiled for the CPU: each part once, for every size, LoRA and checkpoint."""
from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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
    wrap_round,
)
from inductor_fixtures import without_our_files
from torch import nn

import lib_onediff
from lib_onediff.engines.inductor import compiler as backend_module
from lib_onediff.engines.inductor.compiler import Allowance, Inductor
from lib_onediff.model.call import UNetCall
from lib_onediff.ops import availability as inductor_availability
from lib_onediff.ops.availability import why_no_inductor
from lib_onediff.ops.inductor import artifact
from lib_onediff.ops.inductor import operators as inductor_ops
from lib_onediff.ops.inductor.compiled import CompiledRegion
from lib_onediff.ops.tuning_cache import TuningCache
from lib_onediff.runtime.runtime import runtime
from lib_onediff.store.history import History

CLOSE = 1e-5
NEW_TORCH = "2.13.0"
LACK = why_no_inductor(torch.device("cpu"))
needs_inductor = pytest.mark.skipif(LACK is not None, reason=LACK or "")

# As wide as the whole UNets of test_inductor_unets.py: what is compiled for these serves those.
ONE_LEVEL = {
    "block_out_channels": (32,), "layers_per_block": 1, "down_block_types": (ATTENTION_DOWN,),
    "up_block_types": (ATTENTION_UP,), "attention_head_dim": 4,
}
SMALL_SD1 = {**SD1, **ONE_LEVEL}
SMALL_SDXL = {**SDXL, **ONE_LEVEL, "transformer_layers_per_block": 2}
# Height, width, batch and tokens: never seen before, odd, and square.
LATER = [(8, 16, 2, 77), (45, 23, 2, 154), (8, 8, 3, 77), (23, 12, 1, 77), (9, 9, 1, 231)]


@pytest.fixture(scope="module")
def history(compilers_store: Path) -> History:
    """A store, as a WebUI has it."""
    history = History()
    history.open(compilers_store)
    return history


@pytest.fixture(scope="module")
def cache(history: History) -> Iterator[Path]:
    """A cache folder, and a runtime whose Inductor has compiled nothing yet."""
    tuning_cache = TuningCache()
    tuning_cache.attach(history.tuned, history.tune)
    with pytest.MonkeyPatch.context() as patch:
        folder = without_our_files(history.folder, patch)
        inductor = Inductor(runtime.operators.attention, helpers=0, tuning_cache=tuning_cache)
        patch.setattr(runtime.operators, "inductor", inductor)
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
    with runtime.wait_for_compile():
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
    wrap_round(unet)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(region: CompiledRegion, shapes: Any, path: Path, digest: str | None = None) -> None:
        raise OSError("No space left on device\nand more")

    monkeypatch.setattr(CompiledRegion, "compile", broken)
    # It would delete what the others have compiled, because its store knows nothing of that.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(runtime.operators.attention, helpers=0))
    unet = ours(SMALL_SD1)
    for size in (8, 16):
        call = a_call(unet, size)
        with runtime.wait_for_compile():
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
from lib_onediff.engines.inductor import compiler
from lib_onediff.runtime.runtime import runtime
from test_inductor import SMALL_SD1, a_call, check, ours
missing = []
compiler.compile_in_processes = lambda regions, most: missing.extend(regions)
unet = ours(SMALL_SD1, seed=5)
check(unet, a_call(unet, 10, 11))
from torch._dynamo.utils import counters
runtime.operators.inductor.finish()
assert not missing, missing
names = "frames", "inductor", "aot_autograd"
print(json.dumps([runtime.operators.inductor.operators.graphs(), {name: counters[name] for name in names}]))
"""


@needs_inductor
def test_the_next_process_reads_what_one_has_compiled(cache: Path, history: History) -> None:
    unet = ours(SMALL_SD1)
    check(unet, a_call(unet))
    history.commit()
    here = Path(__file__).parent
    folders = json.dumps([str(here.parents[1]), str(here)])
    finished = subprocess.run(
        [sys.executable, "-c", A_PROCESS, folders], capture_output=True, text=True, timeout=900,
        env={**os.environ, "ONEDIFF_CACHE": str(history.folder)},
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
        (NEW_TORCH, "mps", "OneDiff uses Inductor on CUDA and the CPU only, and this UNet is on the mps"),
    ],
)
def test_why_not(monkeypatch: pytest.MonkeyPatch, version: str, device: str, sentence: str) -> None:
    monkeypatch.setattr(inductor_availability.torch, "__version__", version)
    assert why_no_inductor(torch.device(device)) == sentence


def test_why_not_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor_availability.torch, "__version__", NEW_TORCH)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "CXX names 'no-such-compiler', which is not there" in str(why_no_inductor(torch.device("cpu")))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert "C++ compiler on the CPU" in str(why_no_inductor(torch.device("cpu")))


@needs_inductor
def test_a_machine_without_a_compiler_is_served_eagerly_and_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(helpers=0))
    monkeypatch.setenv("CXX", "no-such-compiler")
    unet = ours(SMALL_SD1)
    call = a_call(unet)
    assert relative_error(served(unet, call), diffusers_output(unet, call)) < CLOSE
    assert lib_onediff.status()["backend"] == "eager"
    assert "no-such-compiler" in lib_onediff.status()["reason"]


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


def full_disk() -> None:
    raise OSError("the disk is full")


def test_what_cannot_be_prepared_is_said_and_keeps_no_unet_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps what was logged, tracebacks included.
    monkeypatch.setattr(logging.getLogger("onediff"), "disabled", True)
    monkeypatch.setattr(runtime.operators, "inductor", Inductor(runtime.operators.attention, helpers=0))
    monkeypatch.setattr(backend_module, "why_no_inductor", lambda device: None)
    monkeypatch.setattr(backend_module, "import_compiler", full_disk)
    unet = ours(SMALL_SD1)
    for _ in range(2):
        with runtime.wait_for_compile():
            assert relative_error(served(unet, a_call(unet)), diffusers_output(unet, a_call(unet))) < CLOSE
        assert "the disk is full" in lib_onediff.status()["reason"]
    gone = weakref.ref(unet)
    lib_onediff.uncompile_unet(unet)
    del unet
    gc.collect()
    assert gone() is None
