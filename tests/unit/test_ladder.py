"""The ladder of backends: if one fails, the next one serves, and the shape's entry in the runtime's table has the
reason. The backend may change from call to call.

There is no GPU here: the native backend has torch's operators, which fail if a test wants it, and the capture of a
graph fails, unless a test has pretended graphs. tests/gpu/test_bad_weather.py tests the same with the real backends.
"""
from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from graph_builders import PretendedGraphs
from ladder_builders import CUDAGRAPH, EAGER, NATIVE, StandInOperators, entry_of, error, reason, served_by, small_xl
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.table import State
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5


@pytest.fixture
def unet() -> nn.Module:
    return small_xl()


@pytest.mark.parametrize(
    "fault", [RuntimeError("CUDA error: an illegal\ninstruction"), NotImplementedError(), OSError(28, "no space left")],
    ids=lambda fault: type(fault).__name__,
)
def test_if_a_kernel_fails_the_next_backend_serves_the_call(
    unet: nn.Module, native_operators: StandInOperators, fault: Exception
) -> None:
    """The native backend's operators raise `fault`, and the backend cudagraph serves. The native backend is tried once
    more at the next call of the shape, and another shape still uses it once it works again."""
    native_operators.fail_with(fault)
    call = a_call(unet)
    assert error(unet, call) < CLOSE
    assert served_by() == ("cudagraph", "plain")
    native = entry_of(NATIVE)
    assert native.state is State.FAILED and "\n" not in native.reason
    assert native.reason.startswith("OneDiff's computation failed: ") and native.reason.endswith("(backend native)")
    assert (str(fault).splitlines() or [type(fault).__name__])[0] in native.reason
    assert reason() == native.reason, "the user sees why it is not native"
    for once_more in (True, False):
        tried = native_operators.calls
        assert error(unet, call) < CLOSE
        assert (native_operators.calls > tried) is once_more, "what failed twice is not tried again"
    native_operators.recover()
    assert error(unet, a_call(unet, 8, 16)) < CLOSE
    assert served_by()[0] == "native", "another shape has not failed"


def test_if_every_backend_fails_the_host_serves(
    unet: nn.Module, native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native backend's operators raise, and so do torch's, which all other backends use. The output equals
    diffusers' to the bit."""

    def broken(*given: Any) -> Tensor:
        raise RuntimeError("torch is broken too")

    native_operators.fail_with(RuntimeError("a kernel is broken"))
    monkeypatch.setattr(torch_ops, "gated", broken)
    call = a_call(unet)
    for _ in range(2):
        assert torch.equal(served(unet, call), diffusers_output(unet, call))
        assert served_by()[1] == "host"
        assert reason() == "OneDiff's computation failed: torch is broken too (backend cudagraph)"
    assert {entry.state for entry in runtime.table.entries()} == {State.FAILED}


def test_a_backend_whose_output_differs_from_that_of_diffusers_is_not_used_again(
    unet: nn.Module, native_operators: StandInOperators
) -> None:
    """The native backend leaves the gate out of the gated unit. The first call compares the outputs and returns
    diffusers'; the second is served by the next backend, whose output is compared too."""
    native_operators.gated_by = lambda tokens, unit, consumer: tokens.chunk(2, dim=-1)[0]
    call = a_call(unet)
    assert torch.equal(served(unet, call), diffusers_output(unet, call)), "the host's output is there anyway"
    assert served_by()[1] == "host" and reason().startswith("OneDiff's output differs too much from the one without ")
    assert entry_of(NATIVE).state is State.FAILED and entry_of(NATIVE).reason.endswith("(backend native)")
    assert error(unet, call) < CLOSE
    assert served_by() == ("cudagraph", "plain")
    assert entry_of(CUDAGRAPH).state is State.PROVED, "the next one is checked as well"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "VRAM ran out while the CUDA graph of this size was"),
        (RuntimeError("not permitted when stream is capturing"), "the graph could not be captured: not permitted"),
        (ValueError(), "the graph could not be captured: ValueError"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_if_the_capture_of_a_graph_raises_the_output_is_kept_and_the_status_has_the_reason(
    unet: nn.Module, native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch, fault: Exception, why: str
) -> None:
    """prepare(), which captures a graph after the output was computed, raises `fault`. It is tried once for a shape.
    why: the beginning of the reason."""
    attempts: list[Any] = []

    def fail(*arguments: Any) -> None:
        attempts.append(arguments)
        raise fault

    monkeypatch.setattr(runtime.services.holdings.made, "prepare", fail)
    call = a_call(unet)
    for _ in range(4):
        assert error(unet, call) < CLOSE
        assert served_by() == ("native", "plain")
    assert entry_of(NATIVE).no_graph.startswith(why) and reason() == entry_of(NATIVE).no_graph
    assert len(attempts) == 1, "a capture is tried once"


def test_out_of_memory_in_a_replay_frees_the_graphs_and_the_host_serves(
    unet: nn.Module, native_operators: StandInOperators, pretended: PretendedGraphs
) -> None:
    """The host serves this call only. Once there is memory again, our forward serves, and the graph is captured
    again."""
    full = False

    def replay() -> None:
        if full:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    pretended.before_replay = replay
    call = a_call(unet)
    for route in ("plain", "plain", "graph"):
        assert error(unet, call) < CLOSE
        assert served_by() == ("native", route)
    assert reason() == "" and entry_of(NATIVE).state is State.READY
    full = True
    assert torch.equal(served(unet, call), diffusers_output(unet, call))
    assert served_by()[1] == "host"
    assert entry_of(NATIVE).state is State.PROVED
    full = False
    for route in ("plain", "graph"):
        assert error(unet, call) < CLOSE
        assert served_by() == ("native", route)

# --- kernels ----------------------------------------------------------------------------------------------------------


def test_kernels_are_loaded_on_another_thread_when_a_unet_is_compiled(
    native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """prepare() loads the native backend's kernels. It does not run on the thread that compiles the UNet."""
    prepared: list[Any] = []
    monkeypatch.setattr(
        runtime.devices.named(NATIVE), "prepare",
        lambda network: prepared.append((network.dtype, threading.current_thread() is threading.main_thread())),
    )
    unet = small_xl()
    runtime.devices._worker.submit(lambda: None).result()
    assert prepared == [(unet.dtype, False)]


def test_if_the_kernels_cannot_be_loaded_the_next_backend_serves_and_the_unet_can_be_freed(
    native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneDiff keeps the reason, but not the exception, whose frames refer to the UNet."""

    def fails(*given: Any, **more: Any) -> None:
        raise RuntimeError("no image for this device\nand more")

    # pytest keeps log records, with their tracebacks.
    monkeypatch.setattr(logging.getLogger("onediff"), "disabled", True)
    monkeypatch.setattr(runtime.devices.named(NATIVE), "prepare", fails)
    unet = small_xl()
    for size in ((8, 8), (8, 8), (8, 16)):
        assert error(unet, a_call(unet, *size)) < CLOSE
        assert served_by() == ("cudagraph", "plain")
        assert reason() == "OneDiff's computation failed: no image for this device (backend native)"
    gone = weakref.ref(unet)
    lib_onediff.uncompile_unet(unet)
    del unet
    gc.collect()
    assert gone() is None


# --- turns ------------------------------------------------------------------------------------------------------------


def convolutions_are_stored_in(unet: nn.Module, memory_format: torch.memory_format) -> bool:
    convolutions = [module for module in unet.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    return all(module.weight.is_contiguous(memory_format=memory_format) for module in convolutions)


def test_the_backend_of_a_unet_may_change_between_calls(native_operators: StandInOperators) -> None:
    """All outputs are close to diffusers'. The native backend stores convolutions channels-last, the others contiguous.
    After uncompiling, the weights have their first values and memory format."""
    unet = diffusers_unet(**SMALL_XL)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    call = a_call(unet)
    expected = diffusers_output(unet, call)
    for backend in (NATIVE, CUDAGRAPH, EAGER, NATIVE, EAGER, CUDAGRAPH, NATIVE):
        lib_onediff.compile_unet(unet, backend=backend)
        assert relative_error(served(unet, call), expected) < CLOSE
        assert served_by()[0] == backend
        assert convolutions_are_stored_in(unet, torch.channels_last if backend == NATIVE else torch.contiguous_format)
    assert {entry.key.backend for entry in runtime.table.entries()} == {NATIVE, CUDAGRAPH, EAGER}
    lib_onediff.uncompile_unet(unet)
    for name, value in unet.state_dict().items():
        assert torch.equal(value, before[name]) and value.is_contiguous(), name


def test_weights_keep_their_memory_format_if_our_forward_and_the_host_alternate(
    native_operators: StandInOperators
) -> None:
    """The host serves calls with an argument of attention that our forward does not take. These calls must not change
    the memory format back, which would invalidate graphs: neither in a sampling that is announced
    (lib_onediff.sampling) nor outside of one."""
    unet = small_xl()
    call = a_call(unet)
    given = call.latent, call.timestep, call.context
    added = {"text_embeds": call.y, "time_ids": torch.empty(len(call.y), 0)}
    ours = {}
    # An argument that our forward does not take.
    hosts = {"cross_attention_kwargs": {"of_somebody": 1.0}}
    announced = lib_onediff.sampling(unet), (ours, hosts, hosts, ours)
    for sampling, calls in (announced, (contextlib.nullcontext(), (ours, hosts, ours, hosts))):
        with sampling, torch.no_grad():
            for others in calls:
                unet(*given, added_cond_kwargs=added, **others)
                assert served_by()[1] == ("host" if others else "plain")
                assert convolutions_are_stored_in(unet, torch.channels_last)
