"""Kernels are compiled in the background: the host serves meanwhile, and what does not compile is served otherwise.
Backends and weights may change from call to call."""
from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from ladder_builders import CUDAGRAPH, EAGER, NATIVE, Weather, entry_of, error, now, pretend_a_gpu, reason, small_xl
from torch import nn

import lib_onediff
from lib_onediff.core.table import State
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
SECONDS = 30


class Compiler:
    """In the place of the one that needs a GPU: takes as long, and ends as, a test wants."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.fault: Exception | None = None
        self.networks = 0

    def compile_kernels(self, *network: Any) -> None:
        self.networks += 1
        assert self.may_end.wait(SECONDS)
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler, native = Compiler(), runtime.devices.named(NATIVE)
    pretend_a_gpu(monkeypatch, Weather(), is_compiled=False)
    monkeypatch.setattr(native, "_compiling", {})
    monkeypatch.setitem(
        sys.modules, "lib_onediff.devices.cuda.tuning",
        SimpleNamespace(compile_kernels=compiler.compile_kernels),
    )
    yield compiler
    compiler.may_end.set()
    native._worker.submit(lambda: None).result()


def test_the_host_serves_until_the_kernels_are_there(compiler: Compiler) -> None:
    unet = small_xl()
    call = a_call(unet)
    for _ in range(3):
        assert torch.equal(served(unet, call), diffusers_output(unet, call))
        assert now()[1] == "host" and "kernels are being compiled" in reason()
    assert entry_of(NATIVE).state is State.COLD, "nothing is wrong with the shape"
    threading.Timer(0.2, compiler.may_end.set).start()
    with runtime.wait_for_compile():
        assert error(unet, call) < CLOSE
        assert now() == ("native", "plain"), "who is patient waits for them"
    assert error(unet, call) < CLOSE
    assert now() == ("native", "plain")
    assert compiler.networks == 1


def test_what_does_not_compile_is_served_by_the_next_backend(compiler: Compiler) -> None:
    compiler.fault = RuntimeError("ptxas died\nof this")
    compiler.may_end.set()
    unet = small_xl()
    call = a_call(unet)
    served(unet, call)
    runtime.devices.named(NATIVE)._worker.submit(lambda: None).result()
    for _ in range(2):
        assert error(unet, call) < CLOSE
        assert now() == ("cudagraph", "plain")
        assert reason() == entry_of(NATIVE).reason == "our forward failed: ptxas died (backend native)"
    assert error(unet, a_call(unet, 8, 16)) < CLOSE
    assert now() == ("cudagraph", "plain")
    assert compiler.networks == 1, "it is not tried again for every size"
    compiler.fault = None
    other = lib_onediff.compile_unet(diffusers_unet())
    with runtime.wait_for_compile():
        assert error(other, a_call(other)) < CLOSE
    assert now() == ("native", "plain"), "another network's kernels compile"


def test_a_triton_that_cannot_be_imported(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(runtime.devices.named(NATIVE)._made, NATIVE)
    monkeypatch.setitem(sys.modules, "lib_onediff.devices.cuda.low_bit.operators", None)
    compiler.may_end.set()
    unet = small_xl()
    with runtime.wait_for_compile():
        assert error(unet, a_call(unet)) < CLOSE
    assert now() == ("cudagraph", "plain")
    assert "Triton cannot be imported" in reason()


def test_what_does_not_compile_keeps_no_unet_alive(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest keeps what was logged, tracebacks included.
    monkeypatch.setattr(logging.getLogger("onediff"), "disabled", True)
    compiler.fault = RuntimeError("ptxas died")
    compiler.may_end.set()
    unet = small_xl()
    for waits_for_compile in (True, False):
        with runtime.wait_for_compile() if waits_for_compile else contextlib.nullcontext():
            assert error(unet, a_call(unet)) < CLOSE
        assert "ptxas died" in reason()
    gone = weakref.ref(unet)
    lib_onediff.uncompile_unet(unet)
    del unet
    gc.collect()
    assert gone() is None


def convolutions_lie(unet: nn.Module, memory_format: torch.memory_format) -> bool:
    convolutions = [module for module in unet.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    return all(module.weight.is_contiguous(memory_format=memory_format) for module in convolutions)


def test_backends_may_take_turns_between_calls(weather: Weather) -> None:
    unet = diffusers_unet(**SMALL_XL)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    call = a_call(unet)
    expected = diffusers_output(unet, call)
    for backend in (NATIVE, CUDAGRAPH, EAGER, NATIVE, EAGER, CUDAGRAPH, NATIVE):
        lib_onediff.compile_unet(unet, backend=backend)
        assert relative_error(served(unet, call), expected) < CLOSE
        assert now()[0] == backend
        assert convolutions_lie(unet, torch.channels_last if backend == NATIVE else torch.contiguous_format)
    assert {entry.key.backend for entry in runtime.table.entries()} == {NATIVE, CUDAGRAPH, EAGER}
    lib_onediff.uncompile_unet(unet)
    for name, value in unet.state_dict().items():
        assert torch.equal(value, before[name]) and value.is_contiguous(), name


def test_weights_do_not_move_where_we_and_the_host_take_turns_in_a_sampling(weather: Weather) -> None:
    unet = small_xl()
    call = a_call(unet)
    given = call.latent, call.timestep, call.context
    added = {"text_embeds": call.y, "time_ids": torch.empty(len(call.y), 0)}
    ours, hosts = {}, {"cross_attention_kwargs": {"of_somebody": 1.0}}
    announced = lib_onediff.sampling(unet), (ours, hosts, hosts, ours)
    for sampling, calls in (announced, (contextlib.nullcontext(), (ours, hosts, ours, hosts))):
        with sampling, torch.no_grad():
            for others in calls:
                unet(*given, added_cond_kwargs=added, **others)
                assert now()[1] == ("host" if others else "plain") and convolutions_lie(unet, torch.channels_last)
