"""Put our forward on a diffusers UNet2DConditionModel, and take it off again."""
from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.call import UNetCall
from ...core.guard import HostFunction
from ...core.refusal import Refusal
from ...core.rows import PromptRows
from ...families.unet.read_diffusers import (
    PROCESSOR_OF,
    attentions_of,
    foreign_parts,
    has_ip_adapter,
    is_diffusers_unet,
)
from ...options.settings import Settings
from ...runtime.runtime import runtime
from ...weights.scan import HostTraits, replaced_by
from ...weights.watch import no_object
from ..additions import NO_ADDITIONS, Additions
from ..hooks import serve_call
from .call import arguments_of_prompt, control_of, label_of, rows_of_prompt, timestep_of_batch
from .instance_forward import InstanceForward, attached, own_forward, put_on, take_off
from .loras import LoraReader, use_scale
from .patches import MASKS, UNetPatches, read_additions
from .schedule import announce_samplings, reference_to

log = logging.getLogger("onediff")


def why_weights_stay(unet: nn.Module) -> str:
    """See HostTraits.keeps_weights."""
    if "_hf_hook" in unet.__dict__:
        return "Low-bit only is not for a UNet that accelerate offloads: it moves all of the weights at every call"
    return ""


class DiffusersForward(InstanceForward):
    """Stands in for UNet2DConditionModel.forward."""

    hook = "the UNet's forward"

    def __init__(self, unet: nn.Module, compiled: Any = None) -> None:
        super().__init__(unet, compiled)
        # The class and its forward that were found to be diffusers' own, and what that takes.
        self._own: tuple[type, Any] | None = None
        self._names: tuple[str, ...] = ()
        self._attentions: dict[str, weakref.ref[Any]] = {}
        # The pipeline that calls, where that is known.
        self.pipeline: Callable[[], Any] = no_object

    def serve(self, host: HostFunction, module: Any, *args: Any, **kwargs: Any) -> Any:
        reason = self._why_unknown(module)
        if reason is not None:
            runtime.note_host(reason, module)
            return runtime.pressure.run_host(lambda: host(module, *args, **kwargs))
        # Signature.bind says the same in a tenth of a millisecond; what does not fit is the host's to refuse.
        given = {**dict(zip(self._names, args)), **kwargs}  # noqa: B905
        return_dict = given.pop("return_dict", True)

        def prompt_rows() -> PromptRows:
            rows = rows_of_prompt(self.pipeline(), given["sample"])
            alone = arguments_of_prompt(given, rows)
            return PromptRows(rows, lambda: sample_of(host, module, alone))

        sample = serve_call(
            module, lambda: self._read(module, given), lambda: sample_of(host, module, given), prompt_rows
        )
        if not return_dict:
            return (sample,)
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=sample)

    def declined(self, module: Any, reason: str) -> None:
        runtime.note_host(reason, module)

    def _why_unknown(self, unet: Any) -> str | None:
        """Why this UNet's forward is none that we know; None for diffusers' own."""
        own = type(unet), type(unet).forward
        if own == self._own:
            return None
        if not is_diffusers_unet(unet):
            return f"{type(unet).__name__} is not a UNet that OneDiff knows"
        replaced = replaced_by(type(unet))
        if replaced is not None:
            return f"UNet2DConditionModel.forward was replaced by {replaced}"
        self._names = tuple(inspect.signature(own_forward(unet)).parameters)
        self._own = own
        return None

    def _read(self, unet: Any, given: dict[str, Any]) -> UNetCall:
        """The call with these arguments as ours."""
        try:
            return self._call(unet, **given)
        except Refusal:
            raise
        except Exception as fault:
            # Inputs that we cannot even read are the host's to judge.
            log.debug("the inputs of a call were not understood", exc_info=True)
            raise Refusal(f"the inputs of this call were not understood: {fault}") from fault

    def _call(
        self, unet: Any, sample: Tensor, timestep: Tensor | float, encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None, added_cond_kwargs: dict[str, Tensor] | None = None,
        down_block_additional_residuals: Any = None, mid_block_additional_residual: Tensor | None = None,
        down_intrablock_additional_residuals: Any = None, cross_attention_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> UNetCall:
        if isinstance(encoder_hidden_states, (tuple, list)):
            raise Refusal("the context has several parts")
        attentions, arguments = self._attentions_of(unet), dict(cross_attention_kwargs or {})
        scale = arguments.pop("scale", 1.0)
        patches, additions = within(unet, attentions, sample, added_cond_kwargs or {}, arguments)
        use_scale(unet, scale, whole=patches is None)
        passed = next((name for name, value in others.items() if value is not None and value != {}), None)
        if passed is not None:
            raise Refusal(f"the pipeline passes {passed}")
        return UNetCall(
            latent=sample, timestep=timestep_of_batch(timestep, sample), context=encoder_hidden_states,
            y=label_of(unet, added_cond_kwargs), timestep_condition=timestep_cond,
            control=control_of(
                unet, sample, down_block_additional_residuals, mid_block_additional_residual,
                down_intrablock_additional_residuals,
            ),
            upcast_attention=upcasts_attention(list(attentions.values())), patches=patches,
            image_prompts=additions.image_prompts, freeu=additions.freeu, perturbed=additions.perturbed,
        )

    def _attentions_of(self, unet: nn.Module) -> dict[str, Any]:
        """The UNet's attention modules by path, looked for once: who puts another module there changes the UNet's
        structure, which is looked at where a sampling begins."""
        found = {path: reference() for path, reference in self._attentions.items()}
        if not found or None in found.values():
            found = attentions_of(unet)
            self._attentions = {path: weakref.ref(module) for path, module in found.items()}
        return found


def within(
    unet: Any, attentions: dict[str, Any], sample: Tensor, added: dict[str, Any], arguments: dict[str, Any]
) -> tuple[UNetPatches | None, Additions]:
    """What runs within the UNet in this call beside its own layers: asked at every call, 0.03 ms for SDXL's 140
    attentions, and 0.2 ms with an IP-Adapter. arguments: the pipeline's cross_attention_kwargs."""
    # Read once: what is a module, as an IP-Adapter's is, is slow to get.
    processors = dict(zip(attentions, map(PROCESSOR_OF, attentions.values()), strict=True))
    is_foreign = bool(foreign_parts(unet, set(map(type, processors.values()))))
    unknown = sorted(set(arguments) - {MASKS} if is_foreign else arguments)
    if unknown:
        raise Refusal(f"the pipeline passes cross_attention_kwargs ({', '.join(unknown)})")
    if not is_foreign:
        return None, NO_ADDITIONS
    # What an IP-Adapter makes of the image embeddings, (batch, images, tokens, width) for each.
    tokens = unet.encoder_hid_proj(added["image_embeds"]) if has_ip_adapter(unet) else None
    additions = read_additions(unet, processors, sample, tokens, arguments)
    patches = UNetPatches(unet, processors.values(), tokens, arguments, additions.stand_for)
    return patches if patches.structure else None, additions


def again(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments: the host consumes a list of them, and must find it whole however often it runs."""
    return {
        name: list(value) if name == "down_intrablock_additional_residuals" and value else value
        for name, value in given.items()
    }


def sample_of(host: Callable[..., Any], unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """What the UNet's own forward makes of these arguments."""
    sample: Tensor = host(unet, **again({**given, "return_dict": False}))[0]
    return sample


def upcasts_attention(attentions: list[Any]) -> bool:
    """Whether the host computes attention scores in float32: only its older attention processor does."""
    first: Any = attentions[0] if attentions else None
    return bool(getattr(first, "upcast_attention", False)) and type(first.processor).__name__ == "AttnProcessor"


def attach(unet: nn.Module, settings: Settings | None = None) -> None:
    """Serve this UNet's calls by our forward where it can; settings override the runtime's. Safe to call twice.

    A UNet that we cannot run keeps its own forward for every call, and runtime.status() says why.
    """
    runtime.adopt(unet, settings, HostTraits(keeps_weights=why_weights_stay, functions=LoraReader()))
    put_on(unet, DiffusersForward, "this UNet's")


def follow(unet: nn.Module, pipe: Any) -> None:
    """Let an attached UNet know which pipeline uses it: its samplings, for DeepCache, and its guidance."""
    note_pipeline(unet, reference_to(pipe))
    announce_samplings(pipe, unet)


def note_pipeline(unet: nn.Module, pipeline: Callable[[], Any]) -> None:
    """Let an attached UNet know which pipeline calls it, for what depends on its guidance."""
    if (forward := attached(unet)) is not None:
        forward.pipeline = pipeline


def detach(unet: nn.Module) -> None:
    """Undo attach: the UNet has its own forward and ordinary parameters with the same values again."""
    take_off(unet)
    runtime.release(unet)
