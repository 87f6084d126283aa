"""What users put on a diffusers UNet: IP-Adapters and FreeU, which our forward computes itself, and other attention
processors, which are points of our forward."""
from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.additions import FreeU, ImagePrompt
from ...core.leaves import TransformerBlock
from ...core.patch_points import CROSS_ATTENTION, SELF_ATTENTION, Block, PatchPoints
from ...core.refusal import Refusal
from ...families.unet.read_diffusers import FREEU_FACTORS, has_freeu, has_ip_adapter, is_plain

log = logging.getLogger("onediff")

IP_ADAPTERS = {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0"}
MASKS = "ip_adapter_masks"
# The last part of an attention's path in the layout, and of its queries'.
OUT, QUERY = ".to_out.0", ".to_q"
# Layers of keys and of values, and the scale of each image, by the path of their attention.
Projections = dict[str, tuple[nn.Linear, nn.Linear, list[float]]]


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


class Within(NamedTuple):
    """What runs within the UNet in one call beside its own layers; see Call."""

    patches: UNetPatches | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()
    freeu: FreeU | None = None


def within(
    unet: Any, processors: dict[str, Any], latent: Tensor, added: dict[str, Any], arguments: dict[str, Any]
) -> Within:
    """processors: by the path of their attention. arguments: the pipeline's cross_attention_kwargs. Raises Refusal."""
    unknown = sorted(set(arguments) - {MASKS})
    if unknown:
        raise Refusal(f"the pipeline passes cross_attention_kwargs ({', '.join(unknown)})")
    # What an IP-Adapter makes of the image embeddings, (batch, images, tokens, width) for each.
    tokens = unet.encoder_hid_proj(added["image_embeds"]) if has_ip_adapter(unet) else None
    kinds = {
        kind for kind in set(map(type, processors.values()))
        if kind.__name__ in IP_ADAPTERS and kind.__module__.partition(".")[0] == "diffusers"
    }
    prompts: tuple[ImagePrompt, ...] = ()
    try:
        if kinds:
            adapters = {path: one for path, one in processors.items() if type(one) in kinds}
            found = adapters_of(adapters, latent, tokens, arguments.get(MASKS))
            prompts = tuple(one for adapter in found for one in image_prompts(adapter, latent, len(unet.down_blocks)))
    except Refusal as reason:
        log.debug("diffusers' IP-Adapter processors run as they are: %s", reason)
    factors = tuple(freeu_factors(index, block) for index, block in enumerate(unet.up_blocks) for _ in block.resnets)
    freeu = freeu_of(factors, latent.device) if any(factors) else None
    patches = UNetPatches(unet, processors.values(), tokens, arguments, kinds if prompts else ())
    return Within(patches if patches.structure else None, prompts, freeu)


class Adapter(NamedTuple):
    """One IP-Adapter. tokens: (batch, images, tokens, width). mask: (1, images, height, width)."""

    tokens: Tensor
    projections: Projections
    mask: Tensor | None


def adapters_of(
    processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None, given_masks: Any
) -> list[Adapter]:
    """The adapters of these processors. Raises Refusal where diffusers has to run them, or to refuse their
    inputs."""
    if image_tokens is None or not all(path.endswith(CROSS_ATTENTION) for path in processors):
        raise Refusal("they are not where an image prompt is")
    masks: list[Any] = [None] * len(image_tokens) if given_masks is None else list(
        given_masks.unsqueeze(1) if isinstance(given_masks, Tensor) else given_masks
    )
    counts = {len(parts) for one in processors.values() for parts in (one.to_k_ip, one.to_v_ip, one.scale)}
    if {*counts, len(masks)} != {len(image_tokens)}:
        raise Refusal("adapters, images, scales and masks are not equally many")
    found: list[Adapter] = []
    for index, (tokens, mask) in enumerate(zip(image_tokens, masks, strict=True)):
        if tokens.dim() != 4 or tokens.shape[0] != latent.shape[0] or tokens.dtype != latent.dtype:
            raise Refusal(f"image tokens are {tuple(tokens.shape)} in {tokens.dtype}")
        images = tokens.shape[1]
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == images):
            raise Refusal("a mask is no (1, images, height, width)")
        projections: Projections = {}
        for path, one in processors.items():
            keys, values, scale = one.to_k_ip[index], one.to_v_ip[index], one.scale[index]
            # diffusers takes a list of scales with masks alone.
            scales = scale if isinstance(scale, list) and mask is not None else [scale] * images
            if len(scales) != images or not all(isinstance(each, (int, float)) for each in scales):
                raise Refusal(f"a scale is {scale!r} for {images} images")
            if type(keys) is not nn.Linear or type(values) is not nn.Linear:
                raise Refusal(f"{path} has another layer than a linear one")
            projections[path] = keys, values, scales
        found.append(Adapter(tokens, projections, mask))
    return found


def image_prompts(adapter: Adapter, latent: Tensor, levels: int) -> list[ImagePrompt]:
    """What an adapter adds: for all of its images together, and with a mask for each of them. levels: how many sizes
    the hidden states have."""
    tokens, projections, mask = adapter
    if mask is None:
        return [image_prompt(tokens.flatten(1, 2), projections, 0, {})]
    return [
        image_prompt(tokens[:, image], projections, image, downsampled(mask[:, image], latent, levels))
        for image in range(tokens.shape[1])
    ]


def image_prompt(tokens: Tensor, projections: Projections, image: int, masks: dict[int, Tensor]) -> ImagePrompt:
    """Of tokens (batch, tokens, width), in every attention where the image's scale is not 0."""
    parts: dict[str, tuple[int, int]] = {}
    projected = [tokens[..., :0]]
    width = 0
    for path, (keys, values, scales) in projections.items():
        if scales[image] != 0:
            projected += keys(tokens), values(tokens) * scales[image]
            parts[path + QUERY] = width, keys.out_features + values.out_features
            width += keys.out_features + values.out_features
    return ImagePrompt(torch.cat(projected, dim=-1), parts, masks)


def downsampled(mask: Tensor, latent: Tensor, levels: int) -> dict[int, Tensor]:
    """A mask, (1 or batch, height, width), for every size of the hidden states: (batch, tokens, 1) by their number."""
    from diffusers.image_processor import IPAdapterMaskProcessor

    height, width = latent.shape[-2:]
    found: dict[int, Tensor] = {}
    for _ in range(levels):
        cut = IPAdapterMaskProcessor.downsample(mask, latent.shape[0], height * width, 1)
        found[height * width] = cut.to(latent.device, latent.dtype)
        height, width = (height + 1) // 2, (width + 1) // 2
    return found


@lru_cache(maxsize=8)
def freeu_of(factors: tuple[tuple[float, float] | None, ...], device: torch.device) -> FreeU:
    """FreeU with these factors of the backbone and of the skip at each output stage: the same tensor for every call."""
    with torch.inference_mode(False):
        values = torch.tensor([pair or (1.0, 1.0) for pair in factors], dtype=torch.float32, device=device)
    return FreeU(values, frozenset(index for index, pair in enumerate(factors) if pair is not None))


def freeu_factors(index: int, block: Any) -> tuple[float, float] | None:
    """What FreeU does in the up block of this index: the factors of the backbone and of the skip."""
    if index > 1 or not has_freeu(block):
        return None
    s1, s2, b1, b2 = (float(getattr(block, name)) for name in FREEU_FACTORS)
    return (b2, s2) if index else (b1, s1)
