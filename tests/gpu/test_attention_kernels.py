"""torch's attention kernels, called directly on a real GPU, against scaled_dot_product_attention."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from exact_operators import relative_error

from lib_onediff.devices.cuda.kernels.launch_config import random_on
from lib_onediff.devices.torch.attention import CUDNN, FUSED, HAS_CUDNN, MATH, attend, inputs_of

nn_attention = pytest.importorskip("torch.nn.attention", reason="needs torch 2.3 or newer")

pytestmark = pytest.mark.gpu
NAMES = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
SHAPES = {
    "SDXL": ((2, 10, 4096, 64), (2, 10, 4096, 64)), "SDXL context": ((2, 10, 4096, 64), (2, 10, 77, 64)),
    "SD1.5": ((2, 8, 1024, 80), (2, 8, 1024, 80)), "odd": ((2, 8, 45, 40), (2, 8, 154, 40)),
}
# MATH stores all scores, and is refused for the larger shapes.
CASES = [(backend, name) for backend in FUSED for name in SHAPES if backend != MATH or name == "odd"]
CLOSE = {torch.float16: 1e-2, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize(("backend", "shapes"), CASES)
def test_an_attention_kernel_called_directly_equals_scaled_dot_product_attention_with_it(
    backend: str, shapes: str, dtype: torch.dtype
) -> None:
    """attend() calls one kernel without torch's choice between kernels; the reference is torch's function, restricted
    to the same kernel. The output is equal to the bit, with the same strides; it is close to attention in float32.
    shapes: the name of shapes of query and key; "odd" has lengths that are no multiples of 8."""
    if backend == CUDNN and not HAS_CUDNN:
        pytest.skip("this torch cannot")
    torch.manual_seed(0)
    inputs = inputs_of(random_on(torch.device("cuda"), dtype), *SHAPES[shapes])
    with torch.no_grad():
        ours = attend(backend, *inputs)
        with nn_attention.sdpa_kernel([getattr(nn_attention.SDPBackend, NAMES[backend])]):
            torchs = functional.scaled_dot_product_attention(*inputs)
    assert torch.equal(ours, torchs) and ours.stride() == torchs.stride()
    expected = functional.scaled_dot_product_attention(*(tensor.float() for tensor in inputs))
    assert relative_error(ours, expected) < CLOSE[dtype]
