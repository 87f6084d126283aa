"""The adapter of reForge and Forge Classic, which contain ComfyUI's code as ldm_patched: Forge's adapter with other
module names."""
from __future__ import annotations

from typing import Any

from ...families.leaf_reader import HOST_LAYERS
from ..contract import name_of_model
from ..forge.adapter import Forge, patcher_of, version_and_release
from ..forge.call import UNET_PARAMETERS
from ..forge.networks import HostAttention, HostNetwork

# The Python modules of the UNet and of the attention functions.
UNET = "ldm_patched.ldm.modules.diffusionmodules.openaimodel"
ATTENTION = "ldm_patched.ldm.modules.attention"


def release() -> str:
    """The WebUI's name and version for users: "reForge 1.0.0v2-v1.10.1RC" or "Forge Classic"."""
    # reForge's forge_version has a number only.
    version = version_and_release()[0]
    return "Forge Classic" if version == "classic" else f"reForge {version}".strip()


class LdmPatched(Forge):
    """The adapter of reForge and Forge Classic: Forge's, for the Python modules of these WebUIs."""

    name = "ldm_patched"
    networks = (
        HostNetwork(
            UNET, "UNetModel", UNET_PARAMETERS, HostAttention(ATTENTION, ATTENTION, "optimized_attention"),
            {
                "apply_control": UNET, "forward_timestep_embed": UNET,
                "timestep_embedding": "ldm_patched.ldm.modules.diffusionmodules.util",
            },
        ),
    )
    vae_module = "ldm_patched.ldm.modules.diffusionmodules.model"
    memory = "ldm_patched.modules.model_management"
    sampling = "modules_forge.forge_sampler"

    def kind_of(self, checkpoint: Any) -> str:
        """The name for users of a checkpoint's model, such as "SDXL", also of a model that OneDiff does not serve. The
        name comes from the class of the model in the checkpoint, because all checkpoints have the same class here. See
        WebUI."""
        return name_of_model(type(getattr(patcher_of(checkpoint), "model", checkpoint)).__name__)

    def selected_checkpoint(self) -> Any:
        """The checkpoint that the user has selected. Loads it if it is not loaded yet. See Forge."""
        from modules import sd_models

        return sd_models.model_data.get_sd_model()

    def vae_attention(self, decoder: Any) -> Any:
        """The function with which a VAE's decoder computes attention. See Forge."""
        # Each attention block of the VAE keeps the function that was chosen when the block was made.
        return decoder.mid.attn_1.optimized_attention

    def loads_at_start(self) -> bool:
        """Whether the WebUI loads a checkpoint when it starts, rather than with the first image: reForge does, Forge
        Classic does not. See WebUI."""
        # reForge does so with every command line, Classic never.
        return self.release.startswith("reForge")


HOST_LAYERS.take("ldm_patched", *(
    f"disable_weight_init.{layer}" for layer in ("Linear", "Conv2d", "GroupNorm", "LayerNorm")
))
