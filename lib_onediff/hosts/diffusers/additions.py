"""What users put on a diffusers UNet that our forward computes itself: IP-Adapters, FreeU and perturbed attention."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...model.additions import FreeU, ImagePrompt, PerturbedAttention
from ...model.conditioning import Sighting
from ...model.identity import Edits
from ...model.read_diffusers import FREEU_FACTORS, has_freeu

IP_ADAPTERS = {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0"}
# In how many parts the batch comes; the last one is perturbed.
PERTURBED = {"PAGIdentitySelfAttnProcessor2_0": 2, "PAGCFGIdentitySelfAttnProcessor2_0": 3}
MASKS = "ip_adapter_masks"
CROSS_ATTENTION, SELF_ATTENTION = ".attn2", ".attn1"
QUERY = ".to_q"


class Additions(NamedTuple):
    """See UNetCall. kinds: the classes of processors that these stand for."""

    image_prompts: tuple[ImagePrompt, ...] = ()
    freeu: FreeU | None = None
    perturbed: PerturbedAttention | None = None
    kinds: frozenset[type] = frozenset()


class Irregular(Exception):
    """Processors of a known class are used as we do not know it, found many frames down: diffusers runs them."""


class AdditionsReader:
    """Reads the additions of one UNet at each call; what depends on the prompt alone is computed once."""

    def __init__(self) -> None:
        self._image_prompts = ImagePromptReader()
        self._freeu: FreeU | None = None
        self._freeu_of: tuple[Any, ...] = ()

    def read(
        self, unet: Any, attentions: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None,
        arguments: dict[str, Any],
    ) -> Additions:
        """attentions: by path. image_tokens: of each IP-Adapter, (batch, images, tokens, width). arguments: the
        pipeline's cross_attention_kwargs."""
        adapters: dict[str, Any] = {}
        perturbed: dict[str, Any] = {}
        for path, attention in attentions.items():
            kind = type(attention.processor)
            if kind.__module__.partition(".")[0] != "diffusers":
                continue
            if kind.__name__ in IP_ADAPTERS:
                adapters[path] = attention.processor
            elif kind.__name__ in PERTURBED:
                perturbed[path] = attention.processor
        prompts: tuple[ImagePrompt, ...] | None = ()
        if not adapters:
            self._image_prompts = ImagePromptReader()
        else:
            prompts = self._image_prompts.read(adapters, latent, image_tokens, len(unet.down_blocks), arguments)
        guidance = perturbed_attention(perturbed, latent.shape[0]) if perturbed else None
        known = [*(adapters.values() if prompts else ()), *(perturbed.values() if guidance else ())]
        return Additions(prompts or (), self._read_freeu(unet, latent.device), guidance, frozenset(map(type, known)))

    def _read_freeu(self, unet: Any, device: torch.device) -> FreeU | None:
        blocks = [(index, block) for index, block in enumerate(unet.up_blocks) for _ in block.resnets]
        factors = [freeu_factors(index, block) for index, block in blocks]
        if not any(factors):
            return None
        if self._freeu is None or self._freeu_of != (factors, device):
            values = torch.tensor([pair or (1.0, 1.0) for pair in factors], device=device)
            stages = frozenset(index for index, pair in enumerate(factors) if pair)
            self._freeu, self._freeu_of = FreeU(values, stages), (factors, device)
        return self._freeu


class ImagePromptReader:
    """The image prompts of one UNet's IP-Adapters, kept while adapters, images, scales and masks are the same."""

    def __init__(self) -> None:
        self._processors: list[Callable[[], Any]] = []
        self._edits: Edits | None = None
        self._of: tuple[Any, ...] = ()
        self._tensors = Sighting()
        self._prompts: tuple[ImagePrompt, ...] | None = None

    def read(
        self, processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None, levels: int,
        arguments: dict[str, Any],
    ) -> tuple[ImagePrompt, ...] | None:
        """None where diffusers has to run these processors, or to refuse their inputs. processors: by the path of their
        attention. levels: how many sizes the hidden states have."""
        masks = arguments.get(MASKS)
        if isinstance(masks, Tensor):
            masks = list(masks.unsqueeze(1))
        tensors = (*(image_tokens or ()), *(mask for mask in masks or () if isinstance(mask, Tensor)))
        of = (
            tuple(processors), str([processor.scale for processor in processors.values()]), latent.shape[0],
            latent.shape[-2:], latent.dtype, masks is None, set(arguments) - {MASKS},
        )
        found = list(processors.values())
        stands = self._of == of and self._tensors.recognises(tensors) and self._edits is not None and (
            self._edits.still_true() and all(known() is one for known, one in zip(self._processors, found, strict=True))
        )
        if not stands:
            try:
                self._prompts = tuple(image_prompts(processors, latent, image_tokens, masks, levels))
            except Irregular:
                self._prompts = None
            self._of = of
            self._processors = [weakref.ref(processor) for processor in found]
            self._edits = Edits([parameter for processor in found for parameter in processor.parameters()])
            self._tensors.remember(tensors)
        return self._prompts


def image_prompts(
    processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None, masks: Sequence[Any] | None,
    levels: int,
) -> list[ImagePrompt]:
    """One for each adapter, and with masks one for each of its images. Raises Irregular."""
    if image_tokens is None or not all(path.endswith(CROSS_ATTENTION) for path in processors):
        raise Irregular
    masks = [None] * len(image_tokens) if masks is None else list(masks)
    counts = {len(parts) for one in processors.values() for parts in (one.to_k_ip, one.to_v_ip, one.scale)}
    if {*counts, len(masks)} != {len(image_tokens)}:
        raise Irregular
    found: list[ImagePrompt] = []
    for index, (tokens, mask) in enumerate(zip(image_tokens, masks, strict=True)):
        if tokens.dim() != 4 or tokens.shape[0] != latent.shape[0] or tokens.dtype != latent.dtype:
            raise Irregular
        images = tokens.shape[1]
        scales = {path: processor.scale[index] for path, processor in processors.items()}
        if mask is None:
            found += image_prompt(processors, index, tokens.flatten(1, 2), scales, {})
            continue
        if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != images:
            raise Irregular
        for image in range(images):
            of_image = {path: scale_of(scale, image, images) for path, scale in scales.items()}
            cut = downsampled(mask[:, image], latent, levels)
            found += image_prompt(processors, index, tokens[:, image], of_image, cut)
    return found


def image_prompt(
    processors: dict[str, Any], index: int, tokens: Tensor, scales: dict[str, Any], masks: dict[int, Tensor]
) -> list[ImagePrompt]:
    """What one adapter makes of tokens (batch, tokens, width); none where its scale is 0 everywhere."""
    parts: dict[str, tuple[int, int]] = {}
    projected: list[Tensor] = []
    width = 0
    for path, processor in processors.items():
        scale = scales[path]
        if not isinstance(scale, (int, float)):
            raise Irregular
        if scale == 0:
            continue
        keys, values = processor.to_k_ip[index], processor.to_v_ip[index]
        if type(keys) is not nn.Linear or type(values) is not nn.Linear:
            raise Irregular
        pair = [keys(tokens), values(tokens) * scale]
        parts[path + QUERY] = width, sum(part.shape[-1] for part in pair)
        width += parts[path + QUERY][1]
        projected += pair
    return [ImagePrompt(torch.cat(projected, dim=-1), parts, masks)] if parts else []


def scale_of(scale: Any, image: int, images: int) -> Any:
    """An image's scale, where there is one for each or one for all."""
    if not isinstance(scale, list):
        return scale
    if len(scale) != images:
        raise Irregular
    return scale[image]


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


def freeu_factors(index: int, block: Any) -> tuple[float, float] | None:
    """What FreeU does in an up block, the how manyth it is: the factors of the backbone and of the skip."""
    if index > 1 or not has_freeu(block):
        return None
    s1, s2, b1, b2 = (float(getattr(block, name)) for name in FREEU_FACTORS)
    return (b2, s2) if index else (b1, s1)


def perturbed_attention(processors: dict[str, Any], rows: int) -> PerturbedAttention | None:
    """None where diffusers has to run these processors. rows: of the batch."""
    parts = {PERTURBED[type(processor).__name__] for processor in processors.values()}
    if len(parts) != 1 or rows % min(parts) or not all(path.endswith(SELF_ATTENTION) for path in processors):
        return None
    queries = frozenset(path + QUERY for path in processors)
    return PerturbedAttention(queries, rows - rows // min(parts))
