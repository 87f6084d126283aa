"""Why an option has no effect on this machine, and notes on values whose effect needs an explanation.

From torch's sources: cuBLAS sums in float16 if allow_fp16_accumulation is set (torch 2.7 and newer, compute capability
7.0 and newer, not on AMD). For convolutions, every torch from 2.1 to 2.13 requests float32 sums from cuDNN; our own
kernel replaces cuDNN where it is faster.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from ..core.precision import HALF, HALF_SUMS, SWITCHES
from ..core.refusal import Refusal
from ..core.settings import ONE_GPU
from ..runtime.runtime import runtime
from ..runtime.two_gpus import Card, second_card

# The least compute capabilities with which cuBLAS sums in float16, and with which a GPU computes in bfloat16.
HALF_SUMS_FROM = (7, 0)
BF16_FROM = (8, 0)
# The compute capabilities of GeForce and workstation GPUs, whose tensor cores sum float16 products in float32 at half
# speed.
HALF_RATE = {(7, 5), (8, 6), (8, 9), (12, 0)}


def notes_by_option(values: Mapping[str, Any]) -> dict[str, str]:
    """Sentences for users, by option: that the value has no effect on this machine, with the reason, or that float16
    sums gain little on this GPU. Options with other values are left out. values: by option."""
    found = {}
    for option, value in values.items():
        if reason := why_no_effect(option, value):
            found[option] = f"No effect here: {reason}."
        elif option == "accumulation" and value == HALF and capability() not in (None, *HALF_RATE):
            found[option] = "This GPU sums in float32 at full speed: images change, and little time is gained."
    return found


def why_no_effect(option: str, value: Any) -> str | None:
    """Why an option of core.settings.Settings has no effect on this machine at this value, as a clause for users, such
    as "PyTorch sees no GPU here". None if the value has an effect or means "off", and for every option that is not in
    CHECKS."""
    check = CHECKS.get(option)
    return None if check is None else check(value)


def of_accumulation(value: str) -> str | None:
    """why_no_effect for the option accumulation: sums in float16 need oneflow, or a new PyTorch and an NVIDIA GPU."""
    if value != HALF or has_oneflow():
        return None
    if capability() is None:
        here = "uses an AMD one" if torch.version.hip else "can use none"
        return f"this needs an NVIDIA GPU, and PyTorch {here}"
    if SWITCHES[HALF_SUMS].read() is None:
        return f"this needs PyTorch 2.7 or newer, and here it is {torch.__version__}"
    return too_old(HALF_SUMS_FROM, "float16 sums exist")


def of_vae(value: str) -> str | None:
    """why_no_effect for the option vae_precision: float16 needs a GPU of any maker; bfloat16 has no effect on an NVIDIA
    GPU that is too old for it."""
    kinds = (torch.cuda, torch.backends.mps, getattr(torch, "xpu", None))
    if value == "fp16" and not any(kind is not None and kind.is_available() for kind in kinds):
        # Measured: 80 times as long as in float32, for emoji-sd's VAE.
        return "a CPU decodes many times slower in float16, so the VAE keeps the WebUI's precision"
    return too_old(BF16_FROM, "bfloat16 exists") if value == "bf16" else None


def of_low_bit(value: str) -> str | None:
    """why_no_effect for the option low_bit: the reason for which our devices would refuse to compute a float16 model in
    these eight bits."""
    if value == "off":
        return None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    reason: str | None = runtime.devices.lossy.why_not_lossy(value, device, torch.float16)
    return reason


def of_graph_memory(value: int) -> str | None:
    """why_no_effect for the option memory_budget, the memory for CUDA graphs."""
    return None if torch.cuda.is_available() or not value else "CUDA graphs need a GPU, and PyTorch sees none here"


def of_second_gpu(value: str) -> str | None:
    """why_no_effect for the option second_gpu: the reason for which the named GPU cannot be used."""
    if value == ONE_GPU:
        return None
    if not Card().all():
        return "PyTorch sees no GPU here"
    try:
        second_card(torch.device("cuda", torch.cuda.current_device()), 0, Card())
    except Refusal as refusal:
        return str(refusal)
    return None


CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "accumulation": of_accumulation, "vae_precision": of_vae, "memory_budget": of_graph_memory,
    "low_bit": of_low_bit, "second_gpu": of_second_gpu,
    # It needs a machine on which at least one kind of low_bit has an effect.
    "low_bit_only": lambda value: of_low_bit("auto" if value else "off"),
}


def has_oneflow() -> bool:
    """Whether the package oneflow is installed."""
    found = find_spec("oneflow")
    # A plain folder of this name on the path is found too, but has no origin.
    return found is not None and found.origin is not None


def capability() -> tuple[int, int] | None:
    """The compute capability of the NVIDIA GPU that PyTorch uses; None without one, also with an AMD GPU."""
    if torch.version.hip or not torch.cuda.is_available():
        return None
    try:
        return torch.cuda.get_device_capability()
    except RuntimeError:
        # The GPU cannot be initialized.
        return None


def too_old(least: tuple[int, int], feature: str) -> str | None:
    """A clause for users if the GPU's compute capability is below `least`; otherwise None, also without an NVIDIA GPU.
    feature: a clause on what GPUs have from `least` on, such as "bfloat16 exists"."""
    has = capability()
    if has is None or has >= least:
        return None
    needed, there = (".".join(map(str, version)) for version in (least, has))
    name = torch.cuda.get_device_name()
    return f"this GPU is too old: {feature} from compute capability {needed} on, and this {name} has {there}"
