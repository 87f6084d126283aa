"""Serves the calls of diffusers' networks by our forwards: attaches and detaches single modules, and converts
their calls."""
from __future__ import annotations

import importlib
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...core.attempt import Attempt, HostFunction
from ...core.call import Call, PromptRows, half_of
from ...core.inputs import rows_within
from ...core.refusal import Refusal, unsupported_inputs, unsupported_model
from ...core.settings import Settings
from ...families.unet.call import Control, UNetCall
from ...runtime.runtime import runtime
from ...weights.scan import HostTraits
from ...weights.snapshot import no_object
from .loras import LoraReader
from .module_forward import (
    ModuleForward,
    arguments_by_name,
    attached,
    only_moves,
    replace_forward,
    restore_forward,
)
from .networks import NETWORKS, DiffusersNetwork
from .patches import Additions, additions_of
from .read_unet import FREEU_FACTORS, PROCESSOR_OF, attentions_of, foreign_parts, is_plain
from .schedule import announce_samplings, reference_to

log = logging.getLogger("onediff")

# The attention processor that computes scores in float32 if its attention has upcast_attention.
UPCASTING = "AttnProcessor"
# The argument with a list from whose front UNet2DConditionModel.forward removes the elements that it uses.
CONSUMED = "down_intrablock_additional_residuals"
# In calls of these pipelines, the first half of the rows is the negative prompt's, and the second half the prompt's.
# Other pipelines may have three rows for an image, or another order.
TWO_HALVES = frozenset({
    "StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
    "StableDiffusionDepth2ImgPipeline", "StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline", "StableDiffusionControlNetPipeline", "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionControlNetInpaintPipeline", "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline", "StableDiffusionXLControlNetInpaintPipeline",
    "StableDiffusionAdapterPipeline", "StableDiffusionXLAdapterPipeline",
})
# The reason, for programmers, why a network is left as it is.
NOT_SERVED = (
    "its UNet or transformer is none of diffusers' own classes that OneDiff supports (a class derived from these is "
    "not supported either)"
)
# Reasons why the rows of a call's prompt are unknown, for users.
NO_PIPELINE = "the UNet was compiled without its pipeline (use compile_pipe instead of compile_unet)"
UNKNOWN_HALVES = (
    "OneDiff does not know this kind of pipeline, so it cannot tell the prompt's half of a step from the negative "
    "prompt's"
)
NO_GUIDANCE = "the pipeline computes no negative prompt (its guidance scale is 1 or less)"
ODD_BATCH = "the call does not have one latent for the prompt and one for the negative prompt of each image"
# Arguments that are the same for all rows of a call.
FOR_ALL_ROWS = ("cross_attention_kwargs",)


def is_served(network: Any) -> bool:
    """Whether OneDiff can serve this object: a network of one of diffusers' classes in NETWORKS, attached or not. False
    for a derived class, and for objects that are no networks."""
    return isinstance(network, nn.Module) and any(one.is_one(network) for one in NETWORKS)


@dataclass(eq=False)
class HostsAnswer:
    """The host's own forward with the arguments of one call. Calling this object runs the forward, and returns the
    sample as one tensor in the shape of our output, to compare it with ours or to serve the call. May be called several
    times.

    network: the row of NETWORKS for the module's class.
    call: the same call as our Call.
    host, module, args, kwargs: the forward, and what it is called with.
    answer: what the host's forward returned last, which the caller gets if the host serves the call; None before the
        first run.
    sample: the sample in `answer`, as the last call of this object has returned it; None before the first run.
    """

    network: DiffusersNetwork
    call: Call
    host: HostFunction
    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Any = None
    sample: Tensor | None = None
    # The lists among the arguments, each with the elements that the host's last run has left in it.
    _left: list[tuple[list[Any], list[Any]]] = field(init=False, default_factory=list)

    # See core.attempt.as_host.
    raises_host_errors: ClassVar[bool] = True

    def __call__(self) -> Tensor:
        """The sample of the host's forward, as one tensor. Sets answer and sample. The host may remove elements from
        lists among the caller's arguments: these are put back. See leave_lists_as_the_host."""
        # The host removes elements from a list, and may run several times. So each run gets the whole list.
        lists = [one for one in (*self.args, *self.kwargs.values()) if type(one) is list]
        before = list(map(list, lists))
        try:
            self.answer = self.host(self.module, *self.args, **self.kwargs)
        finally:
            self._left = [(one, list(one)) for one in lists]
            for one, whole in zip(lists, before, strict=True):
                one[:] = whole
        tensor_of = self.network.tensor_of
        sample: Tensor = self.answer[0] if tensor_of is None else tensor_of(self.answer[0], self.call)
        self.sample = sample
        return sample

    def leave_lists_as_the_host(self) -> None:
        """Remove from the lists among the caller's arguments the elements that the host's forward removed when it ran
        last. Called if the host's answer is returned, because the caller expects the lists as the host leaves them."""
        for one, left in self._left:
            one[:] = left


class Processors(NamedTuple):
    """The attention processors of a UNet at one call.

    processors: one for each attention module, in the order of attentions_of.
    are_foreign: whether the UNet computes anything besides its own layers with plain attention, such as an IP-Adapter
        or FreeU; see foreign_parts.
    upcast: whether attention scores are computed in float32.
    """

    processors: list[Any]
    are_foreign: bool
    upcast: bool


class DiffusersForward(ModuleForward):
    """Serves the calls of one network, a UNet or transformer of a class in NETWORKS.

    kind: the network's class when it was attached. If the class was changed since, the host computes every call.
    loras: reads the network's LoRAs that are not merged.
    pipeline: pipeline() returns the pipeline that calls the network; None if it is unknown or gone (note_pipeline).
    """

    hook = "the UNet's forward"

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(kind)
        self._network = next(one for one in NETWORKS if one.name == kind.__name__)
        caller = self._network.caller
        self._call_of = (self._network.call_of or self._call) if caller is None else caller()
        self._attentions: dict[str, weakref.ref[Any]] = {}
        # What foreign_parts had read when it last found none.
        self._without_foreign_parts: tuple[Any, ...] = ()
        self.loras = LoraReader()
        self.pipeline: Callable[[], Any] = no_object

    def serve(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The answer of the network to this call, in the form of the host's forward (tuple, or an output object with
        the field sample), computed by our forward, or by the host's if ours cannot compute this call. See
        ModuleForward."""
        unread: Attempt[Any] | None = None
        try:
            if type(module) is not self.kind:
                raise unsupported_model(f"its class was changed to {type(module).__qualname__}")
            given = arguments_by_name(module, original, args, kwargs)
            return_dict = given.pop("return_dict", True)
            call = self._call_of(module, **given)
        except Exception as error:
            unread = Attempt.of(error)
        if unread is not None:
            answer: Any = runtime.unread(module, unread, lambda: host(module, *args, **kwargs))
            return answer
        by_host = HostsAnswer(self._network, call, host, module, args, kwargs)
        output = runtime.run(module, call, by_host, guidance=lambda: self._prompt_rows(host, module, given))
        if output is by_host.sample:
            by_host.leave_lists_as_the_host()
            return by_host.answer
        if given.get(CONSUMED):
            del given[CONSUMED][:residuals_taken(module, given["sample"], given[CONSUMED])]
        network = self._network
        sample = output if network.sample_of is None else network.sample_of(output)
        if not return_dict:
            return (sample,)
        module_name, name = network.output
        return getattr(importlib.import_module(module_name), name)(sample=sample)

    @classmethod
    def declined(cls, module: Any, reason: str) -> None:
        """Count the call as one that the host computed, with the reason for the user. See ModuleForward."""
        runtime.note_host(reason, module)

    def _prompt_rows(self, host: HostFunction, unet: Any, given: dict[str, Any]) -> PromptRows:
        """Which rows of a UNet's call are the prompt's, and a function that computes them alone by the host's forward
        (host). given: the call's arguments by name. Raises Refusal if the rows are unknown, as for every network that
        is not a UNet."""
        if "sample" not in given:
            raise Refusal(UNKNOWN_HALVES)
        rows = rows_of_prompt(self.pipeline(), given["sample"])
        alone = arguments_of_prompt(given, rows)
        return PromptRows(rows, lambda: sample_of(host, unet, alone))

    def _call(
        self, unet: Any, sample: Tensor, timestep: Tensor | float, encoder_hidden_states: Tensor,
        timestep_cond: Tensor | None = None, added_cond_kwargs: dict[str, Tensor] | None = None,
        down_block_additional_residuals: Any = None, mid_block_additional_residual: Tensor | None = None,
        down_intrablock_additional_residuals: Any = None, cross_attention_kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> Call:
        """Our Call for these arguments of UNet2DConditionModel.forward, with the attention processors and FreeU factors
        that the UNet has now. Sets the scale of the LoRAs to the scale in cross_attention_kwargs, or to 1. Raises
        Refusal if only the host can compute the call. others: further arguments, refused unless None or {}."""
        if isinstance(encoder_hidden_states, (tuple, list)):
            raise unsupported_inputs("the prompt's embedding has several parts")
        for name, value in others.items():
            if value is not None and value != {}:
                raise Refusal(f"the diffusers pipeline passes {name}, which OneDiff does not support")
        tensors: list[Any] = [sample, encoder_hidden_states]
        if timestep_cond is not None:
            tensors.append(timestep_cond)
        if not all(isinstance(one, Tensor) for one in tensors):
            raise unsupported_inputs("the latent, the prompt or timestep_cond is not a tensor")
        first: Any = unet.conv_in
        weights = first.weight.device
        if weights != sample.device and not (first._forward_pre_hooks or only_moves(unet)):
            # No hook moves the weights there during the call, so the host raises its own error.
            raise Refusal(f"the latent is on {sample.device}, but the UNet's weights are on {weights}")
        parts = self._processors_of(unet)
        arguments = dict(cross_attention_kwargs or {})
        scale = arguments.pop("scale", 1.0)
        additions = Additions()
        if parts.are_foreign:
            by_path = dict(zip(self._attentions, parts.processors, strict=True))
            additions = additions_of(unet, by_path, sample, added_cond_kwargs or {}, arguments)
        elif arguments:
            names = ", ".join(sorted(arguments))
            raise Refusal(
                f"the diffusers pipeline passes cross_attention_kwargs that OneDiff does not support ({names})"
            )
        if scale != 1.0 or self.loras.scale != 1.0:
            self.loras.use_scale(unet, scale, are_attentions_ours=additions.patches is None)
        residuals = (
            down_block_additional_residuals, mid_block_additional_residual, down_intrablock_additional_residuals,
        )
        control = None
        if any(one is not None for one in residuals):
            control = control_of(unet, sample, *residuals)
        return UNetCall(
            latent=sample, timestep=timestep_of_batch(timestep, sample), context=encoder_hidden_states,
            y=label_of(unet, sample, added_cond_kwargs), timestep_condition=timestep_cond,
            control=control, upcast_attention=parts.upcast, **additions._asdict(),
        )

    def _processors_of(self, unet: Any) -> Processors:
        """The UNet's attention processors at this call. The attention modules are searched at the first call, and again
        if one of them is gone. If a module is replaced, the network's structure changes, which the runtime sees."""
        attentions: list[Any] = [reference() for reference in self._attentions.values()]
        if not attentions or None in attentions:
            modules = attentions_of(unet)
            self._attentions = {path: weakref.ref(module) for path, module in modules.items()}
            attentions = list(modules.values())
        processors = list(map(PROCESSOR_OF, attentions))
        kinds = set(map(type, processors))
        # Everything that foreign_parts depends on. If it is the same as when foreign_parts last found nothing, there is
        # nothing to find.
        freeu = [list(map(vars(block).get, FREEU_FACTORS)) for block in unet.up_blocks]
        state = type(unet.encoder_hid_proj), kinds, freeu
        are_foreign = state != self._without_foreign_parts and bool(foreign_parts(unet, kinds))
        if not are_foreign:
            self._without_foreign_parts = state
        upcast = False
        if processors:
            kind = type(processors[0])
            upcast = kind.__name__ == UPCASTING and is_plain(kind) and bool(attentions[0].upcast_attention)
        return Processors(processors, are_foreign, upcast)


def attach(unet: nn.Module, settings: Settings | None = None) -> None:
    """Serve the calls of this network, a UNet or transformer, by our forward from now on. Calls that our forward does
    not compute still run the host's; runtime.status() has the reason. A second call only replaces the settings.

    settings: for this network, in place of the runtime's; None: the runtime's. Raises Refusal if OneDiff does not serve
    the network's class, and ValueError if other code has replaced its forward.
    """
    if not is_served(unet):
        kind = type(unet)
        raise Refusal(f"{NOT_SERVED} ({kind.__module__}.{kind.__qualname__})")
    replace_forward(unet, DiffusersForward, "this UNet's")
    runtime.adopt(unet, settings, HostTraits(
        functions=attached(unet).loras, inert=lambda unet, module: only_moves(module)
    ))


def follow(unet: nn.Module, pipe: Any) -> None:
    """Note which pipeline calls an attached network (note_pipeline), and tell the runtime when the pipeline's samplings
    begin and end (announce_samplings). Step policies are inactive if this was not called. Keeps neither the network nor
    the pipeline alive."""
    note_pipeline(unet, reference_to(pipe))
    announce_samplings(pipe, unet)


def note_pipeline(unet: nn.Module, pipeline: Callable[[], Any]) -> None:
    """Note which pipeline calls an attached network, because the pipeline's class tells which rows of a call are the
    prompt's. Does nothing for a network that is not attached. pipeline: returns the pipeline; None if it is gone."""
    if (forward := attached(unet)) is not None:
        forward.pipeline = pipeline


def detach(unet: nn.Module) -> None:
    """Undo attach: the network runs its own forward again, with parameters of the same values that share no memory with
    ours. Does nothing for a network that is not attached."""
    restore_forward(unet)
    runtime.release(unet)


# --- a call ----------------------------------------------------------------------------------------


def timestep_of_batch(timestep: Tensor | float, sample: Tensor) -> Tensor:
    """The timestep as (batch,) for the sample's batch, from a number, a tensor without dimensions, or a tensor of one
    or `batch` values. A tensor keeps its dtype; a number becomes float32. Raises Refusal for other shapes.

    As UNet2DConditionModel.get_time_embed does, this rounds a number to float32, whatever torch's default dtype and
    device are, and moves only a number or a tensor without dimensions to the sample's device.
    """
    if not isinstance(timestep, Tensor):
        dtype = torch.float64 if isinstance(timestep, float) else torch.int64
        # Some devices have neither dtype. The host computes the sinusoids in float32, so nothing is lost.
        timestep = torch.tensor([timestep], dtype=dtype, device="cpu").float().to(sample.device)
    elif timestep.dim() == 0:
        timestep = timestep[None].to(sample.device)
    batch = sample.shape[0]
    if timestep.shape not in ((1,), (batch,)):
        raise unsupported_inputs(
            f"the timestep (shape {tuple(timestep.shape)}) is not one number for each of {batch} latents"
        )
    return timestep.expand(batch)


def label_of(unet: Any, sample: Tensor, added: dict[str, Tensor] | None) -> Tensor | None:
    """UNetCall.y for an SDXL-like UNet, (batch, width) in the sample's dtype: the pooled prompt, then the sinusoids of
    the sizes in time_ids, concatenated in the wider of their dtypes, as UNet2DConditionModel.get_aug_embed does. None
    for UNets that take no such input.

    added: the pipeline's added_cond_kwargs. For an SDXL-like UNet, raises Refusal unless they are text_embeds and
        time_ids, and possibly an IP-Adapter's image_embeds.
    """
    if unet.config.addition_embed_type is None:
        return None
    given = set(added or ()) - {"image_embeds"}
    if added is None or given != {"text_embeds", "time_ids"}:
        raise unsupported_inputs(
            f"added_cond_kwargs has {', '.join(sorted(added or {})) or 'nothing'} instead of text_embeds and time_ids"
        )
    text = added["text_embeds"]
    sizes = added["time_ids"]
    waves = unet.add_time_proj(sizes.flatten()).reshape(text.shape[0], -1)
    return torch.cat([text, waves], dim=-1).to(sample.dtype)


def sample_of(host: Callable[..., Any], unet: nn.Module, given: dict[str, Any]) -> Tensor:
    """The sample that a UNet's own forward returns for these arguments. The caller's list under CONSUMED stays as it
    is: the forward removes elements from a copy. given: the arguments by name, without return_dict."""
    consumed = given.get(CONSUMED)
    again = {**given, CONSUMED: list(consumed)} if consumed else given
    sample: Tensor = host(unet, **again, return_dict=False)[0]
    return sample


def rows_of_prompt(pipe: Any, latent: Tensor) -> slice:
    """Which rows of a call are the prompt's, if this pipeline makes the call: always the second half. Raises Refusal if
    the pipeline computes no negative prompt, may have another order of rows, or has made no image yet, and if the
    number of rows is odd.

    pipe: None if the pipeline is unknown, which is refused. latent: the call's.
    """
    if pipe is None:
        raise Refusal(NO_PIPELINE)
    kind = type(pipe)
    if kind.__name__ not in TWO_HALVES or kind.__module__.partition(".")[0] != "diffusers":
        raise Refusal(UNKNOWN_HALVES)
    # A pipeline has this attribute from its first image on.
    if not hasattr(pipe, "_guidance_scale") or not getattr(pipe, "do_classifier_free_guidance", False):
        raise Refusal(NO_GUIDANCE)
    if latent.shape[0] % 2:
        raise Refusal(ODD_BATCH)
    return half_of(latent.shape[0], is_first=False)


def arguments_of_prompt(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    """The arguments of UNet2DConditionModel.forward for a call of these rows alone, by name. Tensors with as many rows
    as the call, also in lists and dictionaries, are sliced. Tensors with a single row and the arguments in FOR_ALL_ROWS
    stay as they are. Raises ValueError for a tensor with another number of rows. given: the arguments of the whole
    call, by name, which are not changed."""
    batch = given["sample"].shape[0]
    return {name: value if name in FOR_ALL_ROWS else rows_within(value, rows, batch) for name, value in given.items()}


def control_of(unet: Any, sample: Tensor, down: Any, middle: Tensor | None, intrablock: Any) -> Control | None:
    """The residuals of a ControlNet (down, middle) and of a T2I adapter (intrablock) as a Control: our forward adds
    them where UNet2DConditionModel.forward does. None if the host adds no residual, as for middle without down. Raises
    Refusal for residuals in a form that our forward does not take, as for down alone. down, middle, intrablock:
    arguments of the host's forward; None if not given."""
    if intrablock is None and middle is None and down is not None:
        raise Refusal(
            "a T2I adapter passes its residuals as down_block_additional_residuals, which is deprecated: update the "
            "pipeline, to pass down_intrablock_additional_residuals"
        )
    if intrablock is not None and type(intrablock) is not list:
        raise unsupported_inputs("a T2I adapter's residuals are not in a list")
    adapter, waiting = adapter_slots(unet, intrablock or ())
    after_middle: list[Tensor | None] = []
    if is_for_middle(unet, sample, waiting):
        after_middle.append(waiting[0])
    output: tuple[Tensor | None, ...] = ()
    if down is not None and middle is not None:  # the host ignores one without the other
        output = tuple(reversed(tuple(down)))
        after_middle.append(middle)
    if not (adapter or after_middle or output):
        return None
    return Control(adapter, tuple(after_middle), output)


def is_for_middle(unet: Any, sample: Tensor, waiting: list[Tensor]) -> bool:
    """Whether the host adds a T2I adapter's residual after the middle block. It adds the first of `waiting` if that
    residual has the shape of the middle block's output. waiting: the residuals that the down blocks have left over
    (adapter_slots)."""
    return bool(waiting) and unet.mid_block is not None and waiting[0].shape == deepest_shape(unet, sample)


def residuals_taken(unet: Any, sample: Tensor, intrablock: list[Tensor]) -> int:
    """The number of a T2I adapter's residuals that the host's forward removes from the front of the caller's list. We
    remove as many if our forward serves the call. intrablock: the list before that."""
    waiting = adapter_slots(unet, intrablock)[1]
    return len(intrablock) - len(waiting) + is_for_middle(unet, sample, waiting)


def adapter_slots(unet: Any, residuals: Sequence[Tensor]) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
    """A T2I adapter's residuals, distributed over the input stages of our forward as the host does: (a residual or None
    for each stage, the residuals left over); without residuals, ((), []). residuals: in the adapter's order.

    Each down block of the host takes one residual, after its last attention, or at its end if it has no attention.
    """
    if not residuals:
        return (), []
    waiting = list(residuals)
    slots: list[Tensor | None] = [None]
    for block in unet.down_blocks:
        resnets = len(block.resnets)
        downsamplers = len(block.downsamplers or ())
        stage = len(slots) + resnets - 1
        if not getattr(block, "has_cross_attention", False):
            stage += downsamplers
        slots += [None] * (resnets + downsamplers)
        if waiting:
            slots[stage] = waiting.pop(0)
    return tuple(slots), waiting


def deepest_shape(unet: Any, sample: Tensor) -> tuple[int, ...]:
    """The shape of the middle block's output for this latent (sample): (batch, channels, height, width)."""
    reduction = 2 ** sum(len(block.downsamplers or ()) for block in unet.down_blocks)
    height, width = (math.ceil(side / reduction) for side in sample.shape[-2:])
    return sample.shape[0], unet.config.block_out_channels[-1], height, width
