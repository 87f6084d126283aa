"""A transformer that lib_onediff does not know, on a real GPU: our kernels and graphs against its own forward."""
from __future__ import annotations

import copy

import pytest
import torch
from exact_operators import relative_error
from toy_transformer.family import ToyTransformers
from toy_transformer.network import ToyTransformer

from lib_onediff.runtime.runtime import Runtime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_products")]
GPU = torch.device("cuda")
# The largest ratio of our error to the network's own.
WORST_RATIO = 1.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_our_error_for_a_transformer_of_another_package_is_at_most_that_of_its_own_forward(dtype: torch.dtype) -> None:
    """Both errors are measured against the network in float32; ours may be a fifth larger. Ours is of the third call, a
    replayed graph. The mask leaves 20 of 77 tokens to the first prompt."""
    torch.manual_seed(0)
    with torch.device(GPU), torch.inference_mode(False):
        network = ToyTransformer().to(dtype).requires_grad_(False)
    runtime = Runtime(policies=(), families=(ToyTransformers(),))
    runtime.adopt(network)
    layout = runtime.services.families.read(network)
    call = ToyTransformers().example(layout, (32, 48), 2, 77, lambda *shape: torch.randn(shape, device=GPU).to(dtype))
    assert call.mask is not None
    call.mask[0, 20:] = False
    given = call.latent, call.timestep, call.context
    theirs = network(*given, call.mask)
    exact = copy.deepcopy(network).float()(*(tensor.float() for tensor in given), call.mask)
    with runtime.warming_up():
        for _ in range(3):
            ours = runtime.run(network, call, lambda: network(*given, call.mask))
    last = runtime.call_stats.last_call
    assert (last.backend, last.route) == ("native", "graph"), last.reason
    assert relative_error(ours.float(), exact) < WORST_RATIO * relative_error(theirs.float(), exact)
