"""The native backend on a real GPU: whole UNets against the model's own forward."""
from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.bench.clock import count_compilations
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.runtime.runtime import runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = [(512, 512), (960, 720), (72, 88)]
WORST_RATIO = 1.1
CLOSE = 1e-2
GIB = 2**30


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    runtime.purge()
    yield
    runtime.free_graphs()


@pytest.fixture
def tiny() -> nn.Module:
    return random_unet("tiny-sdxl", torch.device("cuda")).half()


def arguments(unet: nn.Module, width: int = 128, height: int = 128, batch: int = 2, tokens: int = 77) -> dict[str, Any]:
    return inputs(unet, width, height, batch, tokens, next(unet.parameters()).dtype)


@torch.no_grad()
def host(unet: nn.Module, given: dict[str, Any]) -> Tensor:
    return type(unet).forward(unet, **given, return_dict=False)[0]


@torch.no_grad()
def ours(unet: nn.Module, given: dict[str, Any], calls: int = 3, backend: str = "native") -> Tensor:
    """The output of the last of several calls: plain, plain and captured afterwards, replayed."""
    for _ in range(calls):
        output = unet(**given, return_dict=False)[0]
    assert status()["backend"] == backend, status()["reason"]
    assert status()["route"] == ("plain" if backend == "eager" else "graph"), status()["reason"]
    return output


def wide(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float32."""
    return {
        name: value.float() if isinstance(value, Tensor) else {part: inner.float() for part, inner in value.items()}
        for name, value in given.items()
    }


def needs_memory(gibibytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_no_farther_from_float32_than_the_host(name: str, dtype: torch.dtype) -> None:
    needs_memory(20)
    unet = random_unet(name, torch.device("cuda")).to(dtype)
    # One small picture's rounding errors happen to add up or not: many of them do not.
    calls = [arguments(unet, *size, batch=2 if min(size) > 100 else 16) for size in SIZES]
    hosts = [host(unet, given) for given in calls]
    compile_unet(unet, backend="native")
    outputs = [ours(unet, given) for given in calls]
    uncompile_unet(unet)
    unet.float()
    for size, given, own, output in zip(SIZES, calls, hosts, outputs, strict=True):
        exact = host(unet, wide(given))
        mine, theirs = relative_error(output, exact), relative_error(own, exact)
        print(f"{name} {size} {dtype}: {mine:.2e}, the host {theirs:.2e}")
        assert mine <= WORST_RATIO * theirs, size


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("name", ["tiny-sd15", "tiny-sdxl"])
def test_float32_is_the_hosts_to_rounding(name: str) -> None:
    unet = random_unet(name, torch.device("cuda"))
    given = arguments(unet, 72, 88)
    expected = host(unet, given)
    compile_unet(unet, backend="native")
    assert relative_error(ours(unet, given), expected) < 5e-5


def test_auto_is_native_here(tiny: nn.Module) -> None:
    compile_unet(tiny)
    given = arguments(tiny)
    assert relative_error(ours(tiny, given), host(tiny, given)) < CLOSE


@triton.jit
def fill(target, value, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK), value)


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_no_kernel_is_compiled_again_for_another_size(name: str) -> None:
    unet = random_unet(name, torch.device("cuda")).half()
    compile_unet(unet, backend="native", verify=False)
    ours(unet, arguments(unet, 512, 512))
    with count_compilations() as counted:
        for size in ((768, 512), (960, 720), (72, 88), (1024, 1024), (64, 64), (1280, 768), (40, 24)):
            ours(unet, arguments(unet, *size))
        for batch, tokens in ((1, 77), (3, 154), (4, 231)):
            ours(unet, arguments(unet, 520, 520, batch, tokens))
    assert counted.count == 0
    with count_compilations() as counted:
        # Another kernel for each network: it is compiled once in a process.
        block = 16 if name == "sd15" else 32
        fill[(1,)](torch.zeros(block, device="cuda"), 1.0, block)
    assert counted.count == 1, "otherwise nothing would have been counted above either"


def test_sizes_in_turn_share_a_pool_without_harm(tiny: nn.Module) -> None:
    calls = [arguments(tiny, *size) for size in ((128, 128), (72, 88), (256, 128), (240, 184))]
    expected = [host(tiny, given) for given in calls]
    compile_unet(tiny, backend="native")
    for given in calls:
        ours(tiny, given)
    for _ in range(3):
        for given, reference in zip(calls, expected, strict=True):
            assert relative_error(ours(tiny, given, 1), reference) < CLOSE


def test_inputs_of_the_graph_change_between_calls(tiny: nn.Module) -> None:
    compile_unet(tiny, backend="native")
    given = arguments(tiny)
    ours(tiny, given)
    for step in (999.0, 500.5, 1.0):
        given["timestep"] = torch.tensor(step, device="cuda")
        given["sample"] = torch.randn_like(given["sample"])
        given["encoder_hidden_states"] = torch.randn_like(given["encoder_hidden_states"])
        ours(tiny, given, 2)
        assert relative_error(ours(tiny, given, 1), host(tiny, given)) < CLOSE


def test_released_weights_are_what_they_were(tiny: nn.Module) -> None:
    before = {name: value.clone() for name, value in tiny.state_dict().items()}
    compile_unet(tiny, backend="native")
    ours(tiny, arguments(tiny))
    uncompile_unet(tiny)
    for name, parameter in tiny.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.is_contiguous(), name
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size(), name


def requested_bytes() -> int:
    """What is asked of the allocator now, without what it adds to fill its blocks."""
    gc.collect()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def test_backends_take_turns_without_harm_or_leak(tiny: nn.Module) -> None:
    given = arguments(tiny)
    expected = host(tiny, given)
    sizes: list[int] = []
    for _ in range(4):
        for backend in ("native", "cudagraph", "eager", "native"):
            compile_unet(tiny, backend=backend)
            assert relative_error(ours(tiny, given, backend=backend), expected) < CLOSE
        uncompile_unet(tiny)
        runtime.purge()
        sizes.append(requested_bytes())
    # What the libraries allocate once for all is there after the first round.
    assert sizes[1:] == sizes[1:2] * 3


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_by_data(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.data = parameter.data * 1.05


def change_by_parameter(unet: nn.Module) -> None:
    """As Forge puts a LoRA on: new parameters, in torch's usual memory format."""
    for module in unet.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight.detach().clone(memory_format=torch.contiguous_format)
            module.weight = nn.Parameter(weight * 1.05, requires_grad=False)


def change_one_convolution(unet: nn.Module) -> None:
    convolution = unet.down_blocks[0].resnets[0].conv1
    convolution.weight = nn.Parameter(convolution.weight.detach() * 2, requires_grad=False)


def change_by_moving(unet: nn.Module) -> None:
    unet.cpu()
    occupied = [torch.randn_like(parameter, device="cuda") for parameter in unet.parameters()]
    unet.cuda()
    del occupied


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict({name: value * 0.95 for name, value in unet.state_dict().items()})


CHANGES = [
    change_in_place, change_by_data, change_by_parameter, change_one_convolution, change_by_moving, change_by_loading,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_never_replayed_stale(tiny: nn.Module, change: Callable[[nn.Module], None]) -> None:
    compile_unet(tiny, backend="native")
    given = arguments(tiny)
    ours(tiny, given)
    with torch.no_grad():
        change(tiny)
        # A pipeline makes a new context tensor for every picture.
        given["encoder_hidden_states"] = given["encoder_hidden_states"].clone()
        for _ in range(3):
            output = tiny(**given, return_dict=False)[0]
            assert relative_error(output, host(tiny, given)) < CLOSE
    assert (status()["backend"], status()["route"]) == ("native", "graph"), status()["reason"]
