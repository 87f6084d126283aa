"""What of a machine and its Python decides about the last digits of a picture."""
from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from ..store.machine import Fingerprint
from .report import Facts, as_fact

NOT_KNOWN = "not known to this torch"
NOT_READ = "not to be read"
# Packages whose kernels take part in a picture.
PACKAGES = ("xformers", "flash-attn", "sageattention", "oneflow", "bitsandbytes", "tomesd", "diffusers")
# Variables that change how numbers are computed; their values are words and numbers.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_CUDNN_SDPA_ENABLED", "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_ADDMM_CUDA_LT", "ATTN_PRECISION", "HIPBLASLT_ALLOW_TF32",
    "ONEFLOW_MATMUL_ALLOW_HALF_PRECISION_ACCUMULATION",
    "ONEFLOW_CONV_ALLOW_HALF_PRECISION_ACCUMULATION", "ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL",
)


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
        "Python": platform.python_version(), **{name: installed(name) for name in PACKAGES},
    }


def installed(name: str) -> str:
    try:
        return as_fact(metadata.version(name))
    except metadata.PackageNotFoundError:
        return "none"


def switches() -> dict[str, str]:
    """PyTorch's switches, those that a version does not have included."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    matmul = cuda.matmul
    return {
        "TF32 in products": asked(lambda: matmul.allow_tf32),
        "TF32 in convolutions": asked(lambda: cudnn.allow_tf32),
        "float32 products": asked(torch.get_float32_matmul_precision),
        "fp16 reduced precision reduction": asked(lambda: matmul.allow_fp16_reduced_precision_reduction),
        "bf16 reduced precision reduction": asked(lambda: matmul.allow_bf16_reduced_precision_reduction),
        "fp16 accumulation": asked(lambda: matmul.allow_fp16_accumulation),
        "BLAS library": asked(cuda_blas),
        "cuDNN": asked(lambda: cudnn.enabled), "cuDNN benchmark": asked(lambda: cudnn.benchmark),
        "cuDNN benchmark limit": asked(lambda: cudnn.benchmark_limit),
        "cuDNN deterministic": asked(lambda: cudnn.deterministic),
        "Deterministic algorithms": asked(torch.are_deterministic_algorithms_enabled),
        "Flash attention": asked(cuda.flash_sdp_enabled),
        "Memory-efficient attention": asked(cuda.mem_efficient_sdp_enabled),
        "cuDNN attention": asked(lambda: cuda.cudnn_sdp_enabled()),
        "Plain attention": asked(cuda.math_sdp_enabled),
        "Plain attention in half precision": asked(lambda: cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "Default type": as_fact(str(torch.get_default_dtype()).removeprefix("torch.")),
    }


def cuda_blas() -> str:
    """The library that PyTorch prefers for matrix products."""
    return str(torch.backends.cuda.preferred_blas_library()).rsplit(".", 1)[-1]


def asked(read: Callable[[], Any]) -> str:
    """What a switch says. PyTorch raises where it has none of that name, and where newer switches contradict it."""
    try:
        return as_fact(read())
    except (AttributeError, AssertionError) as error:
        # torch 2.1 asserts that it knows a name; an assertion of another kind is about the GPU.
        unknown = isinstance(error, AttributeError) or str(error).startswith("Unknown attribute")
        return NOT_KNOWN if unknown else NOT_READ
    except RuntimeError:
        return NOT_READ
