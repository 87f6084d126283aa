"""What a diffusers UNet runs that our forward does not compute itself, as the points of our forward: attention
processors."""
from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch import Tensor

from ...model.layout import TransformerBlock
from ...model.patch_points import CROSS_ATTENTION, SELF_ATTENTION, Block, PatchPoints
from ...model.read_diffusers import is_plain

# The last part of an attention's path in the layout.
OUT = ".to_out.0"


class UNetPatches(PatchPoints):
    """The processors of a UNet, as they are at one call.

    image_tokens: what the projection of its IP-Adapters makes of the image embeddings, (batch, images, tokens, width)
    for each; None without one. arguments: the pipeline's cross_attention_kwargs. known: the classes of processors that
    our forward stands for.
    """

    def __init__(
        self, unet: Any, processors: Collection[Any], image_tokens: list[Tensor] | None, arguments: dict[str, Any],
        known: Collection[type] = (),
    ) -> None:
        self._unet = weakref.ref(unet)
        self._image_tokens, self._arguments, self._known = image_tokens, arguments, known
        self._attentions: dict[str, Any] = {}
        kinds = Counter(map(type, processors))
        self._functions = [one for one in processors if not self._is_ours(type(one))]
        self.places = tuple(map(self._is_ours, map(type, processors)))
        self.structure = tuple(sorted(
            f"{kind.__module__}.{kind.__name__} in {count} attentions"
            for kind, count in kinds.items() if not self._is_ours(kind)
        ))

    def _is_ours(self, kind: type) -> bool:
        return kind in self._known or is_plain(kind)

    def functions(self) -> list[Any]:
        return self._functions

    def stands(self, point: str, *arguments: Any) -> bool:
        return point == "whole_attention" and not self._is_ours(type(self._attentions[arguments[0]].processor))

    def begin_block(self, place: Block, block: TransformerBlock) -> bool:
        unet: Any = self._unet()
        paths = block.self_attention.out.path, block.cross_attention.out.path
        modules = (unet.get_submodule(path.removesuffix(OUT)) for path in paths)
        self._attentions = dict(zip((SELF_ATTENTION, CROSS_ATTENTION), modules, strict=True))
        return not all(self._is_ours(type(attention.processor)) for attention in self._attentions.values())

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        module = self._attentions[attention]
        if self._is_ours(type(module.processor)):
            return None
        given: Any = None
        if attention == CROSS_ATTENTION:
            given = context if self._image_tokens is None else (context, self._image_tokens)
        added: Tensor = module(normed, encoder_hidden_states=given, **self._arguments)
        return added
