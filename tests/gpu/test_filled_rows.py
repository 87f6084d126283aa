"""Attention of rows that are filled up, by each way that torch's kernels offer for it, on a real GPU."""
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
    """attend_filled, which skips the test if this torch or card has no such kernel: then another implementation is
    chosen."""
    try:
        return attend_filled(name, *inputs, filled)
    except RuntimeError as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.parametrize("name", [FLASH, CUDNN, PARTS])
@pytest.mark.parametrize("key_heads", [12, 3])
def test_each_replay_of_attention_reads_how_many_tokens_of_a_row_are_used(name: str, key_heads: int) -> None:
    """The other tokens of a row fill it up to TOKENS. Their number is a tensor, so that a graph that was captured for
    one number serves others; the used tokens' result is compared with attention over these tokens alone. certain:
    tokens that are always used, which PARTS needs."""
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
