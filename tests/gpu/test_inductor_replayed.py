"""The inductor backend on a real GPU, in graphs, against the model's own forward."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import host

from lib_onediff import compile_unet, status, uncompile_unet
from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
SIZES = [
    (1024, 1024), (832, 1216), (1216, 832), (896, 1152), (768, 1344), (1280, 1280), (960, 720), (720, 720), (640, 1536),
]


def replayed(unet: nn.Module, given: dict) -> Tensor:
    """The output of the last of three calls: plain, plain and then captured, replayed."""
    with torch.no_grad():
        for _ in range(3):
            output = unet(**given, return_dict=False)[0]
    assert (status()["backend"], status()["route"]) == ("inductor", "graph"), status()["reason"]
    return output


def graphs() -> int:
    runtime.operators.inductor.finish()
    return runtime.operators.inductor.operators.graphs()


@pytest.mark.parametrize("name", ["sd15", "sdxl"])
def test_no_farther_from_float32_and_nothing_compiled_for_later_sizes(name: str) -> None:
    unet = random_unet(name, torch.device("cuda")).half()
    compile_unet(unet, backend="inductor")
    for batch in (2, 1):
        replayed(unet, inputs(unet, *SIZES[0], batch, 77, torch.float16))
    before = graphs()
    for size in SIZES:
        for batch in (2, 1):
            given = inputs(unet, *size, batch, 77, torch.float16)
            assert relative_error(replayed(unet, given), host(unet, given)) < 5e-3, (size, batch)
    assert graphs() == before
    assert runtime.operators.inductor.operators.refused() == 0
    given = inputs(unet, *SIZES[0], 2, 77, torch.float16)
    output, own_host = replayed(unet, given), host(unet, given)
    uncompile_unet(unet)
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    unet.float()
    widened = {
        key: value.float() if isinstance(value, Tensor) else value and {k: v.float() for k, v in value.items()}
        for key, value in given.items()
    }
    exact = host(unet, widened)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    assert relative_error(output, exact) <= 1.1 * relative_error(own_host, exact)


def test_a_lora_and_another_checkpoint_compile_nothing() -> None:
    unet = compile_unet(random_unet("sd15", torch.device("cuda")).half(), backend="inductor")
    given = inputs(unet, 512, 512, 2, 77, torch.float16)
    replayed(unet, given)
    before = graphs()
    with torch.no_grad():
        for module in unet.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(1.01)
    assert relative_error(replayed(unet, given), host(unet, given)) < 5e-3
    other = compile_unet(random_unet("sd15", torch.device("cuda")).half(), backend="inductor")
    assert relative_error(replayed(other, given), host(other, given)) < 5e-3
    assert graphs() == before
