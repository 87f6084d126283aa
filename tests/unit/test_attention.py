"""Every implementation of attention is close to attention in float64, and the fastest one is chosen by measurement.

TORCH lets torch choose a kernel; MATH, EFFICIENT, FLASH and CUDNN are torch's kernels; GEMM is our attention by
products of matrices, in chunks of queries; PARTS attends to two parts of the keys, and merges the outputs.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import a_call, our_output, relative_error, shared_ldm_unet, shared_unet
from exact_operators import attention as exact_attention
from grid import grid
from torch import Tensor
from torch.backends import cuda as switches

from lib_onediff.core.card import TuningCache
from lib_onediff.core.family import AttentionShapes
from lib_onediff.core.operators import Filled
from lib_onediff.devices.cuda.kernels.launch_config import Launches, random_on
from lib_onediff.devices.torch import attention as module
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    GEMM,
    MATH,
    PARTS,
    TORCH,
    Attention,
    gemm_attention,
    inputs_of,
)
from lib_onediff.families.registry import FAMILIES

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = {
    "self": ((2, 8, 60, 40), (2, 8, 60, 40)), "cross": ((2, 5, 63, 64), (2, 5, 77, 64)),
    "one query": ((1, 2, 1, 8), (1, 2, 77, 8)), "one key": ((1, 2, 9, 8), (1, 2, 1, 8)),
    "VAE": ((1, 1, 221, 512), (1, 1, 221, 512)), "VAE of two": ((2, 1, 35, 384), (2, 1, 35, 384)),
}


def flags() -> list[bool]:
    enabled = [switches.flash_sdp_enabled(), switches.mem_efficient_sdp_enabled(), switches.math_sdp_enabled()]
    return enabled + ([switches.cudnn_sdp_enabled()] if hasattr(switches, "cudnn_sdp_enabled") else [])


@pytest.fixture(autouse=True)
def switches_stay_as_they_are() -> Iterator[None]:
    """Assert that the test has changed no switch of torch.backends.cuda."""
    before = flags()
    yield
    assert flags() == before


@grid(kind=list(SHAPES), scores_bytes=[1, 3000, 40_000, 64 << 20], dtype=list(ROUNDING))
def test_gemm_attention_is_close_to_exact_attention_with_chunks_of_any_size(
    kind: str, scores_bytes: int, dtype: torch.dtype
) -> None:
    """GEMM attention stores the scores of a chunk of queries. scores_bytes: the memory for these scores, which gives
    chunks of one query up to all. The reference is attention in float64."""
    inputs = inputs_of(random_on(CPU, dtype), *SHAPES[kind])
    output = gemm_attention(*inputs, scores_bytes=scores_bytes)
    assert output.transpose(1, 2).is_contiguous(), "heads can be joined without a copy"
    assert output.shape == inputs[0].shape and output.dtype == dtype
    assert relative_error(output.double(), exact_attention(*inputs)) < ROUNDING[dtype]


def test_attention_with_upcast_computes_in_float32() -> None:
    """The inputs are in float16. The error against float64 is below 4e-4, the rounding of the output alone. The output
    equals that of torch's operators with upcast to the bit."""
    inputs = inputs_of(random_on(CPU, torch.float16), *SHAPES["self"])
    attention = Attention(Launches(TuningCache()))
    upcast = attention(*inputs, upcast=True)
    assert upcast.dtype == torch.float16 and torch.equal(upcast, torch_ops.attention(*inputs, upcast=True))
    assert relative_error(upcast.double(), exact_attention(*inputs)) < 4e-4


class Clock:
    """Stands for the measurement of times. ms: the time of each implementation, by default 1.0. timed: the
    implementations that were timed."""

    def __init__(self, **ms: float) -> None:
        self.ms = ms
        self.timed: list[str] = []

    def __call__(self, work: Any) -> float:
        [name] = work.args[-1]
        self.timed.append(name)
        return self.ms.get(name, 1.0)


def measured(clock: Clock, kind: str, dtype: torch.dtype) -> str:
    """The implementation that is chosen for these shapes after a measurement with these times. Before it, the default
    is chosen; a second measurement times nothing."""
    attention = Attention(Launches(TuningCache()))
    before = attention.pick(*SHAPES[kind], dtype)
    assert before == (GEMM if "VAE" in kind else TORCH), "nothing was measured"
    given = *SHAPES[kind], dtype, CPU, clock
    assert attention.measure(*given) and not attention.measure(*given)
    return attention.pick(*SHAPES[kind], dtype)


def test_implementations_that_the_host_has_switched_off_are_not_used() -> None:
    """torch.backends.cuda has a switch for each implementation, which a WebUI's options set. MATH is switched off, and
    would be the fastest."""
    clock = Clock(math=0.1)
    switches.enable_math_sdp(False)
    try:
        assert measured(clock, "self", torch.float32) == TORCH
        assert MATH not in clock.timed and not module.may_use(MATH)
    finally:
        switches.enable_math_sdp(True)
    assert module.may_use(MATH)


@pytest.mark.parametrize(("ms", "best"), [
    ({MATH: 0.5}, MATH), ({GEMM: 0.5}, GEMM), ({TORCH: 0.5}, TORCH), ({TORCH: 1.02}, TORCH), ({TORCH: 1.1}, GEMM),
])
def test_the_fastest_implementation_that_runs_here_is_chosen(ms: dict[str, float], best: str) -> None:
    """ms: times of implementations; else 1.05 for MATH, 1.0 for the others. The default, TORCH, is kept if another one
    is only a few percent faster. CUDNN, EFFICIENT and FLASH raise without a GPU, and are not chosen, though their times
    are 0.1."""
    clock = Clock(**{CUDNN: 0.1, EFFICIENT: 0.1, FLASH: 0.1, MATH: 1.05, **ms})
    assert measured(clock, "self", torch.float32) == best
    assert not {CUDNN, EFFICIENT, FLASH} & set(clock.timed)


def test_wide_heads_use_gemms_and_never_torchs_kernel_that_stores_all_scores() -> None:
    """A VAE's attention has one head of width 512. Only GEMM is timed."""
    clock = Clock()
    assert measured(clock, "VAE", torch.bfloat16) == GEMM and clock.timed == [GEMM]


@pytest.mark.parametrize("factor", [1.02, math.inf, math.nan])
def test_an_implementation_with_wrong_outputs_is_not_chosen(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """MATH takes a tenth of the others' time, and its outputs are multiplied by factor."""
    real = module.attend
    monkeypatch.setattr(module, "attend", lambda name, *given: real(name, *given) * (factor if name == MATH else 1))
    assert measured(Clock(math=0.1), "self", torch.float32) == TORCH


class Watched:
    """torch's operators, which pass the inputs of each attention to watch."""

    def __init__(self, watch: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | Filled | None = None
    ) -> Tensor:
        self._watch(query, key, value)
        return torch_ops.attention(query, key, value, upcast, mask)


@grid(
    kind=["SD1", "SD2", "SDXL", "refiner", "SSD", "no middle", "ldm"],
    size=[(8, 8, 2, 77), (9, 11, 1, 154), (15, 10, 3, 77)],
)
def test_the_attention_shapes_of_a_call_are_those_that_our_forward_computes(
    kind: str, size: tuple[int, int, int, int]
) -> None:
    """attentions() predicts the shapes, in the order of the forward, so that they can be measured before the call.
    kind: the UNet. size: height and width in latent pixels, batch, tokens."""
    height, width, batch, tokens = size
    unet = shared_ldm_unet() if kind == "ldm" else shared_unet(kind)
    seen: dict[AttentionShapes, None] = {}

    def watch(query: Tensor, key: Tensor, value: Tensor) -> None:
        seen[AttentionShapes(tuple(query.shape), tuple(key.shape))] = None

    call = a_call(unet, height, width, batch, tokens)
    our_output(unet, call, Watched(watch))
    layout = FAMILIES.read(unet)
    assert FAMILIES.of(layout).attentions(layout, call) == list(seen)


@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("used", [(9, 30), (30, 30), (1, 7)], ids=str)
def test_tokens_of_a_padded_row_attend_only_to_the_rows_own_tokens(used: tuple[int, int], key_heads: int) -> None:
    """A row of the batch has its own tokens, then padding. used: how many of the 30 tokens are each row's own.
    key_heads 2: three heads of queries share one of keys. The reference is attention in float64 over a row's own
    tokens."""
    query, key, value = inputs_of(random_on(CPU, torch.float32), (2, 6, 30, 8), (2, key_heads, 30, 8))
    filled = Filled.of(torch.tensor(used), 30)
    assert filled.ends.tolist() == [0, used[0], 30, 30 + used[1], 60]
    for attention in (torch_ops.attention, Attention(Launches(TuningCache()))):
        output = attention(query, key, value, False, filled)
        for row, count in enumerate(used):
            own = [one[row:row + 1, :, :count] for one in (query, key, value)]
            assert relative_error(output[row:row + 1, :, :count].double(), exact_attention(*own)) < 1e-6
        assert output.isfinite().all()


def sequences(query: Tensor, key: Tensor, value: Tensor, ends: Tensor) -> Tensor:
    """Attention of sequences of several lengths, as torch's kernels take them: one after the other, each from an
    element of ends to the next."""
    output = torch.full_like(query, math.nan)
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if end > start:
            own = [one[start:end].transpose(0, 1)[None] for one in (query, key, value)]
            output[start:end] = exact_attention(*own)[0].transpose(0, 1).to(query.dtype)
    return output


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("used", [(9, 30), (30, 30)], ids=str)
def test_kernels_get_a_padded_row_as_two_sequences(
    name: str, used: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU kernels for sequences of several lengths take a row's own tokens as one sequence, and its padding as another.
    sequences() stands for the kernels. The own tokens' outputs are close to those of torch's operators. used: how many
    of the 30 tokens are each row's own."""
    monkeypatch.setattr(module, "may_use", lambda name: True)
    monkeypatch.setattr(module, "KEEPS_CUDNN_SEQUENCES", True)
    monkeypatch.setattr(module, "flash_of_sequences", lambda query, key, value, ends, longest: sequences(
        query, key, value, ends
    ))
    monkeypatch.setattr(module, "cudnn_of_sequences", lambda query, key, value, ends, longest: sequences(
        query, key, value, ends
    ))
    query, key, value = inputs_of(random_on(CPU, torch.bfloat16), (2, 6, 30, 8), (2, 2, 30, 8))
    filled = Filled.of(torch.tensor(used), 30)
    output = module.attend_filled(name, query, key, value, filled)
    expected = torch_ops.attention(query, key, value, False, filled)
    assert output.shape == query.shape and output.transpose(1, 2).is_contiguous()
    for row, count in enumerate(used):
        assert relative_error(output[row, :, :count].double(), expected[row, :, :count].double()) < 1e-2


@pytest.mark.parametrize(("wrong", "best"), [(False, FLASH), (True, TORCH)])
def test_kernels_for_sequences_are_chosen_if_they_are_correct(
    wrong: bool, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLASH is the fastest here. wrong: whether it returns zeros for a sequence that fills its row. The choice applies
    only to calls in which the same number of tokens may be padding (uncertain)."""

    def flash(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
        output = sequences(query, key, value, ends)
        return torch.zeros_like(output) if wrong and ends[0] == ends[1] - longest else output

    monkeypatch.setattr(module, "may_use", lambda name: name == FLASH)
    monkeypatch.setattr(module, "flash_of_sequences", flash)
    attention = Attention(Launches(TuningCache()))
    shapes = (2, 6, 30, 8), (2, 2, 30, 8)
    assert attention.pick(*shapes, torch.bfloat16, uncertain=30) == TORCH
    assert attention.measure(*shapes, torch.bfloat16, CPU, Clock(flash=0.5), uncertain=30)
    assert attention.pick(*shapes, torch.bfloat16, uncertain=30) == best
    for other in (0, 12):
        assert attention.pick(*shapes, torch.bfloat16, uncertain=other) == TORCH, "other rows are another class"


def test_cudnns_kernel_for_sequences_is_refused_if_torch_does_not_keep_its_plans(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases of torch build cuDNN's execution plan at each call, and free it, even if a CUDA graph uses it."""
    monkeypatch.setattr(module, "may_use", lambda name: True)
    monkeypatch.setattr(module, "KEEPS_CUDNN_SEQUENCES", False)
    inputs = inputs_of(random_on(CPU, torch.bfloat16), (2, 6, 30, 8), (2, 2, 30, 8))
    with pytest.raises(RuntimeError, match="does not keep"):
        module.attend_filled(CUDNN, *inputs, Filled.of(torch.tensor([9, 30]), 30))


def exact_part(
    name: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Stands for module.part_of: a part's attention, computed in float64, and the logarithms of its sums of
    exponentials. Asserts that EFFICIENT gets a bias whose rows are aligned to 8 elements."""
    heads = query.shape[1]
    wide = query.double(), *(torch_ops.repeated(one, heads).double() for one in (key, value))
    scores = wide[0] @ wide[1].mT * query.shape[3]**-0.5
    if name == EFFICIENT:
        assert bias is not None and bias.shape == scores.shape and bias.dtype == query.dtype
        assert bias.isfinite().all() and all(stride % 8 == 0 for stride in bias.stride()[:3]) and bias.stride(3) == 1
        scores += bias
    mixed = scores.softmax(-1) @ wide[2]
    return mixed.to(query.dtype), scores.logsumexp(-1).float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("used", [(19, 30), (18, 25), (30, 30), (18, 18)], ids=str)
def test_attention_over_two_parts_of_the_keys_is_close_to_attention_over_all_keys(
    used: tuple[int, int], key_heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 18 keys are padding in no row; the other 12 may be. PARTS attends to each of these two parts apart, and
    merges the outputs. used: how many of the 30 tokens are each row's own. The reference is attention in float64 over a
    row's own tokens."""
    monkeypatch.setattr(module, "part_of", exact_part)
    inputs = inputs_of(random_on(CPU, dtype), (2, 6, 30, 8), (2, key_heads, 30, 8))
    output = module.attend_filled(PARTS, *inputs, Filled.of(torch.tensor(used), 30, certain=18))
    assert output.dtype == dtype and output.shape == inputs[0].shape and output.isfinite().all()
    for row, count in enumerate(used):
        own = [one[row:row + 1, :, :count] for one in inputs]
        # Three roundings: of both parts, and of their sum.
        error = relative_error(output[row:row + 1, :, :count].double(), exact_attention(*own))
        assert error < torch.finfo(dtype).eps


@pytest.mark.parametrize("apart", [0.0, 3.0, -3.0, 100.0, -100.0, 1e38, -1e38])
def test_parts_of_attention_are_merged_in_proportion_to_their_sums_of_exponentials(apart: float) -> None:
    """Each part's softmax weights are normalised by its own sum of exponentials. apart: the logarithm of the second sum
    minus that of the first, so that the second part's share is sigmoid(apart)."""
    make = random_on(CPU, torch.float32)
    first, second = make(1, 2, 5, 4), make(1, 2, 5, 4)
    sums = make(1, 2, 5)
    share = torch.sigmoid(torch.tensor(apart, dtype=torch.float64))
    expected = first.double() * (1 - share) + second.double() * share
    assert relative_error(module.merged(first, sums, second, sums + apart).double(), expected) < 1e-5


@pytest.mark.parametrize("certain", [0, 30])
def test_attention_in_parts_is_refused_where_one_part_is_empty(certain: int) -> None:
    """certain: how many of the 30 tokens are padding in no row."""
    inputs = inputs_of(random_on(CPU, torch.bfloat16), (2, 6, 30, 8), (2, 2, 30, 8))
    with pytest.raises(RuntimeError, match="certain"):
        module.attend_filled(PARTS, *inputs, Filled.of(torch.tensor([30, 30]), 30, certain))


def test_attention_in_parts_is_chosen_if_some_tokens_are_padding_in_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """PARTS is the fastest. uncertain: how many of the 30 tokens may be padding in a row; with 30, there is no part
    without padding."""
    monkeypatch.setattr(module, "part_of", exact_part)
    attention = Attention(Launches(TuningCache()))
    shapes = (2, 6, 30, 8), (2, 2, 30, 8)
    for uncertain, best in ((5, PARTS), (12, PARTS), (30, TORCH)):
        assert attention.measure(*shapes, torch.bfloat16, CPU, Clock(parts=0.5), uncertain=uncertain)
        assert attention.pick(*shapes, torch.bfloat16, uncertain=uncertain) == best
