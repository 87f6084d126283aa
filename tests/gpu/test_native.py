"""The backends native and cudagraph on a real GPU: whole UNets against the UNet's own forward."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, host, last_call

from lib_onediff.bench.models import random_unet
from lib_onediff.devices.cuda.kernels.launching import loaded
from lib_onediff.public import compile_unet, uncompile_unet

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
SIZES = [(512, 512), (960, 720), (72, 88)]
WORST_RATIO = 1.1
GIB = 2**30


@torch.no_grad()
def ours(unet: nn.Module, given: dict[str, Any], backend: str = "native") -> Tensor:
    """The output of the last of three calls. The first runs without a graph, after the second a graph is captured, and
    the third is replayed. Checks that this backend served it from a graph."""
    for _ in range(3):
        output = unet(**given, return_dict=False)[0]
    assert last_call()["backend"] == backend, last_call()["reason"]
    assert last_call()["route"] == "graph", last_call()["reason"]
    return output


def wide(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in float32."""
    return {
        name: value.float() if isinstance(value, Tensor) else {part: inner.float() for part, inner in value.items()}
        for name, value in given.items()
    }


def needs_memory(gibibytes: int) -> None:
    """Skip the test if the GPU has less free memory."""
    if torch.cuda.mem_get_info()[0] < gibibytes * GIB:
        pytest.skip(f"needs {gibibytes} GiB of free GPU memory")


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["native", "cudagraph"])
@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_our_error_in_half_precision_is_not_above_that_of_the_unets_own_forward(
    name: str, backend: str, dtype: torch.dtype
) -> None:
    """Both errors are against the output of the UNet's own forward in float32 (exact). Ours may be a tenth larger.
    name: the name of a UNet in bench.models; its weights are random."""
    needs_memory(20)
    unet = random_unet(name, torch.device("cuda")).to(dtype)
    # The rounding errors of one small image may add up by chance; those of many do not.
    calls = [arguments(unet, *size, batch=2 if min(size) > 100 else 16) for size in SIZES]
    hosts = [host(unet, given) for given in calls]
    compile_unet(unet, backend=backend)
    outputs = [ours(unet, given, backend=backend) for given in calls]
    uncompile_unet(unet)
    unet.float()
    for size, given, own, output in zip(SIZES, calls, hosts, outputs, strict=True):
        exact = host(unet, wide(given))
        mine = relative_error(output, exact)
        theirs = relative_error(own, exact)
        print(f"{name} {size} {dtype} {backend}: {mine:.2e}, the host {theirs:.2e}")
        assert mine <= WORST_RATIO * theirs, size


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_no_kernel_is_loaded_for_another_size_batch_or_prompt_length(name: str) -> None:
    """Kernels take sizes as arguments. After the first size, all kernels are loaded, so that a new size needs no
    compilation and starts at once."""
    unet = random_unet(name, torch.device("cuda")).half()
    compile_unet(unet, backend="native")
    ours(unet, arguments(unet, 512, 512))
    before = loaded.cache_info()
    assert before.currsize > 0
    for size in ((768, 512), (960, 720), (72, 88), (1024, 1024), (64, 64), (1280, 768), (40, 24)):
        ours(unet, arguments(unet, *size))
    for batch, tokens in ((1, 77), (3, 154), (4, 231)):
        ours(unet, arguments(unet, 520, 520, batch, tokens))
    assert loaded.cache_info().misses == before.misses
