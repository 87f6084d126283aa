"""The operators of the native backend.

Our kernels compute what torch would compute by several launches, or by reading a tensor twice. Large matrix products
are in eight bits if their weights are (weights/low_bit.py). Images are in channels-last memory format.
"""
from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ....core.card import TuningCache
from ....core.layer_weights import LayerWeights, LowRank, QuantizedWeight, merged
from ....core.leaves import GATED, NORMED, PLAIN_INPUT, AdaptiveNorm, Convolution, GroupNorm, LayerNorm, RMSNorm
from ....core.operators import (
    GEGLU,
    Activation,
    Filled,
    GatedUnit,
    Heads,
    Modulation,
    QuantizedImage,
    QuantizedTokens,
    Residual,
    WeightedNorm,
)
from ....weights.low_bit import FP8, INT8, has_kernel
from ...torch import operators as torch_ops
from ...torch.attention import FEW_KEYS, sums_in_half
from ...torch.operators import bias_or_zeros, channels_last
from ...torch.quantized import decoded, rotated
from ..low_bit import float8
from . import images as native_images
from . import launch_config as configs
from . import products, rounding
from . import tokens as native_tokens
from .input_formats import Choose, InputFormats, ResultDtype, rule_for
from .launch_config import Kernel, LaunchConfig, Launches, attention_kernel, image_class, row_class
from .launching import ALIGNED
from .residuals import contiguous, updated
from .rounding import Rule


class VirtualConcatenation(NamedTuple):
    """The concatenation of two images along the channels, which is never computed: the kernels read both images. first,
    second: (batch, channels, height, width), which differ only in the number of channels."""

    first: Tensor
    second: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the concatenation."""
        batch, channels, height, width = self.first.shape
        return torch.Size((batch, channels + self.second.shape[1], height, width))


# After this many group norms in a row that wrote 16 bits, additions no longer measure the bounds that a norm in eight
# bits needs. It is more than the group norms that a network has at one size of feature maps.
MOST_NORMS_AT_A_SIZE = 16
# An image, as the operator before it writes it.
Image = Tensor | VirtualConcatenation
# The input of a linear layer, as the operator before it writes it.
Rows = Tensor | QuantizedTokens


class NativeOperators:
    """The operators of core.operators.Operators, where arguments and results are described. Our kernels compute the
    cases that the served networks have; torch's operators compute the others.

    consumer, in the methods: the weights of the layer that reads the result. If it has an 8-bit weight, the result may
    be in eight bits (QuantizedTokens, QuantizedImage): see input_formats.py. If a weight exists in eight bits only,
    LayerWeights.weight is a tensor on torch's meta device, which has the layer's dtype and shape.

    launches: the launch config of each kernel; None: each kernel's first one.
    attention: computes attention where our own kernel does not; as Operators.attention. result_dtype, choose: see
        input_formats.py. Without choose, no layer is computed in eight bits if its weight exists in the model's dtype.
    """

    def __init__(
        self, launches: Launches | None = None, attention: Callable[..., Tensor] = torch_ops.attention,
        result_dtype: ResultDtype = lambda device, dtype: dtype, choose: Choose = lambda product, dtype, kinds: None,
    ) -> None:
        self._launches = launches or Launches(TuningCache())
        self._attention = attention
        self._result_dtype = result_dtype
        self._formats = InputFormats(result_dtype, choose)
        # How many group norms have written 16 bits since the last one that wrote eight bits.
        self._exact_norms = MOST_NORMS_AT_A_SIZE
        # The statistics that were measured while an image was written, as long as the image exists.
        self._measured: MutableMapping[Tensor, native_images.PartialStatistics] = WeakIdKeyDictionary()

    # Torch computes these in one launch.
    sinusoids = staticmethod(torch_ops.sinusoids)
    join = staticmethod(torch_ops.join)
    silu = staticmethod(torch_ops.silu)
    rms_norm = staticmethod(torch_ops.rms_norm)
    image_to_tokens = staticmethod(torch_ops.image_to_tokens)
    tokens_to_image = staticmethod(torch_ops.tokens_to_image)

    def linear(self, x: Rows, layer: LayerWeights) -> Tensor:
        """A linear layer with its LoRAs: (..., in) -> (..., out), in the layer's dtype. x may be in eight bits already.
        """
        if isinstance(x, QuantizedTokens):
            return self._with_loras(x, layer, layer.bias).view(*x.shape, -1)
        return self._quantized_linear(x, layer) if layer.weight.is_meta else torch_ops.linear(x, layer)

    def _quantized_linear(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """linear() for an input x in the model's dtype, and a layer whose weight exists in eight bits only. Where a
        product in eight bits is possible, x is quantized here; otherwise the weight is decoded."""
        quantized = layer.low_bit[0]
        dtype = layer.weight.dtype
        if not quantized.stored:
            # Low-bit has quantized the weight. An input that no operator has quantized stays in 16 bits, such as a
            # prompt's tokens, because text encoders have outliers.
            return torch_ops.linear(x, LayerWeights(decoded(quantized, dtype), layer.bias))
        kind = self._formats.of_stored(layer)
        if kind is None:
            return torch_ops.linear(x, layer)
        # Our kernels rotate groups of one size only.
        given = x if quantized.rotation == rounding.GROUP else rotated(x, quantized)
        rows = rounding.rounded(given, kind, rule=rule_for(layer))
        return self._with_loras(rows._replace(plain=x), layer, layer.bias).view(*x.shape[:-1], -1)

    def _with_loras(self, x: QuantizedTokens, layer: LayerWeights, bias: Tensor | None) -> Tensor:
        """x @ weight^T + bias plus the products of the layer's LoRAs, for an x in eight bits: (rows, out) in the
        layer's dtype. The LoRAs read x.plain. If x.plain is None, nothing is added, because the LoRAs are merged into
        the 8-bit weight already."""
        dtype = layer.weight.dtype
        low_rank = layer.low_rank
        if low_rank is None or x.plain is None:
            return self._product(x, layer, bias).to(dtype)
        rows = x.plain.flatten(0, -2)
        if x.values.dtype != INT8.dtype or low_rank.scales or low_rank.down.dtype != dtype:
            return torch_ops.add_low_rank(self._product(x, layer, bias).to(dtype), rows, low_rank)
        down, up = products.joint_loras(low_rank, len(layer.weight))
        return self._product(x, layer, bias, (self._down_product(rows.contiguous(), down), up))

    def _down_product(self, rows: Tensor, down: Tensor) -> Tensor:
        """The product of rows (rows, in) and the down matrices of LoRAs (ranks, in): (rows, ranks). For LoRAs of a
        layer whose weight is stored in INT8. Adds the size to Launches.down_products, to be measured."""
        count = len(rows)
        shape_class = products.product_class(count, *down.shape)
        self._launches.down_products.add((count, *down.shape, down.dtype))
        return products.down_product(rows, down, self._launches.of(configs.DOWN_PRODUCT, shape_class, down.dtype))

    def pointwise(self, image: Image, layer: LayerWeights) -> Tensor:
        """A 1x1 convolution as a GEMM, with its LoRAs: (batch, in, h, w) -> (batch, out, h, w). For a
        VirtualConcatenation, the sum of two products, one for each image; if the weight exists in eight bits only, the
        images are concatenated first."""
        first, second = halves(image)
        weight = layer.weight.flatten(1)
        channels = first.shape[1]
        batch, _, height, width = first.shape
        if weight.is_meta:
            together = rows(first) if second is None else torch.cat([rows(first), rows(second)], dim=1)
            pixels = self._quantized_linear(together, layer._replace(weight=weight))
            return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2)
        if second is None:
            pixels = functional.linear(rows(first), weight, layer.bias)
        else:
            pixels = functional.linear(rows(second), weight[:, channels:], layer.bias)
            pixels.addmm_(rows(first), weight[:, :channels].t())
        if layer.low_rank is not None:
            down = layer.low_rank.down.flatten(1)
            ups = layer.low_rank.ups
            if second is not None and layer.low_rank.scales:
                # The product must be rounded once, not once for each half.
                together = torch.cat([rows(first), rows(second)], dim=1)
                torch_ops.add_low_rank(pixels, together, layer.low_rank)
            else:
                torch_ops.add_low_rank(pixels, rows(first), layer.low_rank._replace(down=down[:, :channels]))
                if second is not None:
                    torch_ops.add_low_rank(pixels, rows(second), LowRank(down[:, channels:], ups))
        return pixels.view(batch, height, width, -1).permute(0, 3, 1, 2)

    def convolution(self, image: Any, layer: LayerWeights, shape: Convolution) -> Tensor:
        """A square 2D convolution: (batch, in, h, w) -> (batch, out, h, w) in channels-last memory. Our kernel adds the
        bias, in the pass that measures the statistics for the next group norm. image may be a QuantizedImage; then the
        layer must have no bias."""
        if isinstance(image, QuantizedImage):
            shape_class = products.convolution_class(image.values, shape.out_channels)
            config = self._launches.of(configs.CONVOLUTIONS[image.values.dtype], shape_class, layer.weight.dtype)
            # The forward adds the bias later, with the shift or with the residual.
            assert layer.bias is None
            return products.convolution(image, weight_like(image, layer), layer.weight.dtype, config)
        image = channels_last(image)
        if layer.bias is None or shape.out_channels % ALIGNED:
            return self._convolution(image, layer, shape)
        # torch would add the bias in a pass of its own, which is slower.
        output = channels_last(self._convolution(image, layer._replace(bias=None), shape))
        self._add(None, output, layer.bias, output)
        return output

    def _convolution(self, image: Tensor, layer: LayerWeights, shape: Convolution) -> Tensor:
        """As convolution, for an image in the layer's dtype and channels-last memory; the layer's bias is added too.
        Sums are in float16 if the settings allow it and that was measured to be faster. While the settings allow it,
        the size is added to Launches.convolutions, to be measured."""
        weight = layer.weight
        is_half = image.dtype == weight.dtype == torch.float16
        is_plain = has_kernel(shape) and layer.bias is None and layer.low_rank is None
        if sums_in_half() and is_half and is_plain and weight.is_contiguous(memory_format=torch.channels_last):
            pixels = image.permute(0, 2, 3, 1)
            self._launches.convolutions.add((*pixels.shape, len(weight)))
            shape_class = products.convolution_class(pixels, len(weight))
            config = self._launches.of(configs.CONVOLUTIONS[image.dtype], shape_class, image.dtype)
            if config != configs.LIBRARY:
                return products.half_sums_convolution(image, weight, config)
        return torch_ops.convolution(image, layer, shape)

    def group_norm(
        self, image: Image, layer: LayerWeights, norm: GroupNorm, silu: bool, shift: Tensor | None = None,
        consumer: LayerWeights | None = None,
    ) -> Any:
        """The group norm of image + shift (batch, channels), followed by SiLU if silu. Returns a QuantizedImage if the
        consumer's input is in eight bits (InputFormats.of_image), otherwise a tensor in channels-last memory. consumer:
        None if the next layer is unknown."""
        first, second = halves(image)
        kind = self._formats.of_image(image.shape, norm.groups, consumer)
        if consumer is not None:
            self._exact_norms = 0 if kind is not None else self._exact_norms + 1
        measured = self._measured.get(first), None if second is None else self._measured.get(second)
        return native_images.group_norm(
            first, second, layer.weight, bias_or_zeros(layer), norm.groups, norm.eps, silu, shift,
            measured, self._config(configs.STATISTICS, first), self._config(configs.APPLICATION, first), kind,
        )

    def residual_norm(
        self, residual: Residual, layer: LayerWeights | None, norm: LayerNorm | RMSNorm | AdaptiveNorm,
        consumer: LayerWeights, modulation: Modulation | None = None,
    ) -> tuple[Residual, Rows]:
        """(the residual with its update added, its norm in the format of the consumer's input). The update is added in
        place, so the given residual must not be used afterwards. layer: the norm's weight and bias; None for an
        AdaptiveNorm."""
        dtype = consumer.weight.dtype
        if isinstance(norm, LayerNorm) and layer is not None and modulation is None:
            return self._layer_norm(residual, layer, norm, consumer)
        # The kernel adds the residual's update, but no biases.
        if residual.bias is not None or residual.deferred_bias is not None:
            residual = Residual(self.materialize(residual))
        elif not rounding.has_norm_kernel(residual, layer, norm, modulation, dtype):
            residual = updated(residual)
        if not isinstance(norm, LayerNorm) and rounding.has_norm_kernel(residual, layer, norm, modulation, dtype):
            kind, is_plain_too = self._formats.with_plain(residual.tokens, consumer, NORMED)
            residual = contiguous(residual)
            rule = Rule.OURS if kind is None else rule_for(consumer)
            return rounding.residual_norm(residual, layer, norm, modulation, dtype, kind, rule, is_plain_too)
        whole, normed = torch_ops.residual_norm(residual, layer, norm, consumer, modulation)
        return whole, self._rounded(normed, consumer)

    def _layer_norm(
        self, residual: Residual, layer: LayerWeights, norm: LayerNorm, consumer: LayerWeights
    ) -> tuple[Residual, Rows]:
        """residual_norm for a layer norm with a weight and without modulation. Biases of the residual stay deferred."""
        kind, is_plain_too = self._formats.with_plain(residual.tokens, consumer, NORMED)
        # The kernel that writes eight bits adds an update, but applies no gate or norm to it.
        if kind is None or residual.gate is not None or residual.norm is not None:
            residual = updated(residual)
        residual = contiguous(residual)
        config = self._launches.of(configs.LAYER_NORM, row_class(norm.width), consumer.weight.dtype)
        if kind is not None:
            rule = rule_for(consumer)
            given = layer.weight, layer.bias, norm.eps
            return rounding.layer_norm(residual, *given, kind, config, rule, is_plain_too)
        return native_tokens.layer_norm(residual, layer.weight, layer.bias, norm.eps, config)

    def add_linear(
        self, residual: Residual, x: Rows, layer: LayerWeights, gate: Tensor | None = None,
        norm: WeightedNorm | None = None,
    ) -> Residual:
        """residual + gate * norm(linear(x, layer)), without gate or norm if it is None. The given residual must not be
        used afterwards.

        Without gate, norm and 8-bit weight, and with tokens in the layer's dtype, the GEMM itself adds to the
        residual's tokens, in place. Otherwise, the product becomes the residual's update, which the next norm adds.
        """
        # In a float16 network the tokens may be in float32, and no GEMM adds float16 products to those.
        is_wide = residual.tokens.dtype != layer.weight.dtype
        if gate is not None or norm is not None or is_wide:
            return self._add_at_next_norm(residual, x, layer, gate, norm)
        x = self._rounded(x, layer)
        if not isinstance(x, QuantizedTokens) and not layer.weight.is_meta:
            return self._add_in_place(updated(residual), x, layer)
        if residual.bias is not None or residual.update is not None:
            residual = Residual(self.materialize(residual))
        # No library adds an 8-bit product to its output. The next norm adds it, and also applies float8's row scales.
        if isinstance(x, QuantizedTokens):
            update, scales = self._update(x, layer)
        else:
            update, scales = self._quantized_linear(x, layer._replace(bias=None)), None
        return Residual(residual.tokens, residual.deferred_bias, layer.bias, update, scales)

    def _add_at_next_norm(
        self, residual: Residual, x: Rows, layer: LayerWeights, gate: Tensor | None, norm: WeightedNorm | None
    ) -> Residual:
        """add_linear with a gate or a norm, or with tokens in float32: the product becomes the residual's update, which
        the kernel of the next norm adds."""
        tokens = self.materialize(residual)
        x = self._rounded(x, layer)
        # The gate and the norm apply to the bias too, so the bias must be in the product.
        if layer.bias is not None or not isinstance(x, QuantizedTokens):
            return Residual(tokens, update=self.linear(x, layer), gate=gate, norm=norm)
        return Residual(tokens, None, None, *self._update(x, layer), gate, norm)

    def _add_in_place(self, residual: Residual, x: Tensor, layer: LayerWeights) -> Residual:
        """add_linear with a weight in the model's dtype and without gate and norm: the GEMM adds to the residual's
        tokens in place, and the layer's bias becomes the residual's. LoRAs are added too, or merged into a copy of the
        weight if that is faster. The residual must have no update."""
        # The GEMM adds to its output at no cost, but not a bias as well: the biases are deferred.
        if residual.bias is not None:
            residual = Residual(self.materialize(residual))
        tokens = residual.tokens.contiguous()
        if torch_ops.merges(layer, x.numel()):
            layer = merged(layer)
        tokens.view(-1, tokens.shape[-1]).addmm_(x.flatten(0, -2), layer.weight.t())
        if layer.low_rank is not None:
            torch_ops.add_low_rank(tokens, x, layer.low_rank)
        return Residual(tokens, residual.deferred_bias, layer.bias)

    def materialize(self, residual: Residual) -> Tensor:
        """The residual's value, as one tensor. An update is added to the residual's tokens in place, so the given
        residual must not be used afterwards. The result is a new tensor if the residual has biases, otherwise the
        tokens themselves."""
        config = self._launches.of(configs.LAYER_NORM, row_class(residual.tokens.shape[-1]), residual.tokens.dtype)
        return native_tokens.materialize(updated(residual), config)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, upcast: bool, mask: Tensor | Filled | None = None
    ) -> Tensor:
        """Softmax attention over (batch, heads, tokens, head width). upcast, mask: see Operators.attention.

        Uses our own kernel for cross-attentions: at most FEW_KEYS keys, half precision, no mask, no upcast, as many
        heads of keys as of queries, a head width in tokens.ATTENTION_WIDTHS, and heads that are adjacent in memory; but
        not if the launch config to use is LIBRARY. In all other cases, uses the attention given to the constructor.
        """
        width = query.shape[3]
        few = key.shape[2] <= FEW_KEYS and query.dtype in native_tokens.ATTENTION_DTYPES and not upcast
        is_plain = mask is None and key.shape[1] == query.shape[1] and width in native_tokens.ATTENTION_WIDTHS
        if few and is_plain and all(map(native_tokens.heads_lie_beside, (query, key, value))):
            config = self._launches.of(attention_kernel(width), str(width), query.dtype)
            if config != configs.LIBRARY:
                return native_tokens.attention(query, key, value, config)
        return self._attention(query, key, value, upcast, mask)

    def gated(self, tokens: Tensor, unit: GatedUnit, consumer: LayerWeights) -> Rows:
        """A gated linear unit: (..., 2 n) -> (..., n), in the format of the consumer's input."""
        numbers, gates = tokens.chunk(2, dim=-1)
        if unit.gate_first:
            numbers, gates = gates, numbers
        return self._gated(numbers, gates, unit.activation, consumer, GATED)

    def sigmoid_gated(self, x: Tensor, gate: Tensor, consumer: LayerWeights) -> Rows:
        """x * sigmoid(gate), of (batch, tokens, width) each, in the format of the consumer's input."""
        return self._gated(x, gate, Activation.SIGMOID, consumer, PLAIN_INPUT)

    def _gated(
        self, numbers: Tensor, gates: Tensor, activation: Activation, consumer: LayerWeights, source: str
    ) -> Rows:
        """numbers * activation(gates), both (..., n), in the format of the consumer's input. source: see InputFormats.
        """
        if activation not in native_tokens.ACTIVATIONS:
            return self._rounded(numbers * torch_ops.activated(gates, activation), consumer)
        kind, is_plain_too = self._formats.with_plain(numbers, consumer, source)
        if kind is not None:
            return rounding.gated(numbers, gates, activation, kind, rule_for(consumer), is_plain_too)
        config = self._launches.of(configs.GEGLU, row_class(numbers.shape[-1]), numbers.dtype)
        return native_tokens.gated(numbers, gates, activation, config)

    def gated_linear(self, x: Rows, layer: LayerWeights, unit: GatedUnit, consumer: LayerWeights) -> Rows:
        """gated(linear(x, layer), unit, consumer): (..., in) -> (..., out / 2).

        One kernel computes the product and its GEGLU, if that was measured to be faster, in two cases: in half
        precision, for a consumer without an 8-bit weight and a layer without LoRAs; and in float8, if x is in float8
        and the consumer reads float8. The layer must have a bias in either case. Otherwise, they are computed one after
        the other.
        """
        if unit != GEGLU:
            return self.gated(self.linear(x, layer), unit, consumer)
        dtype = layer.weight.dtype
        scale = layer.gated_scale
        if isinstance(x, QuantizedTokens):
            count = len(x.values)
            config = self._launches.of(configs.GATED_PRODUCT, products.product_class(count, *layer.weight.shape), dtype)
            both_in_fp8 = x.values.dtype == FP8.dtype and self._formats.of_rows(count, consumer, GATED) is FP8
            if both_in_fp8 and config != configs.LIBRARY and scale is not None and layer.bias is not None:
                return products.gated_product(x, weight_like(x, layer), layer.bias, scale, config)
        elif not consumer.low_bit:
            width = x.shape[-1]
            shape_class = products.product_class(x.numel() // width, *layer.weight.shape)
            config = self._launches.of(configs.EXACT_GATED_PRODUCT, shape_class, dtype)
            weight = layer.weight
            bias = layer.bias
            is_plain = config != configs.LIBRARY and layer.low_rank is None and not weight.is_meta
            # The kernel needs contiguous weights, and a host's may be views that are not.
            if is_plain and bias is not None and weight.is_contiguous() and bias.is_contiguous():
                tokens = x.contiguous().view(-1, width)
                return products.exact_gated_product(tokens, weight, bias, config).view(*x.shape[:-1], -1)
        return self.gated(self.linear(x, layer), unit, consumer)

    def activated_linear(self, x: Rows, layer: LayerWeights, activation: Activation, consumer: LayerWeights) -> Rows:
        """activation(linear(x, layer)): (..., in) -> (..., out), in the format of the consumer's input."""
        product = self.linear(x, layer)
        if activation is not Activation.GELU:
            return self._rounded(torch_ops.activated(product, activation), consumer)
        kind = self._formats.of_tokens(product, consumer, PLAIN_INPUT)
        if kind is None and self._formats.reads_both(consumer):
            return rounding.gelu_and_rounded(product, rule_for(consumer))
        if kind is None:
            return native_tokens.gelu(product)
        return rounding.rounded(product, kind, gelu=True, rule=rule_for(consumer))

    def split_heads(self, projected: Tensor, parts: Sequence[Heads]) -> list[Tensor]:
        """(batch, tokens, heads of all parts * head width) -> one (batch, heads, tokens, head width) for each part,
        with its norm and rotary embedding applied. If a part has a norm, our kernel may overwrite `projected`; the
        results may be views of it in any case."""
        if native_tokens.has_heads_kernel(projected, parts):
            return native_tokens.normed_heads(projected, parts)
        return torch_ops.split_heads(projected, parts)

    def residual_add(self, image: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        """image + update + bias (channels,), as a new image in channels-last memory. Measures the statistics for the
        next group norm in the same pass."""
        update = channels_last(update)
        output = torch.empty_like(update, memory_format=torch.channels_last)
        self._add(channels_last(image), update, bias, output)
        return output

    def concatenate(self, image: Tensor, skip: Tensor) -> VirtualConcatenation:
        """image and skip, concatenated along the channels. Copies nothing: see VirtualConcatenation."""
        return VirtualConcatenation(image, skip)

    def resize(self, image: Tensor, height: int, width: int) -> Tensor:
        """An image (batch, channels, h, w), resized to (height, width) by nearest neighbour, in channels-last memory.
        """
        return native_images.resize(channels_last(image), height, width)

    def _add(self, image: Tensor | None, update: Tensor, bias: Tensor | None, output: Tensor) -> None:
        """Write image + update + bias to output; image and bias may be None. The output's statistics are measured in
        the same pass. They are kept for the group norm that follows, unless the image is so small that this norm does
        not use them (images.SMALL_IMAGE_PIXELS)."""
        config = self._config(configs.ADDITION, output)
        # If a norm at this size has written eight bits, the next one may too, and needs the bounds.
        bounded = self._exact_norms < MOST_NORMS_AT_A_SIZE
        measured = native_images.add_and_measure(image, update, bias, output, config, bounded)
        if output.shape[2] * output.shape[3] > native_images.SMALL_IMAGE_PIXELS:
            self._measured[output] = measured

    def _config(self, kernel: Kernel, image: Tensor) -> LaunchConfig:
        """The launch config of a kernel that processes this image, by the class of its size and its dtype."""
        return self._launches.of(kernel, image_class(image.shape[2] * image.shape[3]), image.dtype)

    # --- in eight bits --------------------------------------------------------------------------------------------

    def _rounded(self, x: Rows, consumer: LayerWeights) -> Rows:
        """Tokens in the format of the consumer's input. Unchanged if that is the model's dtype, or if they are in eight
        bits already."""
        if isinstance(x, QuantizedTokens):
            return x
        kind = self._formats.of_tokens(x, consumer, PLAIN_INPUT)
        return x if kind is None else rounding.rounded(x, kind, rule=rule_for(consumer))

    def _update(self, x: QuantizedTokens, layer: LayerWeights) -> tuple[Tensor, Tensor | None]:
        """The layer's product x @ weight^T as a Residual's update (..., out) and update_scales (..., 1), without bias;
        in int8, the products of its LoRAs are included. The scales are None if the update is scaled already."""
        if x.values.dtype == INT8.dtype:
            return self._with_loras(x, layer, None).view(*x.shape, -1), None
        update, scales = float8.update(x, weight_like(x, layer))
        return update.view(*x.shape, -1), None if scales is None else scales.view(*x.shape, 1)

    def _product(
        self, x: QuantizedTokens, layer: LayerWeights, bias: Tensor | None, added: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """x @ weight^T + bias: (rows, out). For int8 in the layer's dtype; for float8 in the dtype of the library's
        product, so the caller casts it. added: LoRAs, for int8 only; see products.int8_product."""
        dtype = layer.weight.dtype
        weight = weight_like(x, layer)
        if x.values.dtype != INT8.dtype and x.unit is None:
            result = self._result_dtype(x.values.device, dtype)
            assert result is not None
            return float8.product(x, weight, bias, result)
        if x.values.dtype != INT8.dtype:
            # The library's product does not apply the scales of rows.
            sums, scales = float8.update(x, weight)
            product = sums if scales is None else sums * scales
            return product if bias is None else product + bias
        shape_class = products.product_class(len(x.values), *layer.weight.shape)
        config = self._launches.of(configs.INT8_PRODUCT, shape_class, dtype)
        if weight.stored:
            out, width = layer.weight.shape
            self._launches.stored_products.add((len(x.values), out, width, dtype))
        return products.int8_product(x, weight, bias, dtype, config, added)


def halves(image: Image) -> tuple[Tensor, Tensor | None]:
    """(first, second) of a VirtualConcatenation; (image, None) for an ordinary image. Images are in channels-last
    memory, copied if necessary."""
    if isinstance(image, VirtualConcatenation):
        return channels_last(image.first), channels_last(image.second)
    return channels_last(image), None


def rows(image: Tensor) -> Tensor:
    """(batch, channels, height, width) -> (batch * height * width, channels), a view of a channels-last image."""
    return image.permute(0, 2, 3, 1).flatten(0, 2)


def weight_like(x: QuantizedTokens | QuantizedImage, layer: LayerWeights) -> QuantizedWeight:
    """The layer's weight in the same 8-bit format as x. The layer must have one."""
    return next(weight for weight in layer.low_bit if weight.values.dtype == x.values.dtype)
