"""Decides the format in which an operator writes the input of the layer after it, its consumer.

The format is the model's dtype, float8 or int8 (weights.low_bit.Kind). It depends on the consumer's weight:

- The weight exists in eight bits besides the model's dtype: the format in which the product is the fastest, so that no
  separate pass quantizes the input.
- The weight exists in eight bits only, and Low-bit has made it, to replace a weight in main memory: the weight's
  format.
- The weight exists in eight bits only, because the host stores it so: the weight's format if our products or the
  library's can multiply it on this device, otherwise the model's dtype.
- The weight exists in the model's dtype only: the model's dtype.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....core.layer_weights import LayerWeights
from ....weights.low_bit import FEWEST_PIXELS, FP8, GROUP_NORMED, INT8, KERNEL, Kind, Product, kind_of
from ...torch.quantized import check_rotation
from ..low_bit import float8
from . import images, rounding, tokens
from .launching import ALIGNED
from .rounding import Rule, rule_of

# result_dtype(device, dtype): the dtype of the outputs of float8 products for a model of this dtype; None if the device
# has no such products.
ResultDtype = Callable[[torch.device, torch.dtype], torch.dtype | None]
# choose(product, dtype, kinds): the one of these formats in which a product is the fastest; None if that is the model's
# dtype (dtype), or unknown.
Choose = Callable[[Product, torch.dtype, Sequence[Kind]], Kind | None]


class InputFormats:
    """Chooses the formats of the inputs of layers. The methods named of_ return an 8-bit format, or None for the
    model's dtype.

    result_dtype: see ResultDtype. choose: see Choose.
    source, in the methods: the operator that computes the tokens: NORMED, GATED or PLAIN_INPUT of core.leaves. The
        fastest format depends on it, because a norm or a gated unit can write eight bits itself.
    """

    def __init__(self, result_dtype: ResultDtype, choose: Choose) -> None:
        self._result_dtype = result_dtype
        self._choose = choose

    def of_image(self, shape: torch.Size, groups: int, consumer: LayerWeights | None) -> Kind | None:
        """The format of an image of this shape (batch, channels, height, width) that a group norm writes for a
        convolution.

        consumer: the convolution's weights; None if the next layer is unknown. groups: the norm's number of groups.
        None, the model's dtype, also if the consumer is None or has no 8-bit weight, for fewer than FEWEST_PIXELS
        pixels, and for more than images.MOST_GROUPS groups.
        """
        batch, channels, height, width = shape
        pixels = height * width
        if consumer is None or not consumer.low_bit or pixels < FEWEST_PIXELS or groups > images.MOST_GROUPS:
            return None
        product = Product(batch * pixels, KERNEL**2 * channels, len(consumer.weight), GROUP_NORMED, (height, width))
        return self._choose(product, consumer.weight.dtype, kinds_of(consumer))

    def of_tokens(self, tokens: Tensor, consumer: LayerWeights, source: str) -> Kind | None:
        """The format in which an operator writes tokens for a linear layer, the consumer. None, the model's dtype, also
        if the consumer has no 8-bit weight.

        tokens: the operator's input or output, (..., any width): only the number of its rows counts. source: see
        InputFormats. Raises Refusal if the host stores the consumer's weight in eight bits with an invalid rotation by
        groups of rounding.GROUP, and no LoRA is beside it: for others, None is given before the rotation is checked.
        """
        return self.of_rows(tokens.numel() // tokens.shape[-1], consumer, source)

    def of_rows(self, rows: int, consumer: LayerWeights, source: str) -> Kind | None:
        """As of_tokens, given only the number of rows into which the tokens are flattened."""
        if not consumer.low_bit:
            return None
        if consumer.weight.is_meta:
            return self._of_quantized_only(consumer)
        out, width = consumer.weight.shape
        return self._choose(Product(rows, width, out, source), consumer.weight.dtype, kinds_of(consumer))

    def with_plain(self, tokens: Tensor, consumer: LayerWeights, source: str) -> tuple[Kind | None, bool]:
        """The format of the consumer's input, and whether the tokens must also be written in the model's dtype: (INT8,
        True) if reads_both(consumer), otherwise (the format of of_tokens, False). Raises Refusal as of_tokens, and as
        of_stored for a layer with LoRAs."""
        kind = self.of_tokens(tokens, consumer, source)
        if kind is None and self.reads_both(consumer):
            return INT8, True
        return kind, False

    def reads_both(self, consumer: LayerWeights) -> bool:
        """Whether a layer reads its input in int8, and its LoRAs read the same input in the model's dtype. True only if
        the host stores the layer's weight in INT8, without a rotation or in groups of rounding.GROUP; False for a layer
        without LoRAs. Raises Refusal as of_stored."""
        if not consumer.weight.is_meta or consumer.low_rank is None:
            return False
        weight = consumer.low_bit[0]
        return weight.stored and weight.rotation in (0, rounding.GROUP) and self.of_stored(consumer) is INT8

    def of_stored(self, layer: LayerWeights) -> Kind | None:
        """The format in which our products or the library's multiply this layer's weight, which the host stores in
        eight bits; None if neither can: the caller then uses torch's operators, which decode the weight. FP8 with LoRAs
        gives None too: decoding is faster there. Raises Refusal if the weight's rotation is invalid."""
        weight = layer.low_bit[0]
        check_rotation(weight)
        out, width = weight.values.shape
        dtype, device = layer.weight.dtype, weight.values.device
        if dtype not in tokens.ATTENTION_DTYPES or width % ALIGNED or out % ALIGNED:
            return None
        if weight.values.dtype == FP8.dtype:
            # The library's float8 product cannot add LoRAs. On an H200, two more passes over the output take longer
            # than decoding the weight, merging the LoRAs and multiplying in the layer's dtype, which also rounds less.
            has_units = self._result_dtype(device, dtype) is not None and layer.low_rank is None
            return FP8 if has_units else None
        is_int8 = weight.values.dtype == INT8.dtype
        return INT8 if is_int8 and float8.unmet_requirement(INT8, device, dtype) is None else None

    def _of_quantized_only(self, consumer: LayerWeights) -> Kind | None:
        """of_rows for a weight that exists in eight bits only.

        If Low-bit has made the weight (`stored` is False), its format: such a layer has neither LoRAs beside it nor a
        rotation. If the host stores the weight so: None, the model's dtype, for a layer with LoRAs, which read the
        input too, and for a weight that is rotated in groups of a size that our kernels do not rotate; otherwise
        of_stored(consumer), which may raise Refusal.
        """
        weight = consumer.low_bit[0]
        if not weight.stored:
            return kind_of(weight.values)
        if consumer.low_rank is not None or weight.rotation not in (0, rounding.GROUP):
            return None
        return self.of_stored(consumer)


def rule_for(consumer: LayerWeights) -> Rule:
    """The rule by which the 8-bit input of this layer is rounded. The layer must have an 8-bit weight. Rule.OURS if its
    weight exists in the model's dtype too: then Low-bit has made the 8-bit one."""
    weight = consumer.low_bit[0]
    return rule_of(weight, weight.values.device) if consumer.weight.is_meta else Rule.OURS


def kinds_of(layer: LayerWeights) -> list[Kind]:
    """The 8-bit formats in which a layer's weight exists; empty if there are none."""
    return [kind_of(weight.values) for weight in layer.low_bit]
