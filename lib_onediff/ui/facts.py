"""The facts that an image's exact pixels depend on: machine, versions, PyTorch's switches, the WebUI, our settings.

WebUIs and versions differ, so a fact of the WebUI that does not exist is left out. No package and no model is loaded to
read a fact. Of the command line, only switches that are on, `precision` and `use_cpu` are read, and of the environment
only the variables listed here: no paths, no passwords.
"""
from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib import metadata
from typing import Any

import torch

from ..core.settings import Settings, format_value
from ..runtime.cache import Fingerprint

# Values by section and name, in the order in which they are shown. Facts that change an image most come first.
Facts = dict[str, dict[str, str]]

# The largest number of characters of a fact.
LONGEST_VALUE = 160
# The facts of None, of an empty text and of a package that is not installed; of a switch that torch cannot give.
NOTHING = "none"
UNREADABLE = "not known to this torch"
PATH_SEPARATORS = re.compile(r"[/\\]")
# Packages that compute or change part of an image.
PACKAGES = ("xformers", "flash-attn", "sageattention", "oneflow", "bitsandbytes", "tomesd", "diffusers")
# Environment variables that change how numbers are computed. Their values are words and numbers.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_SDPA_ENABLED", "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_ADDMM_CUDA_LT", "ATTN_PRECISION", "HIPBLASLT_ALLOW_TF32",
    "ONEFLOW_MATMUL_ALLOW_HALF_PRECISION_ACCUMULATION",
    "ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION", "ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL",
)
# Attributes and functions of torch, as dotted paths, by the fact's name.
TORCH_SWITCHES = {
    "TF32 in products": "backends.cuda.matmul.allow_tf32", "TF32 in convolutions": "backends.cudnn.allow_tf32",
    "float32 products": "get_float32_matmul_precision",
    "fp16 reduced precision reduction": "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "bf16 reduced precision reduction": "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "fp16 accumulation": "backends.cuda.matmul.allow_fp16_accumulation",
    "BLAS library": "backends.cuda.preferred_blas_library", "cuDNN": "backends.cudnn.enabled",
    "cuDNN benchmark": "backends.cudnn.benchmark", "cuDNN benchmark limit": "backends.cudnn.benchmark_limit",
    "cuDNN deterministic": "backends.cudnn.deterministic",
    "Deterministic algorithms": "are_deterministic_algorithms_enabled",
    "Flash attention": "backends.cuda.flash_sdp_enabled",
    "Memory-efficient attention": "backends.cuda.mem_efficient_sdp_enabled",
    "cuDNN attention": "backends.cuda.cudnn_sdp_enabled", "Plain attention": "backends.cuda.math_sdp_enabled",
    "Plain attention in half precision": "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
    "Default type": "get_default_dtype",
}
# Options of WebUIs that change an image. No WebUI has all of them.
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


def as_fact(value: Any) -> str:
    """A value as one line of a report: "on" or "off" for a bool, a list's values joined by commas, only the last part
    of a path; NOTHING for None and an empty text. A text is cut after LONGEST_VALUE characters."""
    if isinstance(value, bool):
        return format_value(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_fact, value))
    if value is None:
        return NOTHING
    text = f"{value:g}" if isinstance(value, float) else str(value)
    one_line = " ".join(text.split())
    last_part = PATH_SEPARATORS.split(one_line)[-1]
    return last_part[:LONGEST_VALUE].strip() or NOTHING


def machine_facts() -> Facts:
    """The facts of the machine: the GPU, the versions, the current state of PyTorch's switches, and environment
    variables. Takes milliseconds."""
    fingerprint = Fingerprint.of()
    gpu = {"GPU": NOTHING}
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {
            "GPU": fingerprint.gpu, "Compute capability": f"{device.major}.{device.minor}",
            "Multiprocessors": str(device.multi_processor_count),
            "GPU memory": f"{device.total_memory / 2**30:.0f} GiB", "Driver": as_fact(fingerprint.driver),
        }
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "Software": {
            "OneDiff": fingerprint.onediff, "torch": torch.__version__, "CUDA": as_fact(torch.version.cuda),
            "HIP": as_fact(torch.version.hip), "cuDNN": as_fact(cudnn), "Python": platform.python_version(),
            **{name: package_version(name) for name in PACKAGES},
        },
        "PyTorch": {name: torch_switch(path) for name, path in TORCH_SWITCHES.items()},
        "Environment": {name: as_fact(os.environ.get(name)) for name in VARIABLES},
        "Machine": {
            **gpu, "System": f"{platform.system()} {platform.machine()}", "CPU threads": str(torch.get_num_threads()),
        },
    }


def package_version(name: str) -> str:
    """The version of an installed package; NOTHING if it is not installed."""
    try:
        return as_fact(metadata.version(name))
    except metadata.PackageNotFoundError:
        return NOTHING


def torch_switch(path: str) -> str:
    """The value of torch's attribute at this dotted path, as text; if the attribute is a function, its result.

    UNREADABLE if torch raises: for a name that it does not have (torch 2.1 asserts it), and for an old switch that
    newer ones contradict.
    """
    try:
        value = operator.attrgetter(path)(torch)
        value = value() if callable(value) else value
    except (AttributeError, AssertionError, RuntimeError):
        return UNREADABLE
    # Of an enumeration's member or a type, only the last part of its name.
    is_plain = value is None or isinstance(value, (bool, int, str))
    return as_fact(value if is_plain else str(value).rsplit(".", 1)[-1])


def onediff_facts(settings: Settings, status: Mapping[str, Any], tuned: Mapping[str, Any]) -> Facts:
    """The facts of OneDiff: its settings, the backend and route of the last call, and the choices that were tuned on
    this machine.

    status: runtime.status(). tuned: the tuned choices by name; only their number and a hash become facts.
    """
    digest = hashlib.sha256(json.dumps(dict(tuned), sort_keys=True, default=str).encode()).hexdigest()
    return {
        "OneDiff settings": named(settings, (option.name for option in fields(Settings))),
        "OneDiff": {
            "Backend in use": as_fact(status.get("backend")), "Route of the last call": as_fact(status.get("route")),
            "Tuned choices": f"{len(tuned)}, {digest[:12]}" if tuned else NOTHING,
        },
    }


def host_facts(release: str) -> Facts:
    """The facts of the WebUI that OneDiff runs in: the loaded model, the options that change images, the dtypes, and
    the flags of its command line. release: the WebUI's name and version, for example "A1111 v1.10.1"."""
    from modules import shared

    # Options with other values may be paths and passwords.
    switches = (name for name, value in sorted(vars(shared.cmd_opts).items()) if value is True)
    devices = sys.modules.get("modules.devices")
    types = {"Type": "dtype", "Type of the UNet": "dtype_unet", "Type of the VAE": "dtype_vae"}
    model = {"Checkpoint": as_fact(checkpoint_name()), "Hash": as_fact(getattr(loaded_model(), "sd_model_hash", None))}
    vae: Any = sys.modules.get("modules.sd_vae")
    if hasattr(vae, "get_loaded_vae_name"):
        model.update({"VAE": as_fact(vae.get_loaded_vae_name()), "Hash of the VAE": as_fact(vae.get_loaded_vae_hash())})
    return {
        "Model": model,
        "WebUI options": named(shared.opts, OPTIONS),
        "WebUI": {"Release": release, "Attention": attention_name(), **{
            label: as_fact(str(getattr(devices, name)).removeprefix("torch."))
            for label, name in types.items() if hasattr(devices, name)
        }},
        "WebUI flags": named(shared.cmd_opts, ("precision", "use_cpu", *switches)),
    }


def named(holder: Any, names: Iterable[str]) -> dict[str, str]:
    """The holder's attributes of these names, as facts by name; names that it does not have are left out."""
    return {name: as_fact(getattr(holder, name)) for name in names if hasattr(holder, name)}


def attention_name() -> str:
    """The name of the attention that the WebUI's own UNet uses, of the Forge family or of A1111; NOTHING if unknown."""
    forge = sys.modules.get("backend.attention")
    a1111 = sys.modules.get("modules.sd_hijack")
    if forge is not None:
        return as_fact(getattr(getattr(forge, "attention_function", None), "__name__", None))
    return as_fact(getattr(getattr(a1111, "model_hijack", None), "optimization_method", None))


def checkpoint_name() -> str:
    """The WebUI's name of the loaded checkpoint; "" if none is loaded."""
    info = getattr(loaded_model(), "sd_checkpoint_info", None)
    return getattr(info, "name_for_extra", None) or getattr(loaded_model(), "name", None) or ""


def loaded_model() -> Any:
    """The WebUI's loaded model; None if there is none. Reading the WebUI's shared.sd_model instead would load one."""
    from modules import sd_models

    return sd_models.model_data.sd_model
