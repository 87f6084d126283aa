"""Stored layers, whose weight a checkpoint stores in INT8 or FP8: the native operators compute them as exactly as the
torch operators do.

For such a layer, the host also quantizes the inputs (rows of tokens). The torch operators follow this rule; in the
native ones, a norm, gated unit or activation before the layer may write quantized rows. The error is measured against
float64 with the decoded weight.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_operators import relative_error, stored_layer
from grid import grid
from torch import Tensor

pytest.importorskip("triton", reason="needs Triton")

from lib_onediff.core.layer_weights import LayerWeights, LowRank, QuantizedWeight
from lib_onediff.core.leaves import AdaptiveNorm, LayerNorm, RMSNorm
from lib_onediff.core.operators import GEGLU, SWIGLU, Activation, Modulation, QuantizedTokens, Residual
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.cuda.kernels.operators import NativeOperators, VirtualConcatenation
from lib_onediff.devices.torch import operators as torch_ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.float16
WIDTH, OUT, TOKENS = 256, 64, 6
# The largest allowed ratio of the native operators' error to that of the torch operators.
WORSE = 1.15
OPS = NativeOperators()


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, HALF)


def stored(out: int, width: int, rotation: int = 0, bias: bool = True, one_scale: bool = False) -> LayerWeights:
    """A layer whose weight exists in INT8 alone, with outputs about as large as its inputs.

    rotation: the group size of the Hadamard rotation of its inputs (ConvRot); 0: none. one_scale: whether the weight
    has one scale, instead of one for each output row.
    """
    generator = torch.Generator().manual_seed(out + width)
    values = torch.randint(-128, 128, (out, width), generator=generator).to(DEVICE, torch.int8)
    scales = (torch.rand((1, 1 if one_scale else out), generator=generator).to(DEVICE) + 0.5) / 74 / width**0.5
    weight = torch.empty((out, width), dtype=HALF, device="meta")
    return LayerWeights(weight, random(out) if bias else None, (QuantizedWeight(values, scales, rotation),))


def with_lora(layer: LayerWeights) -> LayerWeights:
    """The layer with a random LoRA of rank 4, which reads the unquantized inputs."""
    out, width = layer.weight.shape
    down, up = random(4, width, seed=1) / width**0.5, random(out, 4, seed=2)
    return layer._replace(low_rank=LowRank(down, ((0, up),)))


def assert_as_close_as_torch(work: Any, *layers: LayerWeights) -> None:
    """Check that the native operators' error is at most WORSE times that of the torch operators, both against float64
    with decoded weights. For the torch operators, LoRAs are removed, because with a LoRA they do not quantize the
    input.

    work: computes an output from operators, layers, and a function that converts a tensor to the dtype.
    """
    plain = [layer._replace(low_rank=None) for layer in layers]
    ours = work(OPS, *layers, torch.Tensor.clone)
    exact = work(torch_ops, *map(stored_layer, layers), torch.Tensor.double)
    torchs = work(torch_ops, *plain, torch.Tensor.clone)
    without = work(torch_ops, *map(stored_layer, plain), torch.Tensor.double)
    assert ours.dtype == torchs.dtype
    assert relative_error(ours, exact) <= WORSE * relative_error(torchs, without)


@grid(rotation=[0, 64, 256], lora=[False, True], one_scale=[False, True], bias=[True, False])
def test_a_stored_linear_layer_is_as_exact_as_with_the_torch_operators(
    rotation: int, lora: bool, one_scale: bool, bias: bool
) -> None:
    """rotation: the group size of the Hadamard rotation of the inputs; 0: none. one_scale: whether the weight has one
    scale, instead of one for each output row."""
    layer = stored(OUT, WIDTH, rotation, bias, one_scale)
    layer = with_lora(layer) if lora else layer

    def work(ops: Any, layer: LayerWeights, of: Any) -> Tensor:
        return ops.linear(of(random(2, TOKENS, WIDTH)), layer)

    assert_as_close_as_torch(work, layer)


@grid(rotation=[0, 16, 256], lora=[False, True], norm=["layer", "adaptive", "rms"])
def test_a_norm_before_a_stored_layer_is_as_exact_as_with_the_torch_operators(
    rotation: int, lora: bool, norm: str
) -> None:
    """rotation: the group size of the layer's Hadamard rotation; 0: none. The native norm itself writes quantized rows,
    in one launch, if rotation is 0 or 256 (found); the norm of the torch operators never does. lora: whether the layer
    has a LoRA, which needs the unquantized rows too."""
    layer = stored(OUT, WIDTH, rotation)
    layer = with_lora(layer) if lora else layer
    found = []

    def work(ops: Any, layer: LayerWeights, of: Any) -> Tensor:
        tokens = of(random(2, TOKENS, WIDTH, seed=3))
        # A residual of a transformer in float16 is in float32.
        residual = Residual(tokens.float() if tokens.dtype == HALF and norm != "layer" else tokens)
        vectors = LayerWeights(of(random(WIDTH)), of(random(WIDTH, seed=1)))
        modulation = Modulation(of(random(2, WIDTH)), of(random(2, WIDTH, seed=1)))
        if norm == "layer":
            _, rows = ops.residual_norm(residual, vectors, LayerNorm("", WIDTH, 1e-5), layer)
        elif norm == "adaptive":
            _, rows = ops.residual_norm(residual, None, AdaptiveNorm(WIDTH, 1e-5), layer, modulation)
        else:
            _, rows = ops.residual_norm(residual, vectors, RMSNorm("", WIDTH, 1e-5), layer)
        found.append(isinstance(rows, QuantizedTokens))
        if isinstance(rows, QuantizedTokens):
            assert (rows.plain is not None) == lora, "LoRAs read the same rows as they are"
        return ops.linear(rows, layer)

    assert_as_close_as_torch(work, layer)
    assert found == [rotation in (0, 256), *[False] * 3]


@grid(rotation=[0, 256], lora=[False, True], gated=[False, True], bias=[False, True], norm=[False, True])
def test_a_stored_layer_added_to_the_residual_is_as_exact_as_with_the_torch_operators(
    rotation: int, lora: bool, gated: bool, bias: bool, norm: bool
) -> None:
    """The layer's output is added to the residual twice in a row. gated, norm: whether it is multiplied by a gate, and
    the first time normed, before it is added. rotation: the group size of the layer's Hadamard rotation; 0: none."""
    layer = stored(OUT, WIDTH, rotation, bias)
    layer = with_lora(layer) if lora else layer

    def work(ops: Any, layer: LayerWeights, of: Any) -> Tensor:
        residual = Residual(of(random(2, TOKENS, OUT)), None, of(random(OUT, seed=3)))
        gate = of(random(2, OUT)) if gated else None
        behind = (LayerWeights(of(random(OUT)), None), RMSNorm("", OUT, 1e-5)) if norm else None
        x = of(random(2, TOKENS, WIDTH))
        return ops.materialize(ops.add_linear(ops.add_linear(residual, x, layer, gate, behind), x, layer, gate))

    assert_as_close_as_torch(work, layer)


@grid(rotation=[0, 256], lora=[False, True], way=["geglu", "swiglu", "gelu", "tanh"])
def test_a_feed_forward_of_stored_layers_is_as_exact_as_with_the_torch_operators(
    rotation: int, lora: bool, way: str
) -> None:
    """way: the gated unit or activation between the two layers. lora: whether the second layer has a LoRA, which needs
    the unquantized rows: one launch of the unit writes both kinds. rotation: the group size of the second layer's
    Hadamard rotation; 0: none."""
    hidden = 256
    into = stored(hidden if way in ("gelu", "tanh") else 2 * hidden, 64)
    out = stored(OUT, hidden, rotation)
    out = with_lora(out) if lora else out

    def work(ops: Any, into: LayerWeights, out: LayerWeights, of: Any) -> Tensor:
        x = of(random(2, TOKENS, 64))
        if way in ("gelu", "tanh"):
            activation = Activation.GELU if way == "gelu" else Activation.GELU_TANH
            rows = ops.activated_linear(x, into, activation, out)
        else:
            rows = ops.gated_linear(x, into, GEGLU if way == "geglu" else SWIGLU, out)
            assert ops is not OPS or (rows.plain is not None) == lora, "one launch makes both"
        return ops.linear(rows, out)

    assert_as_close_as_torch(work, into, out)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("lora", [True, False])
def test_a_stored_1x1_convolution_is_as_exact_as_with_the_torch_operators(together: bool, lora: bool) -> None:
    """together: whether the input is two feature maps, which the kernel concatenates while it reads them."""
    layer = stored(OUT, WIDTH, 256)
    layer = with_lora(layer) if lora else layer

    def work(ops: Any, layer: LayerWeights, of: Any) -> Tensor:
        image = of(random(2, WIDTH, 2, 3))
        if together and ops is OPS:
            return ops.pointwise(VirtualConcatenation(image[:, :96], image[:, 96:]), layer)
        if not layer.weight.is_meta:
            layer = layer._replace(weight=layer.weight[:, :, None, None])
        return ops.pointwise(image, layer)

    assert_as_close_as_torch(work, layer)


@pytest.mark.parametrize("shape", [(OUT, 40), (40, 48), (24, 64)], ids=str)
def test_a_stored_layer_of_a_size_that_no_kernel_supports_is_computed_by_torch(shape: tuple[int, int]) -> None:
    """shape: the layer's outputs and inputs. The output equals that of the torch operators to the bit."""
    layer, x = stored(*shape), random(2, TOKENS, shape[1])
    assert torch.equal(OPS.linear(x, layer), torch_ops.linear(x, layer))


def test_a_stored_layer_of_a_float32_model_is_computed_by_torch() -> None:
    """The norm before the layer does not quantize either. The output equals that of the torch operators to the bit."""
    layer, x = stored(OUT, WIDTH, 256), random(2, TOKENS, WIDTH).float()
    layer = layer._replace(weight=layer.weight.float(), bias=layer.bias.float())
    normed = OPS.residual_norm(Residual(x), LayerWeights(x[0, 0], x[0, 1]), LayerNorm("", WIDTH, 1e-5), layer)[1]
    assert isinstance(normed, Tensor)
    assert torch.equal(OPS.linear(x, layer), torch_ops.linear(x, layer))


def test_inputs_are_not_quantized_for_a_weight_that_onediff_itself_has_quantized() -> None:
    """For a weight in INT8 from a file (stored=True), the layer's inputs are quantized to eight bits too, by the host's
    rule, so that the error is above 1e-3. A weight that OneDiff has quantized (stored=False) is decoded, and the inputs
    stay in float16."""
    layer, x = stored(OUT, WIDTH), random(2, TOKENS, WIDTH)
    [quantized] = layer.low_bit
    ours = layer._replace(low_bit=(quantized._replace(stored=False),))
    exact = torch_ops.linear(x.double(), stored_layer(layer))
    assert relative_error(OPS.linear(x, ours), exact) < 1e-3 < relative_error(OPS.linear(x, layer), exact)


@pytest.mark.parametrize("values", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_stored_float8_weight_is_decoded_on_a_gpu_that_cannot_multiply_float8(values: torch.dtype) -> None:
    """result_dtype: the function that says in which dtype a GPU multiplies; here None: it cannot. The norm before the
    layer does not quantize, and the output equals that of the torch operators to the bit."""
    cannot = NativeOperators(result_dtype=lambda device, dtype: None)
    weight = QuantizedWeight(random(OUT, WIDTH).to(values), torch.full((1, 1), 0.1, device=DEVICE))
    layer = LayerWeights(torch.empty(OUT, WIDTH, dtype=HALF, device="meta"), random(OUT), (weight,))
    x = random(2, TOKENS, WIDTH)
    vectors = LayerWeights(random(WIDTH), random(WIDTH))
    _, rows = cannot.residual_norm(Residual(x), vectors, LayerNorm("", WIDTH, 1e-5), layer)
    assert isinstance(rows, Tensor)
    assert torch.equal(cannot.linear(rows, layer), torch_ops.linear(rows, layer))


def test_a_rotation_whose_group_size_does_not_divide_the_inputs_of_the_layer_is_refused() -> None:
    layer = stored(OUT, 320, 256)
    with pytest.raises(Refusal, match="ConvRot groups of 256 do not divide a layer of 320 inputs"):
        OPS.linear(random(1, 320), layer)
