"""Put our forward on a diffusers UNet2DConditionModel, and take it off again."""
from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...guard import HostFunction
from ...model.call import Control, UNetCall
from ...model.patches import HostTraits, replaced_by
from ...model.read_diffusers import (
    PROCESSOR_OF,
    attentions_of,
    foreign_parts,
    has_ip_adapter,
    is_diffusers_unet,
)
from ...model.rows import PromptRows
from ...options.settings import Settings
from ...runtime.runtime import runtime
from ...weights.watch import no_object
from .additions import Additions, AdditionsReader
from .guidance import arguments_of_prompt, prompt_rows
from .instance_forward import InstanceForward, attached, own_forward, put_on, take_off
from .loras import LoraReader, note_scale
from .patches import UNetPatches
from .schedule import announce_samplings, reference_to

log = logging.getLogger("onediff")

# What a pipeline may hand to attention processors.
KNOWN_ARGUMENTS = {"ip_adapter_masks"}


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
        self._additions = AdditionsReader()
        # The pipeline that calls, where that is known.
        self.pipeline: Callable[[], Any] = no_object

    def serve(self, host: HostFunction, module: Any, *args: Any, **kwargs: Any) -> Any:
        reason = self._why_host(module)
        if reason is not None:
            runtime.note_host(reason, module)
            return runtime.pressure.run_host(lambda: host(module, *args, **kwargs))
        # Signature.bind says the same in a tenth of a millisecond; what does not fit is the host's to refuse.
        given = {**dict(zip(self._names, args)), **kwargs}  # noqa: B905
        try:
            call = self._call(module, **{name: value for name, value in given.items() if name != "return_dict"})
        except Exception as fault:
            # Inputs that we cannot even read are the host's to judge.
            call = f"the inputs of this call were not understood: {fault}"
            log.debug(call, exc_info=True)
        if isinstance(call, str):
            runtime.note_host(call, module)
            return runtime.pressure.run_host(lambda: host(module, **again(given)))
        return_dict = given.pop("return_dict", True)

        def guidance() -> PromptRows | str:
            batch = given["sample"].shape[0]
            rows = prompt_rows(self.pipeline(), given["sample"])
            if isinstance(rows, str):
                return rows
            alone = arguments_of_prompt(given, rows, batch)
            return PromptRows(rows, lambda: sample_of(host, module, alone))

        sample = runtime.run(module, call, lambda: sample_of(host, module, given), guidance=guidance)
        if not return_dict:
            return (sample,)
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

        return UNet2DConditionOutput(sample=sample)

    def declined(self, module: Any, reason: str) -> None:
        runtime.note_host(reason, module)

    def _why_host(self, unet: Any) -> str | None:
        """Why this UNet's forward is none that we know, or None."""
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

    def _call(
        self, unet: Any, sample: Tensor, timestep: Tensor | float, encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None, added_cond_kwargs: dict[str, Tensor] | None = None,
        down_block_additional_residuals: Any = None, mid_block_additional_residual: Tensor | None = None,
        down_intrablock_additional_residuals: Any = None, cross_attention_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> UNetCall | str:
        """The call as ours, or what in it a UNetCall cannot say, in one line for the user."""
        if isinstance(encoder_hidden_states, (tuple, list)):
            return "the context has several parts"
        attentions, arguments = self._attentions_of(unet), dict(cross_attention_kwargs or {})
        scale = arguments.pop("scale", 1.0)
        within = self._within(unet, attentions, sample, added_cond_kwargs or {}, arguments)
        if isinstance(within, str):
            return within
        patches, additions = within
        not_scaled = note_scale(unet, scale, whole=patches is None)
        if not_scaled is not None:
            return not_scaled
        for name, value in others.items():
            if value is not None and value != {}:
                return f"the pipeline passes {name}"
        times, label = timestep_of_batch(timestep, sample), self._label(unet, added_cond_kwargs)
        if isinstance(label, str):
            return label
        control = control_of(
            unet, sample, down_block_additional_residuals, mid_block_additional_residual,
            down_intrablock_additional_residuals,
        )
        if isinstance(control, str):
            return control
        return UNetCall(
            latent=sample, timestep=times, context=encoder_hidden_states, y=label, timestep_condition=timestep_cond,
            control=control, upcast_attention=upcasts_attention(list(attentions.values())), patches=patches,
            image_prompts=additions.image_prompts, freeu=additions.freeu, perturbed=additions.perturbed,
        )

    def _within(
        self, unet: Any, attentions: dict[str, Any], sample: Tensor, added: dict[str, Any], arguments: dict[str, Any]
    ) -> tuple[UNetPatches | None, Additions] | str:
        """What runs within the UNet in this call beside its own layers, or why the host must run it: asked at every
        call, 0.03 ms for SDXL's 140 attentions, and 0.2 ms with an IP-Adapter. arguments: the pipeline's
        cross_attention_kwargs."""
        # Read once: what is a module, as an IP-Adapter's is, is slow to get.
        processors = dict(zip(attentions, map(PROCESSOR_OF, attentions.values()), strict=True))
        is_foreign = bool(foreign_parts(unet, set(map(type, processors.values()))))
        unknown = sorted(set(arguments) - KNOWN_ARGUMENTS if is_foreign else arguments)
        if unknown:
            return f"the pipeline passes cross_attention_kwargs ({', '.join(unknown)})"
        if not is_foreign:
            return None, Additions()
        tokens = self._tokens_of_images(unet, added)
        additions = self._additions.read(unet, processors, sample, tokens, arguments)
        patches = UNetPatches(unet, processors.values(), tokens, arguments, additions.stand_for)
        return patches if patches.structure else None, additions

    def _attentions_of(self, unet: nn.Module) -> dict[str, Any]:
        """The UNet's attention modules by path, looked for once: who puts another module there changes the UNet's
        structure, which is looked at where a sampling begins."""
        found = {path: reference() for path, reference in self._attentions.items()}
        if not found or None in found.values():
            found = attentions_of(unet)
            self._attentions = {path: weakref.ref(module) for path, module in found.items()}
        return found

    @staticmethod
    def _tokens_of_images(unet: Any, added: dict[str, Any]) -> list[Tensor] | None:
        """What an IP-Adapter makes of the image embeddings, (batch, images, tokens, width) for each."""
        return unet.encoder_hid_proj(added["image_embeds"]) if has_ip_adapter(unet) else None

    @staticmethod
    def _label(unet: Any, added: dict[str, Tensor] | None) -> Tensor | str | None:
        """y of an SDXL-like UNet, (batch, width): pooled text beside the sinusoids of the size numbers; or what the
        pipeline passes instead of them. As UNet2DConditionModel.get_aug_embed."""
        if unet.config.addition_embed_type is None:
            return None
        if not added or set(added) - {"image_embeds"} != {"text_embeds", "time_ids"}:
            return f"added_cond_kwargs holds {', '.join(sorted(added or {})) or 'nothing'}"
        text, sizes = added["text_embeds"], added["time_ids"]
        waves = unet.add_time_proj(sizes.flatten()).reshape(text.shape[0], -1)
        return torch.cat([text, waves.to(text.dtype)], dim=-1)


def again(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments: the host consumes a list of them, and must find it whole however often it runs."""
    return {name: list(value) if name == "down_intrablock_additional_residuals" and value else value
            for name, value in given.items()}


def sample_of(host: Callable[..., Any], unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """What the UNet's own forward makes of these arguments."""
    sample: Tensor = host(unet, **again({**given, "return_dict": False}))[0]
    return sample


def upcasts_attention(attentions: list[Any]) -> bool:
    """Whether the host computes attention scores in float32: only its older attention processor does."""
    first: Any = attentions[0] if attentions else None
    return bool(getattr(first, "upcast_attention", False)) and type(first.processor).__name__ == "AttnProcessor"


def timestep_of_batch(timestep: Tensor | float, sample: Tensor) -> Tensor:
    """(batch,) on the sample's device, from a number, a scalar tensor or a tensor of one or batch values."""
    if not isinstance(timestep, Tensor):
        timestep = torch.tensor(timestep)
    return timestep.to(sample.device).reshape(-1).expand(sample.shape[0])


def control_of(unet: Any, sample: Tensor, down: Any, middle: Tensor | None, inside: Any) -> Control | str | None:
    """ControlNet's and T2I adapters' residuals, sorted into our slots as UNet2DConditionModel.forward takes them; or
    why they have none."""
    if inside is None and middle is None and down is not None:
        return "a T2I adapter passes its residuals in the old way"
    adapter, waiting = adapter_slots(unet, list(inside or ()))
    after_middle: list[Tensor | None] = []
    if waiting and unet.mid_block is not None and waiting[0].shape == deepest_shape(unet, sample):
        after_middle.append(waiting[0])
    output: tuple[Tensor | None, ...] = ()
    if down is not None and middle is not None:  # the host ignores one without the other
        output = tuple(reversed(tuple(down)))
        after_middle.append(middle)
    if not (adapter or after_middle or output):
        return None
    return Control(adapter, tuple(after_middle), output)


def adapter_slots(unet: Any, waiting: list[Tensor]) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """A T2I adapter's residuals in our input slots, and those that no down block takes.

    Each down block takes one: after its last attention, or after all of a block without attention.
    """
    if not waiting:
        return (), []
    slots: list[Tensor | None] = [None]
    for block in unet.down_blocks:
        resnets, downsamplers = len(block.resnets), len(block.downsamplers or ())
        stage = len(slots) + resnets - 1
        if not getattr(block, "has_cross_attention", False):
            stage += downsamplers
        slots += [None] * (resnets + downsamplers)
        if waiting:
            slots[stage] = waiting.pop(0)
    return tuple(slots), waiting


def deepest_shape(unet: Any, sample: Tensor) -> tuple[int, ...]:
    """The shape of the middle block's output: a T2I adapter's last residual is added there if it has that shape."""
    height, width = sample.shape[-2:]
    for block in unet.down_blocks:
        for _ in block.downsamplers or ():
            height, width = (height + 1) // 2, (width + 1) // 2
    return sample.shape[0], unet.config.block_out_channels[-1], height, width


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
