"""What a diffusers UNet runs beside its own layers, as the points of our forward: attention processors other than the
plain ones, IP-Adapters, and FreeU."""
from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from torch import Tensor

from ...model.layout import TransformerBlock
from ...model.patch_points import CROSS_ATTENTION, SELF_ATTENTION, Block, PatchPoints
from ...model.read_diffusers import FREEU_FACTORS, PROCESSOR_OF, has_freeu, is_plain

# The last part of an attention's path in the layout.
OUT = ".to_out.0"


class UNetPatches(PatchPoints):
    """The processors and FreeU's factors of a UNet, as they are at one call.

    image_tokens: what the projection of its IP-Adapters makes of the image embeddings, (batch, images, tokens, width)
    for each; None without one. arguments: the pipeline's cross_attention_kwargs.
    """

    def __init__(
        self, unet: Any, attentions: list[Any], image_tokens: list[Tensor] | None, arguments: dict[str, Any]
    ) -> None:
        self._unet = weakref.ref(unet)
        self._image_tokens, self._arguments = image_tokens, arguments
        self._freeu = [factors_of(block) for block in unet.up_blocks for _ in block.resnets]
        self._resolutions = [index for index, block in enumerate(unet.up_blocks) for _ in block.resnets]
        self._attentions: dict[str, Any] = {}
        self.structure = tuple(sorted(self._parts(attentions)))

    def _parts(self, attentions: list[Any]) -> list[str]:
        kinds = Counter(map(type, map(PROCESSOR_OF, attentions)))
        parts = [
            f"{kind.__module__}.{kind.__name__} in {count} attentions"
            for kind, count in kinds.items() if not is_plain(kind)
        ]
        parts += [f"an image prompt of {'x'.join(map(str, tokens.shape[1:]))}" for tokens in self._image_tokens or ()]
        return parts + ["FreeU"] * any(self._freeu)

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        factors = self._freeu[index]
        if factors is None:
            return hidden_states, skip
        from diffusers.utils.torch_utils import apply_freeu

        joined = apply_freeu(self._resolutions[index], hidden_states.contiguous(), skip.contiguous(), **factors)
        return joined[0].detach(), joined[1].detach()

    def begin_block(self, place: Block, block: TransformerBlock) -> bool:
        unet: Any = self._unet()
        paths = block.self_attention.out.path, block.cross_attention.out.path
        modules = (unet.get_submodule(path.removesuffix(OUT)) for path in paths)
        self._attentions = dict(zip((SELF_ATTENTION, CROSS_ATTENTION), modules, strict=True))
        return not all(is_plain(type(attention.processor)) for attention in self._attentions.values())

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        module = self._attentions[attention]
        if is_plain(type(module.processor)):
            return None
        given: Any = None
        if attention == CROSS_ATTENTION:
            given = context if self._image_tokens is None else (context, self._image_tokens)
        added: Tensor = module(normed, encoder_hidden_states=given, **self._arguments)
        return added


def factors_of(block: Any) -> dict[str, float] | None:
    """FreeU's factors of an up block, if it is on."""
    return {name: getattr(block, name) for name in FREEU_FACTORS} if has_freeu(block) else None
