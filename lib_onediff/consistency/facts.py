"""What of a machine, its Python and OneDiff decides about the last digits of an image."""
from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import metadata
from typing import Any

import torch

from ..options.settings import Settings
from ..store.machine import Fingerprint
from .report import Facts, as_fact, as_words

UNKNOWN = "not known to this torch"
UNREADABLE = "not to be read"
# Packages whose kernels take part in an image.
PACKAGES = ("xformers", "flash-attn", "sageattention", "oneflow", "bitsandbytes", "tomesd", "diffusers")
# Variables that change how numbers are computed; their values are words and numbers.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_SDPA_ENABLED", "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_ADDMM_CUDA_LT", "ATTN_PRECISION", "HIPBLASLT_ALLOW_TF32",
    "ONEFLOW_MATMUL_ALLOW_HALF_PRECISION_ACCUMULATION",
    "ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION", "ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL",
)
DIGITS = 12


def machine_facts() -> Facts:
    """The GPU, the versions, and PyTorch's switches as they stand now. Takes milliseconds."""
    return {
        "Machine": hardware(), "Software": software(), "PyTorch": switches(),
        "Environment": {name: as_fact(os.environ.get(name)) for name in VARIABLES},
    }


def hardware() -> dict[str, str]:
    fingerprint = Fingerprint.of()
    facts = {"System": f"{platform.system()} {platform.machine()}", "CPU threads": str(torch.get_num_threads())}
    if not torch.cuda.is_available():
        return {"GPU": "none", **facts}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "GPU": fingerprint.gpu, "Compute capability": f"{device.major}.{device.minor}",
        "Multiprocessors": str(device.multi_processor_count),
        "GPU memory": f"{device.total_memory / 2**30:.0f} GiB", "Driver": as_fact(fingerprint.driver), **facts,
    }


def software() -> dict[str, str]:
    fingerprint = Fingerprint.of()
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "OneDiff": fingerprint.onediff, "torch": torch.__version__, "CUDA": as_fact(torch.version.cuda),
        "HIP": as_fact(torch.version.hip), "cuDNN": as_fact(cudnn), "Triton": as_fact(fingerprint.triton),
        "Python": platform.python_version(), **{name: package_version(name) for name in PACKAGES},
    }


def package_version(name: str) -> str:
    try:
        return as_fact(metadata.version(name))
    except metadata.PackageNotFoundError:
        return "none"


def switches() -> dict[str, str]:
    """PyTorch's switches, those that a version does not have included."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    matmul = cuda.matmul
    return {
        "TF32 in products": read_switch(lambda: matmul.allow_tf32),
        "TF32 in convolutions": read_switch(lambda: cudnn.allow_tf32),
        "float32 products": read_switch(torch.get_float32_matmul_precision),
        "fp16 reduced precision reduction": read_switch(lambda: matmul.allow_fp16_reduced_precision_reduction),
        "bf16 reduced precision reduction": read_switch(lambda: matmul.allow_bf16_reduced_precision_reduction),
        "fp16 accumulation": read_switch(lambda: matmul.allow_fp16_accumulation),
        "BLAS library": read_switch(cuda_blas),
        "cuDNN": read_switch(lambda: cudnn.enabled), "cuDNN benchmark": read_switch(lambda: cudnn.benchmark),
        "cuDNN benchmark limit": read_switch(lambda: cudnn.benchmark_limit),
        "cuDNN deterministic": read_switch(lambda: cudnn.deterministic),
        "Deterministic algorithms": read_switch(torch.are_deterministic_algorithms_enabled),
        "Flash attention": read_switch(cuda.flash_sdp_enabled),
        "Memory-efficient attention": read_switch(cuda.mem_efficient_sdp_enabled),
        "cuDNN attention": read_switch(lambda: cuda.cudnn_sdp_enabled()),
        "Plain attention": read_switch(cuda.math_sdp_enabled),
        "Plain attention in half precision": read_switch(lambda: cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "Default type": as_fact(str(torch.get_default_dtype()).removeprefix("torch.")),
    }


def cuda_blas() -> str:
    """The library that PyTorch prefers for matrix products."""
    return str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1]


def read_switch(read: Callable[[], Any]) -> str:
    """What a switch says. PyTorch raises where it has none of that name, and where newer switches contradict it."""
    try:
        return as_fact(read())
    except (AttributeError, AssertionError) as error:
        # torch 2.1 asserts that it knows a name; an assertion of another kind is about the GPU.
        unknown = isinstance(error, AttributeError) or str(error).startswith("Unknown attribute")
        return UNKNOWN if unknown else UNREADABLE
    except RuntimeError:
        return UNREADABLE


def onediff_facts(settings: Settings, status: Mapping[str, Any], tuned: Mapping[str, Any]) -> Facts:
    """Our settings, how the last image was made (runtime.status()), and what was tuned on this machine."""
    return {
        "OneDiff": {
            "Backend in use": as_fact(status.get("backend")), "Route of the last call": as_fact(status.get("route")),
            "Tuned choices": digest(tuned),
        },
        "OneDiff settings": {
            option.name: as_words(getattr(settings, option.name)) for option in fields(Settings)
        },
    }


def digest(tuned: Mapping[str, Any]) -> str:
    """How many choices there are, and a hash that is equal where all of them are."""
    if not tuned:
        return "none"
    text = json.dumps(dict(tuned), sort_keys=True, default=str)
    return f"{len(tuned)}, {hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"
