"""What users put on a diffusers UNet that our forward computes itself: IP-Adapters, FreeU and perturbed attention."""
from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...model.additions import FreeU, ImagePrompt, PerturbedAttention
from ...model.read_diffusers import FREEU_FACTORS, has_freeu

log = logging.getLogger("onediff")

IP_ADAPTERS = {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0"}
# In how many parts the batch comes; the last one is perturbed.
PERTURBED = {"PAGIdentitySelfAttnProcessor2_0": 2, "PAGCFGIdentitySelfAttnProcessor2_0": 3}
MASKS = "ip_adapter_masks"
CROSS_ATTENTION, SELF_ATTENTION = ".attn2", ".attn1"
QUERY = ".to_q"


class Additions(NamedTuple):
    """See UNetCall. stand_for: the classes of processors that our forward computes with these."""

    image_prompts: tuple[ImagePrompt, ...] = ()
    freeu: FreeU | None = None
    perturbed: PerturbedAttention | None = None
    stand_for: frozenset[type] = frozenset()


class AdditionsReader:
    """Reads the additions of one UNet at each call."""

    def __init__(self) -> None:
        self._freeu: FreeU | None = None
        self._freeu_of: tuple[Any, ...] = ()

    def read(
        self, unet: Any, processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None,
        arguments: dict[str, Any],
    ) -> Additions:
        """processors: by the path of their attention. image_tokens: of each IP-Adapter, (batch, images, tokens, width).
        arguments: the pipeline's cross_attention_kwargs."""
        adapters, perturbed = of_classes(processors, IP_ADAPTERS), of_classes(processors, PERTURBED)
        prompts: tuple[ImagePrompt, ...] | None = None
        if adapters:
            prompts = read_image_prompts(adapters, latent, image_tokens, len(unet.down_blocks), arguments)
        guidance = perturbed_attention(perturbed, latent.shape[0]) if perturbed else None
        computed = [*(adapters.values() if prompts else ()), *(perturbed.values() if guidance else ())]
        freeu = self._read_freeu(unet, latent.device)
        return Additions(prompts or (), freeu, guidance, frozenset(map(type, computed)))

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


def of_classes(processors: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of diffusers' classes of these names."""
    kinds = set(map(type, processors.values()))
    wanted = {kind for kind in kinds if kind.__name__ in names and kind.__module__.partition(".")[0] == "diffusers"}
    return {path: one for path, one in processors.items() if type(one) in wanted} if wanted else {}


def read_image_prompts(
    processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None, levels: int,
    arguments: dict[str, Any],
) -> tuple[ImagePrompt, ...] | None:
    """One for each adapter, and with masks one for each of its images; None where diffusers has to run these
    processors, or to refuse their inputs. processors: by the path of their attention. levels: how many sizes the hidden
    states have."""
    masks = arguments.get(MASKS)
    if isinstance(masks, Tensor):
        masks = list(masks.unsqueeze(1))
    adapters = adapters_of(processors, latent, image_tokens, masks)
    if isinstance(adapters, str):
        log.debug("diffusers' IP-Adapter processors run as they are: %s", adapters)
        return None
    return tuple(prompt for one in adapters for prompt in image_prompts(one, latent, levels))


class Adapter(NamedTuple):
    """One IP-Adapter. tokens: (batch, images, tokens, width). projections: of keys and of values, and the scale of each
    image, by the path of their attention. mask: (1, images, height, width)."""

    tokens: Tensor
    projections: dict[str, tuple[nn.Linear, nn.Linear, list[float]]]
    mask: Tensor | None


def adapters_of(
    processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None, masks: Sequence[Any] | None
) -> list[Adapter] | str:
    """The adapters of these processors, or what about them or their inputs is not as we know it."""
    if image_tokens is None or not all(path.endswith(CROSS_ATTENTION) for path in processors):
        return "they are not where an image prompt is"
    masks = [None] * len(image_tokens) if masks is None else list(masks)
    counts = {len(parts) for one in processors.values() for parts in (one.to_k_ip, one.to_v_ip, one.scale)}
    if {*counts, len(masks)} != {len(image_tokens)}:
        return "adapters, images, scales and masks are not equally many"
    found: list[Adapter] = []
    for index, (tokens, mask) in enumerate(zip(image_tokens, masks, strict=True)):
        if tokens.dim() != 4 or tokens.shape[0] != latent.shape[0] or tokens.dtype != latent.dtype:
            return f"image tokens are {tuple(tokens.shape)} in {tokens.dtype}"
        images = tokens.shape[1]
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == images):
            return "a mask is no (1, images, height, width)"
        projections: dict[str, tuple[nn.Linear, nn.Linear, list[float]]] = {}
        for path, one in processors.items():
            keys, values, scale = one.to_k_ip[index], one.to_v_ip[index], one.scale[index]
            # diffusers takes a list of scales with masks alone.
            scales = scale if isinstance(scale, list) and mask is not None else [scale] * images
            if len(scales) != images or not all(isinstance(each, (int, float)) for each in scales):
                return f"a scale is {scale!r} for {images} images"
            if type(keys) is not nn.Linear or type(values) is not nn.Linear:
                return f"{path} has another layer than a linear one"
            projections[path] = keys, values, scales
        found.append(Adapter(tokens, projections, mask))
    return found


def image_prompts(adapter: Adapter, latent: Tensor, levels: int) -> list[ImagePrompt]:
    """What an adapter adds: for all of its images together, and with a mask for each of them."""
    tokens, projections, mask = adapter
    if mask is None:
        return [image_prompt(tokens.flatten(1, 2), projections, 0, {})]
    return [
        image_prompt(tokens[:, image], projections, image, downsampled(mask[:, image], latent, levels))
        for image in range(tokens.shape[1])
    ]


def image_prompt(
    tokens: Tensor, projections: dict[str, tuple[nn.Linear, nn.Linear, list[float]]], image: int,
    masks: dict[int, Tensor],
) -> ImagePrompt:
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
