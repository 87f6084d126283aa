"""Kernels are compiled in the background: the host serves meanwhile, and what does not compile is served otherwise."""
from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, relative_error, served
from ladder_builders import Weather, entry_of, error, now, reason, small_xl, steps_of_a_gpu

import lib_onediff
from lib_onediff import engines as backends
from lib_onediff.engines import NATIVE
from lib_onediff.engines.operator_sets import OperatorSets
from lib_onediff.runtime.runtime import runtime
from lib_onediff.shapes.table import State

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
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler, operators = Compiler(), OperatorSets(runtime.tuning_cache)
    monkeypatch.setitem(operators._made, NATIVE, Weather())
    monkeypatch.setattr(backends, "candidates", steps_of_a_gpu)
    monkeypatch.setattr(runtime, "operators", operators)
    monkeypatch.setattr(runtime._fallback, "_operators", operators)
    monkeypatch.setitem(
        sys.modules, "lib_onediff.ops.compile_kernels", SimpleNamespace(compile_kernels=compiler.compile_kernels)
    )
    return compiler


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(SECONDS * 100):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it took too long")


def settled(operators: OperatorSets) -> None:
    """Wait until the thread that compiles has nothing to do."""
    operators._worker.submit(lambda: None).result(SECONDS)


def test_the_host_serves_until_the_kernels_are_there(compiler: Compiler) -> None:
    unet = small_xl()
    call = a_call(unet)
    for _ in range(3):
        assert torch.equal(served(unet, call), diffusers_output(unet, call))
        assert now()[1] == "host" and "kernels are being compiled" in reason()
    assert entry_of(NATIVE).state is State.COLD, "nothing is wrong with the shape"
    compiler.may_end.set()
    settled(runtime.operators)
    assert error(unet, call) < CLOSE
    assert now() == ("native", "plain")
    assert compiler.networks == 1


def test_one_that_is_patient_waits_for_them(compiler: Compiler) -> None:
    unet = small_xl()
    call = a_call(unet)
    served(unet, call)
    assert now()[1] == "host"
    threading.Timer(0.2, compiler.may_end.set).start()
    with runtime.wait_for_compile():
        assert error(unet, call) < CLOSE
    assert now() == ("native", "plain")


def test_what_does_not_compile_is_served_by_the_next_backend(compiler: Compiler) -> None:
    compiler.fault = RuntimeError("ptxas died\nof this")
    compiler.may_end.set()
    unet = small_xl()
    call = a_call(unet)
    served(unet, call)
    settled(runtime.operators)
    for _ in range(2):
        assert error(unet, call) < CLOSE
        assert now() == ("cudagraph", "plain")
        assert reason() == entry_of(NATIVE).reason == "our forward failed: ptxas died (backend native)"
    assert error(unet, a_call(unet, 8, 16)) < CLOSE
    assert now() == ("cudagraph", "plain")
    assert compiler.networks == 1, "it is not tried again for every size"


def test_a_triton_that_cannot_be_imported(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(runtime.operators._made, NATIVE, raising=False)
    monkeypatch.setitem(sys.modules, "lib_onediff.ops.triton.operators", None)
    compiler.may_end.set()
    unet = small_xl()
    with runtime.wait_for_compile():
        assert error(unet, a_call(unet)) < CLOSE
    assert now() == ("cudagraph", "plain")
    assert "Triton cannot be imported" in reason()


def test_another_network_lives_on_when_one_does_not_compile(compiler: Compiler) -> None:
    compiler.fault = RuntimeError("ptxas died")
    compiler.may_end.set()
    first = small_xl()
    with runtime.wait_for_compile():
        served(first, a_call(first))
        assert now()[0] == "cudagraph"
        compiler.fault = None
        second = lib_onediff.compile_unet(diffusers_unet())
        assert error(second, a_call(second)) < CLOSE
        assert now() == ("native", "plain")


def test_two_threads_wait_for_one_compilation(compiler: Compiler) -> None:
    unets = [small_xl(), small_xl()]
    errors: list[float] = []

    def work(index: int) -> None:
        call = a_call(unets[index], seed=index)
        output = served(unets[index], call)
        errors.append(relative_error(output, diffusers_output(unets[index], call)))

    with runtime.wait_for_compile():
        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: compiler.networks == 1)
        compiler.may_end.set()
        for thread in threads:
            thread.join(SECONDS)
    assert len(errors) == 2 and max(errors) < CLOSE
    assert compiler.networks == 1


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
