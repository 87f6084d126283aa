"""The consistency report: what an image depends on to its last digit, as text, read back, and compared with another
machine's, so that users see why the same seed gives another image there.

    OneDiff consistency report, format 1
    [Machine]
    GPU: NVIDIA H200

The first line never changes its form; a section or a fact that a reader does not know is one like any other.
"""
from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib import metadata
from typing import Any, NamedTuple

import torch

from ..core.settings import Settings
from ..runtime.machine import Fingerprint
from .presets import preset_options

# Section to name to value, in the order in which they are shown.
Facts = dict[str, dict[str, str]]

FORMAT = 1
TITLE = "OneDiff consistency report, format {}"
FIRST_LINE = re.compile(r"OneDiff consistency report, format ([0-9]+)")
SECTION = re.compile(r"\[([^\[\]]+)\]")
LONGEST_VALUE, MOST_LINES = 160, 2000
NOTHING, UNREADABLE, UNTOLD = "none", "not known to this torch", "not told"
SWITCHES = {True: "on", False: "off"}
CHANGES_IMAGES, CHANGES_DIGITS, CHANGES_NOTHING = range(3)
# Another model, other options of the WebUI; and all options of presets, but for these.
SECTIONS_OF_IMAGES = {"Model", "WebUI options"}
OPTIONS_OF_DIGITS = {"vae_precision", "reduced_precision_reduction", "tf32", "attention_upcast"}
# What says how much there is, or when it is made.
NAMES_OF_NOTHING = {
    "System", "GPU memory", "Python", "verify", "memory_budget", "prewarm", "prewarm_most_used", "idle_prewarm",
}
PATH_SEPARATORS = re.compile(r"[/\\]")
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
DIGITS = 12


# --- collecting facts -------------------------------------------------------------------------------------------------


def machine_facts() -> Facts:
    """The GPU, the versions, and PyTorch's switches as they stand now. Takes milliseconds."""
    fingerprint = Fingerprint.of()
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "Machine": {**gpu_facts(fingerprint), "System": f"{platform.system()} {platform.machine()}",
                    "CPU threads": str(torch.get_num_threads())},
        "Software": {
            "OneDiff": fingerprint.onediff, "torch": torch.__version__, "CUDA": as_fact(torch.version.cuda),
            "HIP": as_fact(torch.version.hip), "cuDNN": as_fact(cudnn), "Triton": as_fact(fingerprint.triton),
            "Python": platform.python_version(), **{name: package_version(name) for name in PACKAGES},
        },
        "PyTorch": {name: switch(path) for name, path in TORCH_SWITCHES.items()},
        "Environment": {name: as_fact(os.environ.get(name)) for name in VARIABLES},
    }


def gpu_facts(fingerprint: Fingerprint) -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"GPU": NOTHING}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "GPU": fingerprint.gpu, "Compute capability": f"{device.major}.{device.minor}",
        "Multiprocessors": str(device.multi_processor_count),
        "GPU memory": f"{device.total_memory / 2**30:.0f} GiB", "Driver": as_fact(fingerprint.driver),
    }


def package_version(name: str) -> str:
    try:
        return as_fact(metadata.version(name))
    except metadata.PackageNotFoundError:
        return NOTHING


def switch(path: str) -> str:
    """What a switch of torch says, or what a function of it returns. PyTorch raises where it has none of that name
    (torch 2.1 asserts it), and where newer switches contradict it."""
    try:
        value = operator.attrgetter(path)(torch)
        value = value() if callable(value) else value
    except (AttributeError, AssertionError, RuntimeError):
        return UNREADABLE
    # An enumeration's, and a type's, without where it is defined.
    is_plain = value is None or isinstance(value, (bool, int, str))
    return as_fact(value if is_plain else str(value).rsplit(".", 1)[-1])


def onediff_facts(settings: Settings, status: Mapping[str, Any], tuned: Mapping[str, Any]) -> Facts:
    """Our settings, how the last image was made (runtime.status()), and what was tuned on this machine."""
    return {
        "OneDiff": {
            "Backend in use": as_fact(status.get("backend")), "Route of the last call": as_fact(status.get("route")),
            "Tuned choices": digest(tuned),
        },
        "OneDiff settings": {
            option.name: as_fact(getattr(settings, option.name)) for option in fields(Settings)
        },
    }


def digest(tuned: Mapping[str, Any]) -> str:
    """How many choices there are, and a hash that is equal where all of them are."""
    if not tuned:
        return NOTHING
    text = json.dumps(dict(tuned), sort_keys=True, default=str)
    return f"{len(tuned)}, {hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def as_fact(value: Any) -> str:
    """A value as a report shows it: one short line, and of a path only the last part."""
    if isinstance(value, bool):
        return SWITCHES[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(map(as_fact, value))
    text = f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)
    return PATH_SEPARATORS.split(" ".join(text.split()))[-1][:LONGEST_VALUE].strip() or NOTHING


# --- as text ----------------------------------------------------------------------------------------------------------


def report(facts: Facts) -> str:
    """The facts as text, which parse reads back as they are."""
    lines = [TITLE.format(FORMAT)]
    for section, values in facts.items():
        lines.append(f"[{section}]")
        lines += [f"{name}: {value}" for name, value in values.items()]
    return "\n".join(lines)


def parse(text: str) -> Facts:
    """The facts in a report, which may stand in other text, indented or quoted with ">".

    Raises ValueError with a sentence for a text that is none of ours, or of a later form.
    """
    lines = [line.strip().lstrip(">").strip() for line in str(text).splitlines()[:MOST_LINES]]
    starts = [(number, first) for number, line in enumerate(lines) if (first := FIRST_LINE.fullmatch(line))]
    if not starts:
        raise ValueError('This is no consistency report: it begins with "OneDiff consistency report, format 1".')
    start, first = starts[0]
    if int(first[1]) > FORMAT:
        raise ValueError("This consistency report is of a newer OneDiff; update OneDiff here to compare with it.")
    facts: Facts = {}
    section = ""
    for line in lines[start + 1:]:
        heading = SECTION.fullmatch(line)
        name, colon, value = line.partition(": ")
        if heading:
            section = heading[1]
            facts.setdefault(section, {})
        elif colon and section:
            facts[section].setdefault(name, value.strip())
    return facts


class Line(NamedTuple):
    """A fact that differs. rank: CHANGES_IMAGES, CHANGES_DIGITS or CHANGES_NOTHING."""

    text: str
    rank: int


def rank_of(section: str, name: str) -> int:
    """What a fact does to an image where it differs. What is not known may change digits."""
    if section in SECTIONS_OF_IMAGES or (name in preset_options() and name not in OPTIONS_OF_DIGITS):
        return CHANGES_IMAGES
    return CHANGES_NOTHING if name in NAMES_OF_NOTHING else CHANGES_DIGITS


def differences(mine: Facts, theirs: Facts) -> list[Line]:
    """One line for every fact that is not the same in both, those that change images first and then in the order of
    mine; empty where nothing differs."""
    pairs = dict.fromkeys((section, name) for facts in (mine, theirs) for section in facts for name in facts[section])
    found = [(*pair, *(facts.get(pair[0], {}).get(pair[1], UNTOLD) for facts in (mine, theirs))) for pair in pairs]
    lines = [
        Line(f"{section}, {name}: here {here}, there {there}", rank_of(section, name))
        for section, name, here, there in found if here != there
    ]
    return sorted(lines, key=lambda line: line.rank)
