"""The hook: what stands as the forward of one UNet of Forge's."""
from __future__ import annotations

import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..accelerator import runtime
from ..deepcache.sampling import Sampling
from ..unet.foreign import origin, replaced_by
from .forge_call import NotOurs, copied_lists, unet_call

# What Forge's UNet calls by a global name, and the module of Forge's that it must come from.
HELPERS = {
    "attention_function": "backend.attention", "apply_control": "backend.nn.unet",
    "timestep_embedding": "backend.nn.unet", "checkpoint": "backend.nn.unet",
}
UPCASTING_ATTENTIONS = {"attention_basic", "attention_split", "attention_sub_quad"}


class Service:
    """What all hooks of one time of service share, from serve() to stop()."""

    def __init__(self) -> None:
        self.active = True
        self.calls = 0
        self.samplings = 0
        self.sampling = Sampling()


class ForgeForward:
    """Stands in for IntegratedUNet2DConditionModel.forward on one instance. Holds no reference to it.

    Whoever has kept it when the service ends (another extension that wraps it, say) gets the host's forward from it.
    """

    def __init__(self, unet: nn.Module, service: Service) -> None:
        self._unet = weakref.ref(unet)
        self.service = service
        self._sampling_seen: int | None = None
        self._refusal: str | None = None

    def __call__(
        self, x: Tensor, timesteps: Any = None, context: Any = None, y: Tensor | None = None,
        control: Any = None, transformer_options: Any = None, **others: Any,
    ) -> Tensor:
        unet = self._unet()
        if unet is None:
            raise RuntimeError("OneDiff: the host has unloaded this UNet")
        options = {} if transformer_options is None else transformer_options

        def host() -> Tensor:
            return type(unet).forward(
                unet, x, timesteps, context=context, y=y, control=copied_lists(control), transformer_options=options,
                **others,
            )

        if not self.service.active:
            return runtime.pressure.run_host(host)
        self.service.calls += 1
        try:
            self._look_once_a_sampling(unet)
            reason = self._refusal or replaced_helper()
            if reason is not None:
                raise NotOurs(reason)
            call = unet_call(x, timesteps, context, y, control, options, upcasts_attention())
        except NotOurs as refusal:
            runtime.note_host(str(refusal), unet)
            return runtime.pressure.run_host(host)
        return runtime.run(unet, call, host)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # The copy of a UNet gets its own forward: it is not in our care.
        copied = memo.get(id(self._unet()))
        return self if copied is None else own_forward(copied)

    def __reduce__(self) -> tuple:
        return own_forward, (self._unet(),)

    def _look_once_a_sampling(self, unet: nn.Module) -> None:
        if self._sampling_seen != self.service.samplings:
            self._sampling_seen = self.service.samplings
            self._refusal = why_not(unet)
            runtime.begin_sampling(unet, self.service.sampling)


def own_forward(unet: nn.Module) -> types.MethodType:
    """The forward of a module's class, bound to it."""
    return types.MethodType(type(unet).forward, unet)


def is_ours(forward: object) -> bool:
    return isinstance(forward, ForgeForward)


def is_foreign(unet: nn.Module, forward: Any) -> bool:
    """Whether what stands as a UNet's forward comes from neither us nor its class.

    Forge leaves the class's own behind, bound, when it takes off an object patch.
    """
    return forward is not None and not is_ours(forward) and getattr(forward, "__func__", None) is not type(unet).forward


def loaded_model(unet: nn.Module) -> Any:
    """Forge's LoadedModel whose patcher holds this UNet; None while it is not loaded."""
    from backend import memory_management

    for loaded in memory_management.current_loaded_models:
        if getattr(loaded.model.model, "diffusion_model", None) is unet:
            return loaded
    return None


def why_not(unet: nn.Module) -> str | None:
    """Why this UNet, as it is loaded now, needs the host's forward; one line for the user."""
    source = replaced_by(type(unet))
    if source is not None:
        return f"{type(unet).__name__}.forward was replaced by {source}"
    loaded = loaded_model(unet)
    if loaded is None:
        return None
    model = loaded.model.model
    if model.storage_dtype != model.computation_dtype:
        stored, computed = (str(kind).removeprefix("torch.") for kind in (model.storage_dtype, model.computation_dtype))
        return f"the UNet is stored as {stored} and computed in {computed}: Forge casts its weights at every call"
    if loaded.model_accelerated:
        return "low VRAM: Forge moves a part of the UNet's weights to the GPU at every call"
    if model.lora_loader.online_backup:
        return "a LoRA is applied at every call, not merged (fp16 LoRA in Diffusion in Low Bits)"
    return None


def replaced_helper() -> str | None:
    """A function that Forge's UNet uses, when it is not Forge's own; one line for the user."""
    from backend.nn import unet as forge_unet

    for name, module in HELPERS.items():
        source = origin(getattr(forge_unet, name))
        if source != module:
            return f"{name} of Forge's UNet was replaced by {source}"
    return None


def replaced_vae_helper() -> str | None:
    """The function by which Forge's VAE computes attention, when it is not Forge's own; one line for the user."""
    from backend.nn import vae

    source = origin(vae.attention_function_single_head_spatial)
    return None if source == "backend.attention" else f"the attention of Forge's VAE was replaced by {source}"


def upcasts_attention() -> bool:
    """Whether Forge computes attention scores in float32 whatever the type of its inputs."""
    from backend import attention
    from backend.nn import unet as forge_unet

    upcasting = forge_unet.attention_function.__name__ in UPCASTING_ATTENTIONS
    return upcasting and attention.get_attn_precision(None) == torch.float32
