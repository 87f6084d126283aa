"""The operators that transformers need, against float64: grouped and masked attention, norms with modulation, rotary
embeddings, gated units, and layers added to the residual. Also a block of Z-Image and one of Krea 2 that are composed
of them, against diffusers.

ops: "torch" are the operators by torch's functions, "native" those with our Triton kernels.
"""
from __future__ import annotations

from typing import Any

import exact_operators
import pytest
import torch
from exact_operators import relative_error
from grid import grid
from torch import Tensor, nn
from torch.nn import functional

from lib_onediff.core.card import TuningCache
from lib_onediff.core.layer_weights import LayerWeights
from lib_onediff.core.leaves import AdaptiveNorm, FusedLinear, LayerNorm, Linear, RMSNorm, SelfAttention
from lib_onediff.core.operators import (
    GEGLU,
    SWIGLU,
    Activation,
    GatedUnit,
    Heads,
    Modulation,
    Operators,
    Residual,
    Rotary,
)
from lib_onediff.devices.cuda.kernels.launch_config import Launches
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.attention import GEMM, Attention, attend, class_of, inputs_of
from lib_onediff.families.transformer import TransformerLayers

pytestmark = pytest.mark.usefixtures("exact_products")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The largest relative error that rounding to a dtype causes in a norm or a product, with a margin.
CLOSE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(CLOSE)
NATIVE = "native"
TORCH = "torch"
WIDTH = 48
HEAD = 16
BATCH = 2
TOKENS = 7
HEADS = 6
KEY_HEADS = 2


def operators(name: str) -> Operators:
    """The operators of this name, TORCH or NATIVE."""
    if name == TORCH:
        return torch_ops
    pytest.importorskip("triton", reason="needs Triton")
    from lib_onediff.devices.cuda.kernels.operators import NativeOperators

    return NativeOperators()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


# --- attention --------------------------------------------------------------------------------------------------------


def no_mask() -> Tensor | None:
    return None


def of_padded_prompts() -> Tensor:
    """The mask of two prompts, of which the second is shorter."""
    mask = torch.ones(BATCH, 1, 1, 11, dtype=torch.bool, device=DEVICE)
    mask[1, ..., 4:] = False
    return mask


def with_an_empty_prompt() -> Tensor:
    mask = of_padded_prompts()
    mask[1] = False
    return mask


def of_each_query() -> Tensor:
    """A mask for each query of each head; some queries see no key."""
    mask = random(BATCH, HEADS, TOKENS, 11) > 0
    mask[0, 2, 3] = False
    mask[1, :, 0] = False
    return mask


MASKS = {"none": no_mask, "padded": of_padded_prompts, "empty prompt": with_an_empty_prompt, "queries": of_each_query}


@grid(mask=list(MASKS), key_heads=[HEADS, KEY_HEADS, 1], dtype=DTYPES, upcast=[False, True], newest=[True, False])
def test_attention_with_a_mask_and_shared_key_heads_is_close_to_float64(
    mask: str, key_heads: int, dtype: torch.dtype, upcast: bool, newest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the torch operators and Attention, which chooses among kernels, are compared. mask: the name of a mask: of
    padded prompts, of prompts of which one is empty, or one for each query. key_heads: several queries share a key head
    if it is less than HEADS. newest: whether torch's own grouped attention (torch 2.5) may be used. A query that sees
    no key gives zeros."""
    if not newest:
        monkeypatch.setattr(torch_ops, "HAS_GQA", False)
    query = random(BATCH, HEADS, TOKENS, HEAD, dtype=dtype)
    key, value = (random(BATCH, key_heads, 11, HEAD, dtype=dtype, seed=seed) for seed in (1, 2))
    visible: Any = MASKS[mask]()
    expected = exact_operators.attention(query, key, value, visible)
    for implementation in (torch_ops.attention, Attention(Launches(TuningCache()))):
        output = implementation(query, key, value, upcast, visible)
        assert output.dtype == dtype and output.isfinite().all()
        assert relative_error(output, expected) < CLOSE[dtype]
        if visible is not None:
            hidden = ~visible.any(-1).expand(BATCH, HEADS, TOKENS)
            assert not output[hidden].any(), "a query that sees nothing gives zeros"


def test_shared_keys_are_repeated_for_an_attention_kernel_without_grouped_heads() -> None:
    """Six query heads share two key heads, and GEMM is such a kernel. class_of() names the measurements of a shape:
    they are not those of an attention with six key heads."""
    shapes = (2, 6, 60, 40), (2, 2, 77, 40)
    given = inputs_of(random, *shapes)
    assert [tuple(part.shape) for part in given] == [shapes[0], shapes[1], shapes[1]]
    assert relative_error(attend(GEMM, *given), exact_operators.attention(*given)) < CLOSE[torch.float32]
    assert class_of(*shapes) != class_of(shapes[0], (2, 6, 77, 40)), "its measurements are others"


# --- norms ------------------------------------------------------------------------------------------------------------


NORMS = {
    "layer": LayerNorm("", WIDTH, 1e-5), "RMS": RMSNorm("", WIDTH, 1e-5), "RMS, 1 + w": RMSNorm("", WIDTH, 1e-5, True),
    "adaptive": AdaptiveNorm(WIDTH, 1e-6),
}


def exact_norm(norm: Any, tokens: Tensor, layer: LayerWeights) -> Tensor:
    """The output of a norm of NORMS in float64."""
    if isinstance(norm, AdaptiveNorm):
        return exact_operators.layer_norm(tokens, torch.ones_like(tokens[0, 0]), None, norm.eps)
    if isinstance(norm, LayerNorm):
        return exact_operators.layer_norm(tokens, layer.weight, layer.bias, norm.eps)
    return exact_operators.rms_norm(tokens, layer.weight.double() + norm.plus_one, norm.eps)


@grid(ops=[TORCH, NATIVE], norm=list(NORMS), vectors=[0, 1, 2], dtype=DTYPES, owes=[False, True])
def test_a_norm_with_modulation_is_close_to_float64(
    ops: str, norm: str, vectors: int, dtype: torch.dtype, owes: bool
) -> None:
    """norm: "1 + w" multiplies by 1 + weight; "adaptive" is a layer norm without weights. vectors: 0: no modulation; 1:
    a scale; 2: scale and shift. owes: whether the residual has a gated update that the operator must add first. The new
    residual is checked too."""
    description: Any = NORMS[norm]
    tokens, update, gate = (random(BATCH, TOKENS, WIDTH, seed=seed) for seed in range(3))
    tokens = tokens.to(dtype)
    update = update.to(dtype)
    gate = gate[:, 0].to(dtype)
    layer = LayerWeights(random(WIDTH, dtype=dtype), random(WIDTH, dtype=dtype, seed=1))
    scale, shift = random(BATCH, 2 * WIDTH, dtype=dtype).chunk(2, dim=-1)
    modulation = [None, Modulation(scale), Modulation(scale, shift)][vectors]
    total = tokens.double()
    if owes:
        total = total + update.double() * gate.double()[:, None]
    # The residual as a host would store it.
    total = total.to(dtype)
    expected = exact_norm(description, total, layer)
    if modulation is not None:
        expected = expected * scale.double()[:, None]
    if vectors == 2:
        expected = expected + shift.double()[:, None]
    residual = Residual(tokens.clone(), update=update, gate=gate) if owes else Residual(tokens.clone())
    weights = None if isinstance(description, AdaptiveNorm) else layer
    consumer = LayerWeights(random(WIDTH, WIDTH, dtype=dtype), None)
    implementation = operators(ops)
    new_residual, normed = implementation.residual_norm(residual, weights, description, consumer, modulation)
    assert normed.dtype == dtype and relative_error(normed, expected) < 3 * CLOSE[dtype]
    assert relative_error(implementation.materialize(new_residual), total) < CLOSE[dtype]


@pytest.mark.parametrize("ops", [TORCH, NATIVE])
@pytest.mark.parametrize("norm", [name for name in NORMS if name != "layer"])
def test_a_float32_residual_is_normed_to_the_float16_inputs_of_a_layer(ops: str, norm: str) -> None:
    """The residual's values exceed float16's range, the normed ones do not. The residual stays in float32, and the
    normed tokens are close to float64."""
    tokens = 1e5 * random(BATCH, TOKENS, WIDTH)
    description: Any = NORMS[norm]
    layer = LayerWeights(random(WIDTH).half(), None)
    weights = None if norm == "adaptive" else layer
    scale, shift = random(BATCH, 2 * WIDTH).half().chunk(2, dim=-1)
    consumer = LayerWeights(random(WIDTH, WIDTH).half(), None)
    given = Residual(tokens.clone()), weights, description, consumer, Modulation(scale, shift)
    new_residual, normed = operators(ops).residual_norm(*given)
    expected = exact_norm(description, tokens, layer) * scale.double()[:, None] + shift.double()[:, None]
    assert new_residual.tokens.dtype == torch.float32 and normed.dtype == torch.float16
    assert relative_error(normed, expected) < CLOSE[torch.float16]


# --- heads ------------------------------------------------------------------------------------------------------------


@grid(ops=[TORCH, NATIVE], interleaved=[False, True], of_rows=[False, True], normed=[True, False],
      key_heads=[HEADS, KEY_HEADS], dtype=[torch.float32, torch.float16])
def test_queries_and_keys_that_are_normed_and_rotated_are_close_to_float64(
    ops: str, interleaved: bool, of_rows: bool, normed: bool, key_heads: int, dtype: torch.dtype
) -> None:
    """split_heads() splits a fused projection into queries, keys and values; values are neither normed nor rotated.
    interleaved: whether a rotated pair is two neighbouring channels or one of each half. of_rows: whether each row of
    the batch has its own positions."""
    angles = random(*((BATCH,) if of_rows else ()), TOKENS, HEAD // 2)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved)
    norm = LayerWeights(random(HEAD, dtype=dtype), None), RMSNorm("", HEAD, 1e-6)
    part = norm if normed else None
    parts = Heads(HEADS, part, rotary), Heads(key_heads, part, rotary), Heads(key_heads)
    projected = random(BATCH, TOKENS, (HEADS + 2 * key_heads) * HEAD, dtype=dtype)
    pieces = projected.split([number * HEAD for number in (HEADS, key_heads, key_heads)], dim=-1)
    query, key, value = (piece.unflatten(-1, (-1, HEAD)).transpose(1, 2).double() for piece in pieces)
    expected = []
    for heads in (query, key):
        if normed:
            heads = exact_operators.rms_norm(heads, norm[0].weight, 1e-6)
        cosines, sines = (vector if of_rows else vector[None] for vector in rotary[:2])
        expected.append(exact_operators.rotated(heads, cosines, sines, interleaved))
    found = operators(ops).split_heads(projected.clone(), parts)
    for ours, exact in zip(found, (*expected, value), strict=True):
        assert ours.dtype == dtype and relative_error(ours, exact) < CLOSE[dtype]


# --- feed-forward layers ----------------------------------------------------------------------------------------------


@grid(ops=[TORCH, NATIVE], activation=list(Activation), gate_first=[False, True], dtype=[torch.float32, torch.float16])
def test_a_gated_unit_is_close_to_float64_whichever_half_is_the_gate(
    ops: str, activation: Activation, gate_first: bool, dtype: torch.dtype
) -> None:
    """A linear layer computes value and gate at once; the output is value * activation(gate). gate_first: whether the
    gate is the first half of the layer's outputs."""
    x = random(BATCH, TOKENS, WIDTH, dtype=dtype)
    into = LayerWeights(random(64, WIDTH, dtype=dtype) / 7, None)
    value, gate = functional.linear(x.double(), into.weight.double()).chunk(2, dim=-1)
    if gate_first:
        value, gate = gate, value
    expected = value * exact_activation(activation, gate)
    consumer = LayerWeights(random(WIDTH, 32, dtype=dtype), None)
    output = operators(ops).gated_linear(x, into, GatedUnit(activation, gate_first), consumer)
    assert output.dtype == dtype and relative_error(output, expected) < CLOSE[dtype]


@grid(ops=[TORCH, NATIVE], activation=list(Activation), dtype=[torch.float32, torch.float16])
def test_a_linear_layer_with_an_activation_is_close_to_float64(
    ops: str, activation: Activation, dtype: torch.dtype
) -> None:
    x = random(BATCH, TOKENS, WIDTH, dtype=dtype)
    layer = LayerWeights(random(64, WIDTH, dtype=dtype) / 7, None)
    consumer = LayerWeights(random(WIDTH, 32, dtype=dtype), None)
    output = operators(ops).activated_linear(x, layer, activation, consumer)
    expected = exact_activation(activation, functional.linear(x.double(), layer.weight.double()))
    assert output.dtype == dtype and relative_error(output, expected) < CLOSE[dtype]


def exact_activation(activation: Activation, x: Tensor) -> Tensor:
    if activation is Activation.SIGMOID:
        return x.sigmoid()
    if activation is Activation.SILU:
        return x * x.sigmoid()
    if activation is Activation.GELU:
        return x * 0.5 * torch.special.erfc(-x * 0.5**0.5)
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def test_the_gate_is_the_second_half_of_the_channels_in_geglu_and_the_first_in_swiglu() -> None:
    x = random(3, 10)
    first, second = x.chunk(2, dim=-1)
    assert torch.equal(torch_ops.gated(x, GEGLU), first * functional.gelu(second))
    assert torch.equal(torch_ops.gated(x, SWIGLU), second * functional.silu(first))


@pytest.mark.parametrize("ops", [TORCH, NATIVE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_float32_residual_stays_in_float32_when_half_precision_layers_are_added(ops: str, dtype: torch.dtype) -> None:
    """The same layer is added twice in a row to a residual with values of about 1000. What was added is close to
    float64: rounding the residual to the layer's dtype would lose it."""
    tokens = 1000 * random(BATCH, TOKENS, WIDTH)
    x = random(BATCH, TOKENS, 32, dtype=dtype)
    layer = LayerWeights(random(WIDTH, 32, dtype=dtype) / 6, None)
    implementation = operators(ops)
    residual = Residual(tokens.clone())
    for _ in range(2):
        residual = implementation.add_linear(residual, x, layer)
    found = implementation.materialize(residual)
    added = 2 * functional.linear(x.double(), layer.weight.double())
    assert found.dtype == torch.float32 and relative_error(found.double() - tokens.double(), added) < CLOSE[dtype]


@grid(
    ops=[TORCH, NATIVE], gated=[False, True], normed=[False, True], biased=[False, True], wide=[False, True],
    dtype=DTYPES,
)
def test_a_layer_added_to_the_residual_with_a_norm_and_a_gate_is_close_to_float64(
    ops: str, gated: bool, normed: bool, biased: bool, wide: bool, dtype: torch.dtype
) -> None:
    """The same layer is added twice in a row. gated, normed: whether its output is multiplied by a gate, and normed
    before that. wide: whether the residual is in float32, while the layer is in dtype."""
    tokens = random(BATCH, TOKENS, WIDTH, dtype=torch.float32 if wide else dtype)
    x = random(BATCH, TOKENS, 32, dtype=dtype)
    layer = LayerWeights(random(WIDTH, 32, dtype=dtype) / 6, random(WIDTH, dtype=dtype) if biased else None)
    gate = random(BATCH, WIDTH, dtype=dtype) if gated else None
    norm = (LayerWeights(random(WIDTH, dtype=dtype), None), RMSNorm("", WIDTH, 1e-5)) if normed else None
    bias = None if layer.bias is None else layer.bias.double()
    update = functional.linear(x.double(), layer.weight.double(), bias)
    expected = tokens.double()
    if norm is not None:
        update = exact_operators.rms_norm(update, norm[0].weight, 1e-5)
    if gate is not None:
        update = update * gate.double()[:, None]
    implementation = operators(ops)
    residual = Residual(tokens.clone())
    for _ in range(2):
        residual = implementation.add_linear(residual, x, layer, gate, norm)
        expected = expected + update
    assert relative_error(implementation.materialize(residual), expected) < 2 * CLOSE[dtype]


# --- whole blocks -----------------------------------------------------------------------------------------------------


def leaf(path: str, weight: Tensor) -> Linear:
    """The description of a linear layer with this weight."""
    return Linear(path, weight.shape[1], weight.shape[0])


def weights_of(block: nn.Module, **fused: tuple[str, ...]) -> dict[str, LayerWeights]:
    """The weights of a block's layers by path, and those of fused layers by name."""
    found = {
        path: LayerWeights(module.weight, getattr(module, "bias", None))
        for path, module in block.named_modules() if isinstance(getattr(module, "weight", None), Tensor)
    }
    for name, paths in fused.items():
        found[name] = LayerWeights(torch.cat([found[path].weight for path in paths]), None)
    return found


def with_random_norms(block: nn.Module) -> nn.Module:
    """The block with random vectors (norm weights, biases) in place of ones and zeros, without gradients."""
    for parameter in block.parameters():
        if parameter.dim() == 1 or not parameter.any():
            parameter.data = random(*parameter.shape) / 2
    return block.to(DEVICE).requires_grad_(False)


def test_a_block_of_z_image_composed_of_our_operators_is_close_to_that_of_diffusers() -> None:
    """It has RMS norms before and after each layer, modulation by scales and tanh gates without shifts, interleaved
    rotary embeddings, and SwiGLU."""
    code = pytest.importorskip("diffusers.models.transformers.transformer_z_image")
    block: Any = with_random_norms(code.ZImageTransformerBlock(0, WIDTH, 3, 3, 1e-5, True))
    weights = weights_of(
        block, qkv=tuple(f"attention.{name}" for name in ("to_q", "to_k", "to_v")),
        gate_and_value=("feed_forward.w1", "feed_forward.w3"),
    )
    linear = {path: leaf(path, weights[path].weight) for path in weights if weights[path].weight.dim() == 2}
    attention = SelfAttention(
        FusedLinear("qkv", tuple(linear[f"attention.{name}"] for name in ("to_q", "to_k", "to_v"))),
        linear["attention.to_out.0"], 3, (RMSNorm("attention.norm_q", 16, 1e-5), RMSNorm("attention.norm_k", 16, 1e-5)),
    )
    gate_and_value = FusedLinear("gate_and_value", (linear["feed_forward.w1"], linear["feed_forward.w3"]))
    norms = {name: RMSNorm(name, WIDTH, 1e-5) for name in (
        "attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"
    )}
    tokens = random(BATCH, TOKENS, WIDTH)
    time = random(BATCH, WIDTH)
    angles = random(BATCH, TOKENS, HEAD // 2)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=DEVICE)
    mask[1, 5:] = False

    layers = TransformerLayers(weights, torch_ops, upcast_attention=False)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved=True)
    modulation = layers.linear(time, linear["adaLN_modulation.0"])
    attention_scale, attention_gate, feed_forward_scale, feed_forward_gate = modulation.chunk(4, dim=-1)
    residual = Residual(tokens)
    residual, normed = layers.norm(
        residual, norms["attention_norm1"], attention.query_key_value, Modulation(1 + attention_scale)
    )
    attended = layers.self_attention(attention, normed, rotary, mask[:, None, None])
    residual = layers.add(residual, attended, attention.out, attention_gate.tanh(), norms["attention_norm2"])
    residual, normed = layers.norm(residual, norms["ffn_norm1"], gate_and_value, Modulation(1 + feed_forward_scale))
    hidden = layers.gated_linear(normed, gate_and_value, SWIGLU, linear["feed_forward.w2"])
    residual = layers.add(
        residual, hidden, linear["feed_forward.w2"], feed_forward_gate.tanh(), norms["ffn_norm2"]
    )

    expected = block(tokens, mask, torch.polar(torch.ones_like(angles), angles), time)
    assert relative_error(torch_ops.materialize(residual), expected) < 1e-5


def test_a_block_of_krea_2_composed_of_our_operators_is_close_to_that_of_diffusers() -> None:
    """It has fewer key heads than query heads, a sigmoid gate on the attention, RMS norms that multiply by 1 + weight,
    modulation with shifts, and an attention mask."""
    code = pytest.importorskip("diffusers.models.transformers.transformer_krea2")
    heads = 4
    key_heads = 2
    width = 64
    block: Any = with_random_norms(code.Krea2TransformerBlock(width, 96, heads, key_heads, 1e-5))
    projections = tuple(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_gate"))
    weights = weights_of(block, projections=projections, gate_and_value=("ff.gate", "ff.up"))
    linear = {path: leaf(path, weights[path].weight) for path in weights if weights[path].weight.dim() == 2}
    together = FusedLinear("projections", tuple(linear[path] for path in projections))
    gate_and_value = FusedLinear("gate_and_value", (linear["ff.gate"], linear["ff.up"]))
    norms = [RMSNorm(path, width, 1e-5, plus_one=True) for path in ("norm1", "norm2")]
    query_norm, key_norm = (
        (weights[path], RMSNorm(path, HEAD, 1e-5, plus_one=True)) for path in ("attn.norm_q", "attn.norm_k")
    )
    tokens = random(BATCH, TOKENS, width)
    time = random(BATCH, 6 * width)
    angles = random(TOKENS, HEAD // 2)
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool, device=DEVICE)
    mask[0, :2] = False

    layers = TransformerLayers(weights, torch_ops, upcast_attention=False)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved=True)
    vectors = (time.unflatten(-1, (6, -1)) + block.scale_shift_table).unbind(1)
    modulation = Modulation(1 + vectors[0], vectors[1])
    residual, normed = layers.norm(Residual(tokens), norms[0], together, modulation)
    projected, gate = layers.linear(normed, together).split([(heads + 2 * key_heads) * HEAD, width], dim=-1)
    query, key, value = torch_ops.split_heads(projected, (
        Heads(heads, query_norm, rotary), Heads(key_heads, key_norm, rotary), Heads(key_heads),
    ))
    attended = layers.attend(query, key, value, mask[:, None, None])
    attended = layers.sigmoid_gated(attended, gate, linear["attn.to_out.0"])
    residual = layers.add(residual, attended, linear["attn.to_out.0"], vectors[2])
    residual, normed = layers.norm(residual, norms[1], gate_and_value, Modulation(1 + vectors[3], vectors[4]))
    hidden = layers.gated_linear(normed, gate_and_value, SWIGLU, linear["ff.down"])
    residual = layers.add(residual, hidden, linear["ff.down"], vectors[5])

    twice = tuple(torch.repeat_interleave(part, 2, dim=-1) for part in rotary[:2])
    expected = block(tokens, time[:, None], twice, mask[:, None, None])
    assert relative_error(torch_ops.materialize(residual), expected) < 1e-5
