"""Hosts that carry ComfyUI's code as ldm_patched, reForge and Forge Classic: Forge's adapter over other modules."""
from __future__ import annotations

from typing import Any

from ..contract import WebUI
from ..forge.adapter import Forge
from ..forge.traits import Traits, version_and_release
from ..needs import check_needs

UNET = "ldm_patched.ldm.modules.diffusionmodules.openaimodel"
UTIL = "ldm_patched.ldm.modules.diffusionmodules.util"
ATTENTION = "ldm_patched.ldm.modules.attention"


def release() -> str:
    """ "reForge 1.0.0v2-v1.10.1RC" or "Forge Classic"; reForge's file tells a version and not its name."""
    version = version_and_release()[0]
    return "Forge Classic" if version == "classic" else f"reForge {version}".strip()


def adapter() -> WebUI:
    """Raises Refusal for a release that lacks something."""
    check_needs(release(), LDM_PATCHED.needs())
    # reForge loads a checkpoint when it starts, whatever its command line says; Classic does not.
    return Forge(LDM_PATCHED, loads_at_start=release().startswith("reForge"))


def loaded_or_first() -> Any:
    from modules import sd_models

    return sd_models.model_data.get_sd_model()


def vae_attention(decoder: Any) -> Any:
    """Each attention block of the VAE keeps the function that it was built with."""
    return decoder.mid.attn_1.optimized_attention


LDM_PATCHED = Traits(
    name="ldm_patched", release=release, unet=UNET, unet_class="UNetModel",
    vae="ldm_patched.ldm.modules.diffusionmodules.model",
    attention=ATTENTION, attention_user=ATTENTION, attention_name="optimized_attention",
    helpers={"apply_control": UNET, "forward_timestep_embed": UNET, "timestep_embedding": UTIL},
    memory="ldm_patched.modules.model_management", sampling="modules_forge.forge_sampler",
    selected_checkpoint=loaded_or_first, vae_attention=vae_attention,
)
