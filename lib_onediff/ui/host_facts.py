"""What of a WebUI decides about the last digits of an image: its flags, its options, and what it has loaded.

All of it is read by name where it is there: hosts differ, and so do their versions. Nothing is loaded, and nothing but
switches and what is named here is told.
"""
from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .facts import Facts, as_fact

OPTIONS = (
    "cross_attention_optimization", "upcast_attn", "s_min_uncond", "s_min_uncond_all", "token_merging_ratio",
    "token_merging_ratio_hr", "hypertile_enable_unet", "hypertile_enable_vae", "fp8_storage", "cache_fp16_weight",
    "pad_cond_uncond", "pad_cond_uncond_v0", "batch_cond_uncond", "sd_unet", "sd_vae", "auto_vae_precision",
    "auto_vae_precision_bfloat16", "sd_vae_encode_method", "sd_vae_decode_method", "CLIP_stop_at_last_layers",
    "randn_source", "emphasis", "comma_padding_backtrack", "tiling", "lora_functional", "use_old_scheduling",
    "use_old_emphasis_implementation", "use_old_karras_scheduler_sigmas", "always_discard_next_to_last_sigma",
    "sgm_noise_multiplier", "eta_noise_seed_delta", "eta_ddim", "eta_ancestral", "s_churn", "s_tmin", "s_tmax",
    "s_noise", "sigma_min", "sigma_max", "rho", "sd_noise_schedule", "enable_batch_seeds", "forge_try_reproduce",
    "forge_unet_storage_dtype", "forge_additional_modules", "dont_fix_second_order_samplers_schedule",
)


def host_facts(release: str) -> Facts:
    """The facts of the WebUI that we run in. release: what its adapter calls it ("A1111 v1.10.1")."""
    from modules import shared

    return {
        "WebUI": {"Release": release, "Attention": attention(), **types()},
        "WebUI flags": flags(shared.cmd_opts),
        "WebUI options": named(shared.opts, OPTIONS),
        "Model": model(),
    }


def flags(given: Any) -> dict[str, str]:
    """The switches that are on, and two choices; nothing of what else is on a command line: paths, passwords."""
    switches = (name for name, value in sorted(vars(given).items()) if value is True)
    return named(given, ("precision", "use_cpu", *switches))


def named(holder: Any, names: Iterable[str]) -> dict[str, str]:
    """What holder has of these names."""
    return {name: as_fact(getattr(holder, name)) for name in names if hasattr(holder, name)}


def attention() -> str:
    """The attention that the WebUI's own UNet uses."""
    forge, a1111 = sys.modules.get("backend.attention"), sys.modules.get("modules.sd_hijack")
    if forge is not None:
        return as_fact(getattr(getattr(forge, "attention_function", None), "__name__", None))
    return as_fact(getattr(getattr(a1111, "model_hijack", None), "optimization_method", None))


def types() -> dict[str, str]:
    """The number types that the WebUI has chosen."""
    devices = sys.modules.get("modules.devices")
    names = {"Type": "dtype", "Type of the UNet": "dtype_unet", "Type of the VAE": "dtype_vae"}
    return {
        label: as_fact(str(getattr(devices, name)).removeprefix("torch."))
        for label, name in names.items() if hasattr(devices, name)
    }


def model() -> dict[str, str]:
    """The loaded checkpoint and VAE, by name and hash."""
    facts = {"Checkpoint": as_fact(checkpoint_name()), "Hash": as_fact(getattr(loaded(), "sd_model_hash", None))}
    vae: Any = sys.modules.get("modules.sd_vae")
    if hasattr(vae, "get_loaded_vae_name"):
        facts.update({"VAE": as_fact(vae.get_loaded_vae_name()), "Hash of the VAE": as_fact(vae.get_loaded_vae_hash())})
    return facts


def checkpoint_name() -> str:
    """What the WebUI calls the loaded checkpoint; nothing where none is loaded."""
    info = getattr(loaded(), "sd_checkpoint_info", None)
    return getattr(info, "name_for_extra", None) or getattr(loaded(), "name", None) or ""


def loaded() -> Any:
    """The loaded model; shared.sd_model would load one."""
    from modules import sd_models

    return sd_models.model_data.sd_model
