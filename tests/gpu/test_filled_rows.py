"""Attention over rows of tokens that are padded to a fixed length, by each implementation in torch that supports it, on
a real GPU."""
from __future__ import annotations

import pytest
import torch
from exact_operators import attention as exact_attention
from exact_operators import relative_error
from torch import Tensor

from lib_onediff.core.operators import Filled
from lib_onediff.devices.cuda.kernels.launch_config import random_on
from lib_onediff.devices.torch.attention import CUDNN, FLASH, PARTS, WORST_ERROR, attend_filled, inputs_of

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TOKENS = 1088
CERTAIN = 1024


def attend_or_skip(name: str, inputs: tuple[Tensor, ...], filled: Filled) -> Tensor:
    """attend_filled. Skips the test if it raises because this torch or card has no such kernel: then OneDiff chooses
    another implementation."""
    try:
        return attend_filled(name, *inputs, filled)
    except RuntimeError as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.parametrize("name", [FLASH, CUDNN, PARTS])
@pytest.mark.parametrize("key_heads", [12, 3])
def test_a_replayed_attention_over_padded_rows_uses_the_token_counts_of_each_replay(name: str, key_heads: int) -> None:
    """Rows are padded to TOKENS. The number of used tokens in each row is a tensor, so that one captured graph serves
    all numbers. The used tokens' result is compared with float64 attention over these tokens alone. name: the
    implementation. certain: how many tokens are always used, which PARTS must know."""
    inputs = inputs_of(random_on(GPU, torch.bfloat16), (2, 12, TOKENS, 128), (2, key_heads, TOKENS, 128))
    used = torch.tensor([TOKENS, TOKENS - 9], device=GPU)

    certain = CERTAIN if name == PARTS else 0

    def run() -> Tensor:
        return attend_filled(name, *inputs, Filled.of(used, TOKENS, certain))

    attend_or_skip(name, inputs, Filled.of(used, TOKENS, certain))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for counts in ((TOKENS, TOKENS - 9), (1025, TOKENS), (TOKENS, TOKENS), (CERTAIN + 1, CERTAIN), (1, 64)):
        if min(counts) < certain:
            continue
        used.copy_(torch.tensor(counts))
        graph.replay()
        assert output.isfinite().all()
        for row, count in enumerate(counts):
            own = [one[row:row + 1, :, :count] for one in inputs]
            error = relative_error(output[row:row + 1, :, :count].double(), exact_attention(*own))
            assert error < WORST_ERROR[torch.bfloat16]
