"""Why a choice does nothing on this machine.

Read in torch's sources: cuBLAS sums in float16 where allow_fp16_accumulation is set (torch 2.7 and newer, compute
capability 7.0 and newer, not on AMD). cuDNN is asked for float32 sums by every torch from 2.1 to 2.13.
"""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ..core.precision import HALF, HALF_SUMS, SWITCHES, TF32_MATMUL
from ..devices.cuda.requirements import (
    OLDEST_TRITON,
    oldest_int8_capability,
    release,
    triton_here,
    triton_is_usable,
    written,
)
from ..devices.torch.sage import OLDEST_CAPABILITY as SAGE_CAPABILITY
from ..devices.torch.sage import PACKAGE

FLOAT8_TORCH = (2, 5)
ONEFLOW_CUTLASS = "ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL"
# Few CPUs compute in float16: emoji-sd's VAE took 80 times as long as in float32.
FP16_ON_CPU = "CPUs decode float16 many times slower"
HALF_SUMS_FROM, TF32_FROM, BF16_FROM, FLOAT8_FROM = (7, 0), (8, 0), (8, 0), (8, 9)
# GPUs whose tensor cores sum float16 products in float32 at half their speed: the GeForce and workstation ones.
HALF_RATE = {(7, 5), (8, 6), (8, 9), (12, 0)}


@dataclass(frozen=True)
class Machine:
    """capability: of the GPU that torch uses, or None where it can use none. switches: those that this torch has.

    cpu_alone: whether torch can use no GPU of any kind. triton: its release, "" where nobody knows it, None where there
    is none. gpus: how many of NVIDIA's and AMD's torch can use.
    """

    torch: str
    gpu: str
    capability: tuple[int, int] | None
    amd: bool
    switches: frozenset[str]
    oneflow: bool = False
    cpu_alone: bool = False
    triton: str | None = ""
    gpus: int = 0

    @classmethod
    def now(cls, oneflow: bool = False) -> Machine:
        """This machine. oneflow: whether OneFlow is what computes."""
        gpu, capability = "", None
        if torch.cuda.is_available():
            try:
                gpu, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
            except RuntimeError:
                # A GPU that does not start.
                capability = None
        switches = frozenset(name for name, switch in SWITCHES.items() if switch.read() is not None)
        others = (torch.backends.mps, getattr(torch, "xpu", None))
        cpu_alone = not any(kind is not None and kind.is_available() for kind in (torch.cuda, *others))
        amd, gpus = torch.version.hip is not None, torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(torch.__version__, gpu, capability, amd, switches, oneflow, cpu_alone, triton_here(), gpus)


def why_no_effect(
    option: str, value: str | bool, machine: Machine | None = None, dtype: torch.dtype | None = None
) -> str | None:
    """Why an option of settings.Settings at this value changes nothing here, in one sentence; None if it does.

    A value that leaves everything as it is needs no reason. dtype: the model's, where it is known. Options that are
    none of precision's have no reason either.
    """
    machine = machine or Machine.now()
    check = CHECKS.get(option)
    return None if check is None else check(value, machine, dtype)


def of_matmul(value: str, machine: Machine, dtype: torch.dtype | None) -> str | None:
    if value != HALF or machine.oneflow:
        return None
    if dtype == torch.float32:
        return no_nvidia(machine) or missing(machine, TF32_MATMUL, "1.7") or too_old(machine, TF32_FROM, "TF32 exists")
    return (
        no_nvidia(machine)
        or missing(machine, HALF_SUMS, "2.7")
        or too_old(machine, HALF_SUMS_FROM, "cuBLAS sums in half precision")
        or other_dtype(dtype, torch.float16, "Half precision sums exist for float16 alone")
    )


def of_convolution(value: str, machine: Machine, dtype: torch.dtype | None) -> str | None:
    if value != HALF:
        return None
    if not machine.oneflow:
        return "Only OneFlow can sum convolutions in half precision, and it is not the backend."
    if os.environ.get(ONEFLOW_CUTLASS) != "1":
        return f"Start the WebUI with {ONEFLOW_CUTLASS}=1: only OneFlow's CUTLASS convolutions can do this."
    return None


def of_vae(value: str, machine: Machine, dtype: torch.dtype | None) -> str | None:
    if value == "fp16" and machine.cpu_alone:
        return f"{FP16_ON_CPU}, so the VAE stays in the WebUI's type."
    if value != "bf16" or machine.capability is None or machine.amd:
        return None
    return too_old(machine, BF16_FROM, "bfloat16 exists")


def of_low_bit(value: str, machine: Machine, dtype: torch.dtype | None) -> str | None:
    if value == "off":
        return None
    if machine.amd or machine.capability is None:
        return "Low-bit needs an NVIDIA GPU."
    if not triton_is_usable(machine.triton):
        return f"Low-bit needs Triton {written(OLDEST_TRITON)} or newer."
    if value == "sage":
        if find_spec(PACKAGE) is None:
            return f"The package {PACKAGE} is not installed."
        return too_old(machine, SAGE_CAPABILITY, "SageAttention exists")
    if value == "fp8" and release(machine.torch) < FLOAT8_TORCH:
        return f"PyTorch has products in FP8 from {written(FLOAT8_TORCH)} on; here it is {machine.torch}."
    if value == "fp8":
        lack = too_old(machine, FLOAT8_FROM, "FP8 exists")
    else:
        lack = too_old(machine, oldest_int8_capability(machine.triton), "INT8 is used")
    if lack is None and dtype == torch.float32:
        return "Low-bit is for models in float16 or bfloat16; this model is in float32."
    return lack


def of_low_bit_only(value: bool, machine: Machine, dtype: torch.dtype | None) -> str | None:
    # That there is any kind of eight bits.
    return of_low_bit("auto", machine, dtype) if value else None


def of_second_gpu(value: str, machine: Machine, dtype: torch.dtype | None) -> str | None:
    if value == "off":
        return None
    if machine.gpus < 2:
        return f"PyTorch sees {'one GPU' if machine.gpus else 'no GPU'} here."
    if value != "auto" and int(value) >= machine.gpus:
        return f"PyTorch sees {machine.gpus} GPUs here, 0 to {machine.gpus - 1}."
    return None


CHECKS: Mapping[str, Callable[[Any, Machine, torch.dtype | None], str | None]] = {
    "matmul_accumulation": of_matmul, "convolution_accumulation": of_convolution,
    "vae_precision": of_vae, "low_bit": of_low_bit, "low_bit_only": of_low_bit_only,
    "second_gpu": of_second_gpu,
}


def no_nvidia(machine: Machine) -> str | None:
    if machine.amd:
        return "This needs an NVIDIA GPU; here PyTorch uses an AMD one."
    if machine.capability is None:
        return "This needs an NVIDIA GPU, and PyTorch can use none here."
    return None


def missing(machine: Machine, switch: str, since: str) -> str | None:
    if switch in machine.switches:
        return None
    return f"PyTorch has this from {since} on; here it is {machine.torch}."


def too_old(machine: Machine, least: tuple[int, int], what: str) -> str | None:
    if machine.capability is None or machine.capability >= least:
        return None
    needed, has = (".".join(map(str, version)) for version in (least, machine.capability))
    return f"{what} from compute capability {needed} on; this {machine.gpu or 'GPU'} has {has}."


def other_dtype(dtype: torch.dtype | None, wanted: torch.dtype, what: str) -> str | None:
    if dtype in (None, wanted):
        return None
    return f"{what}; this model is in {str(dtype).removeprefix('torch.')}."


def remark(option: str, value: str | bool, machine: Machine | None = None) -> str | None:
    """What a user should know of a choice that has an effect here, in one sentence; None if nothing."""
    machine = machine or Machine.now()
    if option == "matmul_accumulation" and value == HALF and machine.capability not in HALF_RATE:
        return (
            "This GPU sums in float32 at full speed: images change, and little time is gained."
        )
    return None


def without_effect(values: Mapping[str, str | bool]) -> list[str]:
    """The options in values that change nothing on this machine."""
    machine = Machine.now()
    return [option for option, value in values.items() if why_no_effect(option, value, machine)]


def described(
    values: Mapping[str, str | bool], machine: Machine | None = None, dtype: torch.dtype | None = None
) -> dict[str, str]:
    """For the settings tab: of every option in values that has no effect here, or whose effect needs a word, that."""
    machine = machine or Machine.now()
    found = {}
    for option, value in values.items():
        reason = why_no_effect(option, value, machine, dtype)
        said = f"No effect here: {reason}" if reason else remark(option, value, machine)
        if said:
            found[option] = said
    return found
