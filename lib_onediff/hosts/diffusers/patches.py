"""Reads what users add to a diffusers UNet: IP-Adapters as image prompts, which our forward computes itself; FreeU and
other attention processors as patch points, at which our forward calls the host's code.

Our forward computes an attention itself if its processor is "plain", or an IP-Adapter's that is an image prompt.
"""
from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.refusal import Refusal, unsupported_inputs
from ...families.unet.call import ImagePrompt
from ...families.unet.layout import TransformerBlock
from ...families.unet.patch_points import CROSS_ATTENTION, SELF_ATTENTION, BlockPlace, PatchPoints
from .read_unet import FREEU_FACTORS, has_freeu, has_ip_adapter, is_plain

log = logging.getLogger("onediff")

# The attention processors of IP-Adapters that may be image prompts.
IP_ADAPTERS = {"IPAdapterAttnProcessor", "IPAdapterAttnProcessor2_0"}
# The only entry of cross_attention_kwargs, besides scale, that OneDiff supports.
MASKS = "ip_adapter_masks"
# The paths of an attention's output projection and query, relative to the attention.
OUT = ".to_out.0"
QUERY = ".to_q"


class UNetPatches(PatchPoints):
    """The attention processors and FreeU settings of a UNet at one call, as patch points: our forward calls the
    methods, which run the host's code.

    unet: the host's; kept by a weak reference.
    processors: the UNet's, one for each attention.
    image_tokens: for each IP-Adapter, its projected image embeddings, (batch, images, tokens, width); None if there is
        no IP-Adapter.
    arguments: the pipeline's cross_attention_kwargs, which the host's attentions get.
    known: the classes of processors that our forward computes itself, besides plain ones.

    functions, structure, positions: see Points. structure is () if the host's code runs at no point.
    """

    def __init__(
        self, unet: Any, processors: Collection[Any], image_tokens: list[Tensor] | None, arguments: dict[str, Any],
        known: Collection[type] = (),
    ) -> None:
        self._unet = weakref.ref(unet)
        self._image_tokens = image_tokens
        self._arguments = arguments
        self._known = known
        self._attentions: dict[str, Any] = {}
        kinds = Counter(map(type, processors))
        self.functions = [one for one in processors if not self._is_ours(type(one))]
        # By output stage: FreeU's arguments. The host applies FreeU at the two lowest resolutions only.
        blocks = enumerate(block for block in unet.up_blocks for _ in block.resnets)
        self._freeu = {
            stage: {name: getattr(block, name) for name in ("resolution_idx", *FREEU_FACTORS)}
            for stage, block in blocks if has_freeu(block) and block.resolution_idx <= 1
        }
        self.positions = tuple(map(self._is_ours, map(type, processors))), tuple(self._freeu)
        self.structure = tuple(sorted(
            f"{kind.__module__}.{kind.__name__} in {count} attentions"
            for kind, count in kinds.items() if not self._is_ours(kind)
        )) + (("FreeU",) if self._freeu else ())

    def _is_ours(self, kind: type) -> bool:
        """Whether our forward computes attentions with this class of processors itself."""
        return kind in self._known or is_plain(kind)

    def has_function(self, point: str, *arguments: Any) -> bool:
        """Whether the method of this name (join, whole_attention) runs the host's code for these arguments. For
        whole_attention, begin_block must have been called. See Points."""
        if point == "join":
            return arguments[0] in self._freeu
        return point == "whole_attention" and not self._is_ours(type(self._attentions[arguments[0]].processor))

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states and the skip of an output stage, before they are concatenated: after diffusers' own FreeU
        function, as new tensors, or the given ones if the stage has no FreeU. index: of the stage. See PatchPoints."""
        if index not in self._freeu:
            return hidden_states, skip
        from diffusers.utils.torch_utils import apply_freeu

        # apply_freeu writes to the hidden states.
        given = hidden_states.clone(memory_format=torch.contiguous_format), skip.contiguous()
        joined: tuple[Tensor, Tensor] = apply_freeu(
            hidden_states=given[0], res_hidden_states=given[1], **self._freeu[index]
        )
        return joined

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """Called before each transformer block: finds the host's modules of its two attentions, for whole_attention.
        Returns whether the host must compute at least one of the two. place: not used. See PatchPoints."""
        unet: Any = self._unet()
        paths = block.self_attention.out.path, block.cross_attention.out.path
        modules = (unet.get_submodule(path.removesuffix(OUT)) for path in paths)
        self._attentions = dict(zip((SELF_ATTENTION, CROSS_ATTENTION), modules, strict=True))
        return not all(self._is_ours(type(attention.processor)) for attention in self._attentions.values())

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """The output of the host's attention module in the present block (begin_block); None if our forward computes
        its processor itself. attention: SELF_ATTENTION or CROSS_ATTENTION. See PatchPoints."""
        module = self._attentions[attention]
        if self._is_ours(type(module.processor)):
            return None
        given: Any = None
        if attention == CROSS_ATTENTION:
            given = context if self._image_tokens is None else (context, self._image_tokens)
        added: Tensor = module(normed, encoder_hidden_states=given, **self._arguments)
        return added


class Additions(NamedTuple):
    """What a UNet computes in one call besides its own layers: the values of the fields of these names in UNetCall.

    patches: None if the host's code runs at no point.
    image_prompts: () if no IP-Adapter is computed as an image prompt.
    """

    patches: UNetPatches | None = None
    image_prompts: tuple[ImagePrompt, ...] = ()


def additions_of(
    unet: Any, processors: dict[str, Any], latent: Tensor, added: dict[str, Any], arguments: dict[str, Any]
) -> Additions:
    """What this UNet computes in a call besides its own layers. IP-Adapters that our forward cannot compute as image
    prompts become patches, which run diffusers' processors. Raises Refusal for cross_attention_kwargs that OneDiff does
    not support, and if an IP-Adapter gets no image.

    processors: of all attentions, by the attention's path. latent: the call's. added: the pipeline's added_cond_kwargs.
    arguments: the pipeline's cross_attention_kwargs, without scale.
    """
    unknown = sorted(set(arguments) - {MASKS})
    if unknown:
        names = ", ".join(unknown)
        raise Refusal(f"the diffusers pipeline passes cross_attention_kwargs that OneDiff does not support ({names})")
    # For each IP-Adapter, (batch, images, tokens, width).
    tokens = None
    if has_ip_adapter(unet):
        if added.get("image_embeds") is None:
            raise unsupported_inputs("the UNet has an IP-Adapter, but the pipeline passes no image_embeds")
        tokens = unet.encoder_hid_proj(added["image_embeds"])
    kinds = {
        kind for kind in set(map(type, processors.values()))
        if kind.__name__ in IP_ADAPTERS and kind.__module__.partition(".")[0] == "diffusers"
    }
    prompts: tuple[ImagePrompt, ...] = ()
    try:
        if kinds:
            if arguments.get(MASKS) is not None:
                raise Refusal("masks limit the IP-Adapters to parts of the image")
            adapters = {path: one for path, one in processors.items() if type(one) in kinds}
            prompts = image_prompts(adapters, latent, tokens)
    except Refusal as reason:
        log.debug("diffusers computes the IP-Adapters itself, which is slower: %s", reason)
    patches = UNetPatches(unet, processors.values(), tokens, arguments, kinds if prompts else ())
    return Additions(patches if patches.structure else None, prompts)


def image_prompts(
    processors: dict[str, Any], latent: Tensor, image_tokens: list[Tensor] | None
) -> tuple[ImagePrompt, ...]:
    """One image prompt for each IP-Adapter of these processors, in the adapters' order. Raises Refusal if they cannot
    be image prompts, so that diffusers must run the processors, or must raise its own error for the inputs.

    processors: the IP-Adapters', by the path of the attention; each has the layers and scales of all adapters.
    latent: the call's. image_tokens: see UNetPatches.
    """
    if image_tokens is None or not all(path.endswith(CROSS_ATTENTION) for path in processors):
        raise Refusal("an IP-Adapter has no image, or changes layers that are not cross attentions")
    counts = {len(parts) for one in processors.values() for parts in (one.to_k_ip, one.to_v_ip, one.scale)}
    if counts != {len(image_tokens)}:
        raise Refusal("IP-Adapters, their images and their scales differ in number: each needs its own image and scale")
    return tuple(image_prompt(processors, latent, index, tokens) for index, tokens in enumerate(image_tokens))


def image_prompt(processors: dict[str, Any], latent: Tensor, index: int, tokens: Tensor) -> ImagePrompt:
    """The image prompt of one IP-Adapter: its keys and values for the tokens of all its images, in each attention where
    its scale is not 0. Computes them. Raises Refusal for tokens, scales or layers that our forward does not take.

    processors, latent: see image_prompts. index: the adapter's, in the lists of layers and scales of each processor.
    tokens: the adapter's, (batch, images, tokens, width).
    """
    if tokens.dim() != 4 or tokens.shape[0] != latent.shape[0] or tokens.dtype != latent.dtype:
        raise Refusal(
            f"an IP-Adapter's image tokens (shape {tuple(tokens.shape)}, {tokens.dtype}) do not fit the latent"
        )
    tokens = tokens.flatten(1, 2)
    parts: dict[str, tuple[int, int]] = {}
    projected = [tokens[..., :0]]
    width = 0
    for path, one in processors.items():
        keys = one.to_k_ip[index]
        values = one.to_v_ip[index]
        scale = one.scale[index]
        if not isinstance(scale, (int, float)):
            raise Refusal(f"an IP-Adapter has the scale {scale!r} in a layer; only a single number is fast")
        if type(keys) is not nn.Linear or type(values) is not nn.Linear:
            raise Refusal(f"OneDiff does not support this kind of IP-Adapter: its layer {path} is not a linear layer")
        if scale != 0:
            projected += keys(tokens), values(tokens) * scale
            parts[path + QUERY] = width, keys.out_features + values.out_features
            width += keys.out_features + values.out_features
    return ImagePrompt(torch.cat(projected, dim=-1), parts)
