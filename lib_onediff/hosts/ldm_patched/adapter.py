"""reForge and Forge Classic: Forge's adapter over ComfyUI's UNet, VAE and memory management of their own."""
from __future__ import annotations

from typing import Any

from ..forge.adapter import Forge
from ..forge.traits import Traits, told_version

UNET = "ldm_patched.ldm.modules.diffusionmodules.openaimodel"
UTIL = "ldm_patched.ldm.modules.diffusionmodules.util"
VAE = "ldm_patched.ldm.modules.diffusionmodules.model"
ATTENTION = "ldm_patched.ldm.modules.attention"


def loaded_or_first() -> Any:
    from modules import sd_models

    return sd_models.model_data.get_sd_model()


def release() -> str:
    """ "reForge 1.0.0v2-v1.10.1RC" or "Forge Classic"; reForge's file tells a version and not its name."""
    version = told_version()[0]
    return "Forge Classic" if version == "classic" else f"reForge {version}".strip()


def vae_attention(decoder: Any) -> Any:
    """Each attention block of the VAE keeps the function that it was built with."""
    return decoder.mid.attn_1.optimized_attention


LDM_PATCHED = Traits(
    name="ldm_patched", release=release, unet=UNET, unet_class="UNetModel", vae=VAE,
    attention=ATTENTION, attention_user=ATTENTION, attention_name="optimized_attention",
    helpers=((UNET, "apply_control", UNET), (UNET, "forward_timestep_embed", UNET), (UNET, "timestep_embedding", UTIL)),
    memory="ldm_patched.modules.model_management", sampling="modules_forge.forge_sampler",
    selected_engine=loaded_or_first, vae_attention=vae_attention,
)


class LdmPatched(Forge):
    """hosts.webui.WebUI for reForge and Forge Classic."""

    traits = LDM_PATCHED

    def loads_at_start(self) -> bool:
        # reForge does, whatever its command line says; Classic does not.
        return self.release.startswith("reForge")
