"""What differs between the hosts of the Forge family, and what our adapter needs of each of them."""
from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ..contract import Need

UNET_ARGUMENTS = ("x", "timesteps", "context", "y", "control", "transformer_options")
# What hosts and their extensions call an attention function, and what people call it.
ATTENTIONS = {
    "attention_sage": "SageAttention", "attention_sage3": "SageAttention 3", "attention_flash": "FlashAttention",
    "attention_xformers": "xformers",
}
# These round queries and keys to 8 bits or fewer.
APPROXIMATE_ATTENTIONS = {"attention_sage", "attention_sage3"}


@dataclass(frozen=True)
class Traits:
    """One family of hosts.

    release: the name and release of the one that we run in.
    unet, unet_class: the module and the class of the UNet.
    vae: the module of the VAE's Decoder and Encoder.
    attention: the module with the UNet's attention functions.
    attention_user, attention_name: the module and the global name by which the UNet calls the chosen one.
    helpers: other global functions that the UNet calls, (module, name), each with the module whose code it must be.
    memory, sampling: the modules of the memory management and of sampling_prepare.
    selected_engine: loads the checkpoint that the user has chosen.
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
    helpers: tuple[tuple[str, str, str], ...]
    memory: str
    sampling: str
    selected_engine: Callable[[], Any]
    vae_attention: Callable[[Any], Any]

    def module(self, name: str) -> ModuleType:
        return importlib.import_module(name)

    def computation_dtype(self, patcher: Any) -> Any:
        """The type in which the host calls the UNet of a patcher."""
        model = patcher.model
        computed = getattr(model, "computation_dtype", None) or getattr(model, "manual_cast_dtype", None)
        return computed or patcher.model_dtype()

    def attention_function(self) -> Any:
        """The attention function that the host's UNet uses now."""
        return getattr(self.module(self.attention_user), self.attention_name)

    def helper_functions(self) -> dict[tuple[str, str, str], Any]:
        """The functions that the host's UNet calls now, by module, name and the module whose code they should run."""
        attention = (self.attention_user, self.attention_name, self.attention)
        return {place: getattr(importlib.import_module(place[0]), place[1]) for place in (*self.helpers, attention)}

    def needs(self) -> tuple[Need, ...]:
        """What must be there before we hook anything."""
        return (
            Need(self.unet, f"{self.unet_class}.forward", UNET_ARGUMENTS),
            *(Need(module, name) for module, name, _ in self.helpers),
            Need(self.attention_user, self.attention_name),
            Need(self.vae, "Decoder.forward", ("z",)), Need(self.vae, "Encoder.forward", ("x",)),
            Need(self.memory, "get_free_memory"), Need(self.memory, "module_size"),
            Need(self.sampling, "sampling_prepare"), Need(self.sampling, "sampling_cleanup"),
            Need("modules.sd_models", "model_data"), Need("modules.call_queue", "queue_lock"),
            Need("modules.shared", "state"), Need("modules_forge.main_thread", "run_and_wait_result"),
        )


# What a loaded checkpoint must have.
ENGINE_PATHS = (
    "forge_objects.unet.model", "forge_objects.unet.model_options", "forge_objects.unet.load_device",
    "forge_objects_original.unet", "forge_objects_after_applying_lora",
)


def told_version() -> tuple[str, str]:
    """What the host says of itself: its version, and its release where it tells one."""
    try:
        told = importlib.import_module("modules_forge.forge_version")
    except ImportError:
        return "", ""
    return str(getattr(told, "version", "")), str(getattr(told, "release", ""))


def release() -> str:
    """ "Forge 2.0.1v1.10.1" or "Forge Neo 2.26"."""
    version, number = told_version()
    return (f"Forge Neo {number}" if version == "neo" else f"Forge {version}").strip()


def reloaded_engine() -> Any:
    from modules import sd_models

    return sd_models.forge_model_reload()[0]


def forge_vae_attention(decoder: Any) -> Any:
    """The function by which Forge's VAE computes attention; its name has changed over time."""
    vae = importlib.import_module(type(decoder).__module__)
    older = getattr(vae, "attention_function_single_head_spatial", None)
    return getattr(vae, "attention_function_vae", older)


FORGE = Traits(
    name="forge", release=release, unet="backend.nn.unet", unet_class="IntegratedUNet2DConditionModel",
    vae="backend.nn.vae",
    attention="backend.attention", attention_user="backend.nn.unet", attention_name="attention_function",
    helpers=(
        ("backend.nn.unet", "apply_control", "backend.nn.unet"),
        ("backend.nn.unet", "timestep_embedding", "backend.nn.unet"),
        ("backend.nn.unet", "checkpoint", "backend.nn.unet"),
    ),
    memory="backend.memory_management", sampling="backend.sampling.sampling_function",
    selected_engine=reloaded_engine, vae_attention=forge_vae_attention,
)
