"""What differs between the hosts of the Forge family, what our adapter needs of each of them, and what speaks against
serving a call there."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.origins import origin
from ...core.refusal import Refusal
from ...weights.binding import BOUND_DTYPES, STORED_DTYPES
from ..needs import Need

UNET_ARGUMENTS = ("x", "timesteps", "context", "y", "control", "transformer_options")
# What hosts and their extensions call an attention function, and what people call it.
ATTENTIONS = {
    "attention_sage": "SageAttention", "attention_sage3": "SageAttention 3", "attention_flash": "FlashAttention",
    "attention_xformers": "xformers",
}
# These round queries and keys to 8 bits or fewer.
APPROXIMATE_ATTENTIONS = {"attention_sage", "attention_sage3"}
EXACT_ATTENTION = "attention_pytorch"
UPCASTING_ATTENTIONS = {"attention_basic", "attention_split", "attention_sub_quad"}


@dataclass(frozen=True)
class Traits:
    """One family of hosts.

    name: for programs. release: the name and release of the one that we run in.
    unet, unet_class: the module and the class of the UNet.
    vae: the module of the VAE's Decoder and Encoder.
    attention: the module with the UNet's attention functions.
    attention_user, attention_name: the module and the global name by which the UNet calls the chosen one.
    helpers: other global functions of the UNet's module that it calls, each with the module whose code it must be.
    memory, sampling: the modules of the memory management and of sampling_prepare.
    selected_checkpoint: loads the checkpoint that the user has chosen.
    vae_attention: the function by which a decoder computes attention.
    """

    name: str
    release: Callable[[], str]
    unet: str
    unet_class: str
    vae: str
    attention: str
    attention_user: str
    attention_name: str
    helpers: Mapping[str, str]
    memory: str
    sampling: str
    selected_checkpoint: Callable[[], Any]
    vae_attention: Callable[[Any], Any]

    def needs(self) -> tuple[Need, ...]:
        """What must be there before we hook anything."""
        return (
            Need(self.unet, f"{self.unet_class}.forward", UNET_ARGUMENTS),
            *(Need(self.unet, name) for name in self.helpers),
            Need(self.attention_user, self.attention_name),
            Need(self.vae, "Decoder.forward", ("z",)), Need(self.vae, "Encoder.forward", ("x",)),
            Need(self.memory, "get_free_memory"), Need(self.memory, "module_size"),
            Need(self.sampling, "sampling_prepare"), Need(self.sampling, "sampling_cleanup"),
            Need("modules.sd_models", "model_data"), Need("modules.call_queue", "queue_lock"),
            Need("modules.shared", "state"), Need("modules_forge.main_thread", "run_and_wait_result"),
        )

    def attention_function(self) -> Any:
        """The attention function that the host's UNet uses now."""
        return getattr(importlib.import_module(self.attention_user), self.attention_name)

    def unused_attention(self) -> str | None:
        """What people call the attention that the user has chosen for the host and that we do not use."""
        return ATTENTIONS.get(self.attention_function().__name__)

    def upcasts_attention(self, dtype: torch.dtype) -> bool:
        """Whether the host computes the UNet's attention scores in float32 when its inputs are of dtype."""
        if self.attention_function().__name__ not in UPCASTING_ATTENTIONS:
            return False
        attention = importlib.import_module(self.attention)
        precision = getattr(attention, "get_attn_precision", None)
        if precision is None:
            # Classic has a flag of the module instead.
            return getattr(attention, "_ATTN_PRECISION", None) == "fp32"
        # Forge's takes the wanted precision alone; Neo's and ldm_patched's take the type of the inputs too.
        takes = precision.__code__.co_argcount
        return precision(*(None, dtype)[:takes]) == torch.float32

    def with_exact_attention(self, host: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The host's forward with PyTorch's attention in place of one that rounds its inputs to 8 bits."""
        chosen = self.attention_function()
        exact = getattr(importlib.import_module(self.attention), EXACT_ATTENTION, None)
        if chosen.__name__ not in APPROXIMATE_ATTENTIONS or exact is None:
            return host

        def exactly() -> Tensor:
            user = importlib.import_module(self.attention_user)
            setattr(user, self.attention_name, exact)
            try:
                return host()
            finally:
                setattr(user, self.attention_name, chosen)

        return exactly

    def check_functions(self) -> None:
        """Raise Refusal where a function that the host's UNet calls is not the host's own now. Microseconds."""
        unet = importlib.import_module(self.unet)
        called = [(name, getattr(unet, name), owner) for name, owner in self.helpers.items()]
        for name, function, owner in (*called, (self.attention_name, self.attention_function(), self.attention)):
            source = origin(function)
            if source != owner:
                raise Refusal(f"{name} of the WebUI's UNet was replaced by {source}")

    def check_vae(self, decoder: Any) -> None:
        """Raise Refusal where the host's VAE computes attention by a function that is not the host's own."""
        source = origin(self.vae_attention(decoder))
        if source not in (self.attention, self.vae):
            raise Refusal(f"the attention of the WebUI's VAE was replaced by {source}")


def check_storage(unet: Any) -> None:
    """Raise Refusal where the host casts a UNet's weights in a way that we do not know."""
    stored, computed = getattr(unet, "storage_dtype", None), getattr(unet, "computation_dtype", None)
    if stored != computed and not (stored in STORED_DTYPES and computed in BOUND_DTYPES):
        stored, computed = (str(kind).removeprefix("torch.") for kind in (stored, computed))
        raise Refusal(
            f"the UNet is stored as {stored} and computed in {computed}: the WebUI casts its weights at every call"
        )


def version_and_release() -> tuple[str, str]:
    """What the host says of itself: its version, and its release where it tells one."""
    try:
        said = importlib.import_module("modules_forge.forge_version")
    except ImportError:
        return "", ""
    return str(getattr(said, "version", "")), str(getattr(said, "release", ""))


def forge_release() -> str:
    """ "Forge 2.0.1v1.10.1" or "Forge Neo 2.26"."""
    version, number = version_and_release()
    return (f"Forge Neo {number}" if version == "neo" else f"Forge {version}").strip()


def reloaded_checkpoint() -> Any:
    from modules import sd_models

    return sd_models.forge_model_reload()[0]


def forge_vae_attention(decoder: Any) -> Any:
    """The function by which Forge's VAE computes attention; its name has changed over time."""
    vae = importlib.import_module(type(decoder).__module__)
    older = getattr(vae, "attention_function_single_head_spatial", None)
    return getattr(vae, "attention_function_vae", older)


FORGE = Traits(
    name="forge", release=forge_release, unet="backend.nn.unet", unet_class="IntegratedUNet2DConditionModel",
    vae="backend.nn.vae",
    attention="backend.attention", attention_user="backend.nn.unet", attention_name="attention_function",
    helpers=dict.fromkeys(("apply_control", "timestep_embedding", "checkpoint"), "backend.nn.unet"),
    memory="backend.memory_management", sampling="backend.sampling.sampling_function",
    selected_checkpoint=reloaded_checkpoint, vae_attention=forge_vae_attention,
)
