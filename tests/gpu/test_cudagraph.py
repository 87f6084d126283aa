"""CUDA graphs on a real GPU, by the backend cudagraph or the automatically chosen one: their outputs are compared with
the model's own forward."""
from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, host, last_call, residual_shapes

from lib_onediff.bench.models import random_unet
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.public import compile_unet, uncompile_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error
from lib_onediff.weights.bound import BoundNetwork

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
MIB = 2**20


def replayed(unet: nn.Module, given: dict[str, Any], calls: int = 3) -> Tensor:
    """The output of the last of several calls, which must be replayed. Of the three calls by default, the first two run
    without a graph, which is captured after the second."""
    with torch.no_grad():
        for _ in range(calls):
            output = unet(**given, return_dict=False)[0]
    assert last_call()["route"] == "graph", last_call()["reason"]
    return output


def test_each_replay_reads_the_inputs_of_its_call_and_changes_no_earlier_output(tiny: nn.Module) -> None:
    """Calls with and without residuals of a ControlNet alternate. A graph has its inputs and outputs at fixed
    addresses: without copies, a replay would compute with old inputs, or overwrite an output that the caller still
    has."""
    given = arguments(tiny)
    shapes = residual_shapes(tiny, given)
    compile_unet(tiny)
    kept: list[tuple[Tensor, Tensor]] = []
    for step in (999.0, 500.5, 1.0):
        given = {name: torch.randn_like(value) if isinstance(value, Tensor) and value.dim() else value
                 for name, value in given.items()}
        given["timestep"] = torch.tensor(step, device="cuda")
        residuals = [torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]
        controlled = {**given, "down_block_additional_residuals": tuple(residuals[:-1]),
                      "mid_block_additional_residual": residuals[-1]}
        for one in (given, controlled):
            output = replayed(tiny, one)
            assert relative_error(output, host(tiny, one)) < 1e-2
            kept.append((output, output.clone()))
    assert all(torch.equal(output, copy) for output, copy in kept), "a later replay has written to an output"


@torch.no_grad()
def change_by_moving(unet: nn.Module) -> None:
    """Move the weights to other addresses, with other values."""
    unet.cpu()
    occupied = [torch.randn_like(parameter, device="cuda") for parameter in unet.parameters()]
    unet.cuda()
    del occupied
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def test_weights_that_were_moved_and_edited_take_effect_at_the_next_call(tiny: nn.Module) -> None:
    """The weights move to the CPU and back to other addresses, and are multiplied by 1.05. A graph that is kept would
    read the old addresses. For other edits, see test_edits_replayed.py."""
    compile_unet(tiny)
    given = arguments(tiny)
    replayed(tiny, given)
    change_by_moving(tiny)
    with torch.no_grad():
        assert relative_error(tiny(**given, return_dict=False)[0], host(tiny, given)) < 1e-2
    assert relative_error(replayed(tiny, given, 2), host(tiny, given)) < 1e-2


def settle_workspaces() -> None:
    """Let cuBLAS allocate its workspace for the capture stream, which it keeps until the process ends (32 MiB on
    Hopper)."""
    unet = random_unet("tiny-sdxl", torch.device("cuda")).half()
    compile_unet(unet)
    replayed(unet, arguments(unet))
    uncompile_unet(unet)
    runtime.release_memory()


def requested_bytes() -> int:
    """The bytes requested from the allocator, without its rounding."""
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_binding_sdxl_adds_less_than_64_mib_and_ten_compilations_leak_nothing() -> None:
    """Binding prepares a UNet's weights for our forward: those that one product multiplies are joined, without a second
    copy. After each of ten rounds of compile_unet(), calls and uncompile_unet(), as many bytes are allocated as before
    the first; in the end, the weights are the same to the bit."""
    unet = random_unet("sdxl", torch.device("cuda")).half()
    given = arguments(unet, 256, 256)
    before = {name: value.clone().cpu() for name, value in unet.state_dict().items()}
    settle_workspaces()
    host(unet, given)
    gc.collect()
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated()
    requested = requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    bound = BoundNetwork(unet, FAMILIES.read)
    bound.refresh(UNetCall(given["sample"], torch.zeros(2), given["encoder_hidden_states"]))
    assert torch.cuda.memory_allocated() - allocated < 64 * MIB
    assert torch.cuda.max_memory_allocated() - allocated < 64 * MIB
    bound.release()
    for _ in range(10):
        compile_unet(unet, backend="cudagraph")
        replayed(unet, given)
        uncompile_unet(unet)
        runtime.release_memory()
        assert requested_bytes() == requested
    for name, value in unet.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


def test_the_graphs_of_twelve_sizes_share_memory() -> None:
    """The graphs of twelve common sizes of SDXL together need less than 600 MiB above the peak of the host's own
    forward. Graphs that do not share memory would need several GiB."""
    unet = random_unet("sdxl", torch.device("cuda")).half()
    sizes = [(1024, 1024), (832, 1216), (1216, 832), (896, 1152), (1152, 896), (768, 1344), (1344, 768), (640, 1536),
             (1536, 640), (960, 720), (1280, 1280), (512, 512)]
    settle_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    host(unet, arguments(unet, 1280, 1280))
    peak = torch.cuda.max_memory_reserved()
    compile_unet(unet)
    for size in sizes:
        replayed(unet, arguments(unet, *size))
    torch.cuda.synchronize()
    over = (torch.cuda.memory_reserved() - peak) / MIB
    print(f"twelve sizes: {over:.0f} MiB over the host's peak")
    assert over < 600


def test_a_precision_switch_that_changes_between_calls_takes_effect_at_the_next_one() -> None:
    """allow_tf32 is switched off after a graph was captured with it. The next output must be within 1e-5 of the host's
    in full float32; a replay of the graph would still use TF32, which keeps only ten bits of each factor."""
    unet = random_unet("tiny-sdxl", torch.device("cuda")).float()
    found = torch.backends.cuda.matmul.allow_tf32
    given = {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments(unet).items()
    }
    compile_unet(unet, backend="cudagraph")
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        replayed(unet, given)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        with torch.no_grad():
            output = unet(**given, return_dict=False)[0]
        assert relative_error(output, host(unet, given)) < 1e-5
    finally:
        torch.backends.cuda.matmul.allow_tf32 = found
        torch.backends.cudnn.allow_tf32 = True
