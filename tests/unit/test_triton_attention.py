"""Our attention to few keys against float64: on a GPU compiled, without one under Triton's interpreter."""
from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from builders import relative_error
from grid import ends
from torch import Tensor

from lib_onediff.ops.attention_tuning import random_inputs
from lib_onediff.ops.triton.attention import attention, heads_lie_beside
from lib_onediff.ops.triton.launch_config import ATTENTION, LIBRARY, WIDE_ATTENTION, LaunchConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of a half type, with the weights rounded to it before they meet the values. The interpreter cuts bfloat16 off.
ROUNDING = {torch.float16: 6e-4, torch.bfloat16: 6e-3}
SHAPES = {
    "SDXL": ((2, 3, 100, 64), 77), "long prompt": ((1, 2, 65, 64), 154), "SD1": ((2, 2, 70, 40), 77),
    "wider": ((1, 2, 33, 80), 77), "widest": ((1, 1, 64, 160), 77), "one key": ((1, 2, 5, 64), 1),
    "one query": ((2, 1, 1, 64), 77), "as many keys": ((1, 2, 130, 16), 130),
}


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query.double() @ key.double().transpose(-1, -2) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value.double()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("kind", SHAPES)
def test_it_is_exact(kind: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 by its bits")
    query, keys = SHAPES[kind]
    inputs = random_inputs(query, (*query[:2], keys, query[3]), dtype, DEVICE)
    assert all(map(heads_lie_beside, inputs))
    output = attention(*inputs)
    assert output.shape == query and output.transpose(1, 2).is_contiguous(), "heads can be joined without a copy"
    assert relative_error(output.double(), exact(*inputs)) < ROUNDING[dtype]
    assert not heads_lie_beside(torch.zeros(2, 3, 10, 64, device=DEVICE)), "those are not taken"


@pytest.mark.parametrize(
    ("width", "config"),
    [(width, config) for width, kernel in ((64, ATTENTION), (80, WIDE_ATTENTION))
     for config in ends([config for config in kernel.candidates if config != LIBRARY])], ids=str,
)
def test_every_cut_gives_the_same(width: int, config: LaunchConfig) -> None:
    inputs = random_inputs((1, 2, 70, width), (1, 2, 154, width), torch.float16, DEVICE)
    assert relative_error(attention(*inputs, config).double(), exact(*inputs)) < ROUNDING[torch.float16]


def test_large_scores_do_not_overflow() -> None:
    query, key, value = random_inputs((1, 1, 20, 64), (1, 1, 77, 64), torch.float16, DEVICE)
    inputs = 60 * query, 60 * key, value
    assert relative_error(attention(*inputs).double(), exact(*inputs)) < 2e-3
