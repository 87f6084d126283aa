"""Graphs on a real GPU, by the backend cudagraph or what auto takes here, against the model's own forward."""
from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, host

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.core.call import UNetCall
from lib_onediff.devices.cuda.graphs.capture import CudaGraphs
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error
from lib_onediff.weights.bound import BoundUNet

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
MIB = 2**20
HALF = (torch.float16, torch.bfloat16)


def ours(unet: nn.Module, given: dict[str, Any], calls: int = 3) -> Tensor:
    """The output of the last of several calls: plain, plain and then captured, replayed."""
    with torch.no_grad():
        for _ in range(calls):
            output = unet(**given, return_dict=False)[0]
    assert status()["route"] == "graph", status()["reason"]
    return output


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("name", "size"),
    [("sd15", (512, 512)), ("sd15", (72, 88)), ("sd15", (960, 720)), ("sd21", (768, 768)), ("sdxl", (1024, 1024)),
     ("sdxl", (960, 720)), ("sdxl", (896, 768)), ("sdxl", (720, 720)), ("sdxl", (1280, 1280))],
)
def test_no_farther_from_float32_than_the_host(name: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    unet = random_unet(name, torch.device("cuda")).to(dtype)
    given = inputs(unet, *size, 2, 77, dtype)
    own_host = host(unet, given)
    compile_unet(unet, backend="cudagraph")
    output = ours(unet, given)
    uncompile_unet(unet)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    unet.float()
    wide = {key: value.float() if isinstance(value, Tensor) else {k: v.float() for k, v in value.items()}
            for key, value in given.items()}
    exact = host(unet, wide)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    assert relative_error(output, exact) <= 1.1 * relative_error(own_host, exact)


def test_sizes_in_turn_share_a_pool_without_harm(tiny: nn.Module) -> None:
    sizes = [(128, 128), (72, 88), (256, 128), (240, 184)]
    calls = [arguments(tiny, *size) for size in sizes]
    expected = [host(tiny, given) for given in calls]
    compile_unet(tiny)
    for given in calls:
        ours(tiny, given)
    for _ in range(3):
        for given, reference in zip(calls, expected, strict=True):
            assert relative_error(ours(tiny, given, 1), reference) < 1e-2


def test_an_output_is_not_overwritten_by_the_next_replay(tiny: nn.Module) -> None:
    compile_unet(tiny)
    first_call, second_call = arguments(tiny), arguments(tiny)
    second_call["sample"] = torch.randn_like(second_call["sample"])
    first = ours(tiny, first_call)
    kept = first.clone()
    ours(tiny, second_call, 1)
    assert torch.equal(first, kept)


def test_prompts_in_turn_never_show_the_previous_one(tiny: nn.Module) -> None:
    compile_unet(tiny)
    given = arguments(tiny)
    contexts = [torch.randn_like(given["encoder_hidden_states"]) for _ in range(3)]
    ours(tiny, given)
    for context in [*contexts, *contexts]:
        given["encoder_hidden_states"] = context.clone()
        assert relative_error(ours(tiny, given, 1), host(tiny, given)) < 1e-2


def test_timesteps_and_latents_are_inputs_of_the_graph(tiny: nn.Module) -> None:
    compile_unet(tiny)
    given = arguments(tiny)
    ours(tiny, given)
    for step in (999.0, 500.5, 1.0):
        given["timestep"] = torch.tensor(step, device="cuda")
        given["sample"] = torch.randn_like(given["sample"])
        assert relative_error(ours(tiny, given, 1), host(tiny, given)) < 1e-2


def test_control_residuals_are_inputs_of_the_graph(tiny: nn.Module) -> None:
    given = arguments(tiny)
    shapes: list[torch.Size] = []
    hooks = [tiny.conv_in.register_forward_hook(lambda module, args, out: shapes.append(out.shape))]
    for block in tiny.down_blocks:
        hooks.append(block.register_forward_hook(lambda module, args, out: shapes.extend(o.shape for o in out[1])))
    hooks.append(tiny.mid_block.register_forward_hook(lambda module, args, out: shapes.append(out.shape)))
    host(tiny, given)
    for hook in hooks:
        hook.remove()
    compile_unet(tiny)
    for strength in (0.5, 2.0):
        residuals = [strength * torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes]
        controlled = {**given, "down_block_additional_residuals": tuple(residuals[:-1]),
                      "mid_block_additional_residual": residuals[-1]}
        assert relative_error(ours(tiny, controlled), host(tiny, controlled)) < 1e-2


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_by_data(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.data = parameter.data * 1.05


def change_by_parameter(unet: nn.Module) -> None:
    attention = next(module for module in unet.modules() if hasattr(module, "to_k"))
    for name in ("to_q", "to_k", "to_v"):
        linear = getattr(attention, name)
        linear.weight = nn.Parameter(linear.weight.detach() * 1.5, requires_grad=False)


def change_by_moving(unet: nn.Module) -> None:
    unet.cpu()
    occupied = [torch.randn_like(parameter, device="cuda") for parameter in unet.parameters()]
    unet.cuda()
    del occupied


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict({name: value * 0.95 for name, value in unet.state_dict().items()})


def change_every_parameter(unet: nn.Module) -> None:
    """As Forge puts a LoRA on: new parameters, in torch's usual memory format."""
    for module in unet.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.detach().clone(memory_format=torch.contiguous_format)
            module.weight = nn.Parameter(weight * 1.05, requires_grad=False)


def change_one_convolution(unet: nn.Module) -> None:
    convolution = unet.down_blocks[0].resnets[0].conv1
    convolution.weight = nn.Parameter(convolution.weight.detach() * 2, requires_grad=False)


@pytest.mark.parametrize("change", [
    change_in_place, change_by_data, change_by_parameter, change_every_parameter, change_one_convolution,
    change_by_moving, change_by_loading,
])
def test_changed_weights_are_never_replayed_stale(tiny: nn.Module, change: Any) -> None:
    compile_unet(tiny)
    given = arguments(tiny)
    ours(tiny, given)
    with torch.no_grad():
        change(tiny)
    # A pipeline makes a new context tensor for every picture.
    given["encoder_hidden_states"] = given["encoder_hidden_states"].clone()
    with torch.no_grad():
        assert relative_error(tiny(**given, return_dict=False)[0], host(tiny, given)) < 1e-2
    assert relative_error(ours(tiny, given, 2), host(tiny, given)) < 1e-2


def settle_workspaces() -> None:
    """Let cuBLAS allocate what it keeps for the capture stream as long as the process lives (32 MiB on Hopper)."""
    unet = random_unet("tiny-sdxl", torch.device("cuda")).half()
    compile_unet(unet)
    ours(unet, arguments(unet))
    uncompile_unet(unet)
    runtime.free_graphs()


def requested_bytes() -> int:
    """What is asked of the allocator now, without what it adds to fill its blocks."""
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_binding_sdxl_adds_less_than_64_mib_and_ten_cycles_leak_nothing() -> None:
    unet = random_unet("sdxl", torch.device("cuda")).half()
    given = arguments(unet, 256, 256)
    before = {name: value.clone().cpu() for name, value in unet.state_dict().items()}
    settle_workspaces()
    host(unet, given)
    gc.collect()
    torch.cuda.empty_cache()
    allocated, requested = torch.cuda.memory_allocated(), requested_bytes()
    torch.cuda.reset_peak_memory_stats()
    bound = BoundUNet(unet)
    bound.refresh(UNetCall(given["sample"], torch.zeros(2), given["encoder_hidden_states"]))
    assert torch.cuda.memory_allocated() - allocated < 64 * MIB
    assert torch.cuda.max_memory_allocated() - allocated < 64 * MIB
    bound.release()
    for _ in range(10):
        compile_unet(unet, backend="cudagraph")
        ours(unet, given)
        uncompile_unet(unet)
        runtime.free_graphs()
        assert requested_bytes() == requested
    for name, value in unet.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


def test_an_unloaded_unet_leaves_nothing_on_the_gpu(tiny: nn.Module) -> None:
    settle_workspaces()
    gc.collect()
    with_unet = torch.cuda.memory_allocated()
    own = sum(parameter.numel() * parameter.element_size() for parameter in tiny.parameters())
    other = random_unet("tiny-sdxl", torch.device("cuda")).half()
    compile_unet(other)
    ours(other, arguments(other))
    del other
    gc.collect()
    assert torch.cuda.memory_allocated() - with_unet < own / 10


def test_a_graph_that_cannot_be_captured_leaves_the_plain_route(tiny: nn.Module, monkeypatch: Any) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CudaGraphs, "prepare", refuse)
    given = arguments(tiny)
    expected = host(tiny, given)
    compile_unet(tiny)
    with torch.no_grad():
        for _ in range(3):
            output = tiny(**given, return_dict=False)[0]
    assert status()["route"] == "plain" and "could not be captured" in status()["reason"]
    assert relative_error(output, expected) < 1e-2


def test_a_really_failing_capture_leaves_the_gpu_usable(tiny: nn.Module, monkeypatch: Any) -> None:
    graphs = runtime.services.graphs._graphs
    original = graphs._output

    def waits_for_the_gpu(*args: Any) -> Tensor:
        output = original(*args)
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return output

    monkeypatch.setattr(graphs, "_output", waits_for_the_gpu)
    given = arguments(tiny)
    expected = host(tiny, given)
    compile_unet(tiny)
    with torch.no_grad():
        for _ in range(4):
            output = tiny(**given, return_dict=False)[0]
    assert status()["route"] == "plain", status()
    assert relative_error(output, expected) < 1e-2
    assert torch.randn(8, device="cuda").isfinite().all(), "random numbers work after a failed capture"


def test_out_of_memory_frees_the_graphs_and_the_picture_is_made(tiny: nn.Module) -> None:
    given = arguments(tiny, 1024, 1024, 4)
    expected = host(tiny, given)
    compile_unet(tiny)
    small = arguments(tiny)
    ours(tiny, small)
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 400 * MIB) / total)
    try:
        with torch.no_grad():
            outputs = [tiny(**given, return_dict=False)[0] for _ in range(3)]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(relative_error(output, expected) < 1e-2 for output in outputs)
    assert relative_error(ours(tiny, small), host(tiny, small)) < 1e-2


def test_twelve_sizes_share_their_memory() -> None:
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
        ours(unet, arguments(unet, *size))
    torch.cuda.synchronize()
    over = (torch.cuda.memory_reserved() - peak) / MIB
    print(f"twelve sizes: {over:.0f} MiB over the host's peak")
    assert over < 600
