"""Choices of precision that change nothing on a machine, and the sentences that say so."""
from __future__ import annotations

import itertools
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from lib_onediff.core import precision
from lib_onediff.core.precision import (
    HALF_SUMS,
    SWITCHES,
    TF32_CONVOLUTION,
    TF32_MATMUL,
    Precision,
    applied,
    flags_for,
    switch_of,
)
from lib_onediff.runtime.effects import Machine, described, remark, why_no_effect

GPU = torch.device("cuda", 0)
HALF = types.SimpleNamespace(matmul_accumulation="half")
H200 = Machine("2.13.0", "NVIDIA H200", (9, 0), False, frozenset(SWITCHES))
HAS_NEWER_TF32 = switch_of(torch.backends.cuda.matmul, "fp32_precision") is not None


NOTHING_CHOSEN = {
    "matmul_accumulation": "full", "convolution_accumulation": "full", "vae_precision": "auto",
}
CHOSEN = {"matmul_accumulation": "half", "vae_precision": "bf16"}


@pytest.mark.parametrize("machine", [H200, replace(H200, capability=None, gpu=""), replace(H200, amd=True)])
def test_defaults_need_no_reason(machine: Machine) -> None:
    assert described(NOTHING_CHOSEN, machine) == {}


def test_on_a_new_gpu_and_torch_everything_but_convolutions_has_an_effect() -> None:
    assert {option: why_no_effect(option, value, H200) for option, value in CHOSEN.items()} == dict.fromkeys(CHOSEN)
    reason = why_no_effect("convolution_accumulation", "half", H200)
    assert reason is not None and "Only OneFlow" in reason


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
def test_without_an_nvidia_gpu(dtype: torch.dtype | None) -> None:
    none = replace(H200, capability=None, gpu="")
    assert "can use none here" in why_no_effect("matmul_accumulation", "half", none, dtype)
    assert "AMD" in why_no_effect("matmul_accumulation", "half", replace(H200, amd=True), dtype)


def test_float16_of_the_vae_on_a_cpu() -> None:
    without = replace(H200, capability=None, gpu="")
    assert why_no_effect("vae_precision", "fp16", without) is None, "a GPU that is not NVIDIA's"
    alone = replace(without, cpu_alone=True)
    assert "slower" in why_no_effect("vae_precision", "fp16", alone)
    assert why_no_effect("vae_precision", "bf16", alone) is None
    assert Machine.now().cpu_alone is not torch.cuda.is_available()


@pytest.mark.parametrize(("value", "changes", "part"), [
    ("auto", {"capability": None}, "an NVIDIA GPU"), ("int8", {"amd": True}, "an NVIDIA GPU"),
    ("int8", {"triton": None}, "Triton 3.0 or newer"), ("fp8", {"torch": "2.4.1"}, "2.5"),
    ("fp8", {"capability": (8, 6)}, "8.9"), ("int8", {"capability": (7, 5)}, "8.0"),
    ("auto", {"capability": (7, 5), "triton": "3.3.1"}, "8.0"),
    ("auto", {"capability": (7, 5), "triton": "3.2.0"}, None),
    ("int8", {"capability": (7, 0), "triton": "3.2.0"}, "7.5"),
    ("int8", {"capability": (8, 6), "torch": "2.4.1"}, None),
    ("auto", {"capability": (8, 6)}, None), ("fp8", {}, None), ("off", {"capability": None}, None),
], ids=str)
def test_low_bit(value: str, changes: dict[str, Any], part: str | None) -> None:
    reason = why_no_effect("low_bit", value, replace(H200, **changes), torch.float16)
    assert reason is None if part is None else part in reason
    if part is None and value != "off":
        assert "float32" in why_no_effect("low_bit", value, replace(H200, **changes), torch.float32)


@pytest.mark.parametrize(("option", "dtype", "capability"), [
    ("matmul_accumulation", torch.float16, (6, 1)), ("matmul_accumulation", torch.float32, (7, 5)),
    ("vae_precision", None, (7, 5)),
])
def test_an_old_gpu(option: str, dtype: torch.dtype | None, capability: tuple[int, int]) -> None:
    reason = why_no_effect(option, CHOSEN[option], replace(H200, gpu="Old Card", capability=capability), dtype)
    assert reason is not None and reason.endswith(f"this Old Card has {capability[0]}.{capability[1]}.")


@pytest.mark.parametrize("missing", [
    frozenset(some) for size in range(len(SWITCHES) + 1) for some in itertools.combinations(SWITCHES, size)
])
@pytest.mark.parametrize("says", [AttributeError, AssertionError], ids=["as torch 2.3", "as torch 2.1"])
def test_every_combination_of_switches_that_torch_lacks(
    missing: frozenset[str], says: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.3 lacks float16 sums: what is missing is said so, and never touched; the rest works."""
    class Lacking:
        """torch.backends.cuda.matmul or cudnn, without some of its attributes."""

        def __init__(self, real: Any, hidden: set[str]) -> None:
            self.__dict__.update(real=real, hidden=hidden)

        def __getattr__(self, name: str) -> Any:
            if name in self.hidden:
                raise says("Unknown attribute " + name)
            return getattr(self.real, name)

        def __setattr__(self, name: str, value: Any) -> None:
            assert name not in self.hidden, f"{name} was set, which this torch does not have"
            setattr(self.real, name, value)

    tf32 = {"allow_tf32", "fp32_precision"}
    hidden = {switch.attribute for name, switch in SWITCHES.items() if name in missing and hasattr(switch, "attribute")}
    monkeypatch.setattr(
        torch.backends.cuda, "matmul",
        Lacking(torch.backends.cuda.matmul, hidden | (tf32 if TF32_MATMUL in missing else set())),
    )
    if TF32_CONVOLUTION in missing:
        monkeypatch.setattr(torch.backends, "cudnn", Lacking(torch.backends.cudnn, {*tf32, "conv"}))
    has = Machine.now().switches
    assert has.isdisjoint(missing)
    machine = replace(H200, torch="1.2.3", switches=has)
    for option, dtype, name in (
        ("matmul_accumulation", torch.float16, HALF_SUMS), ("matmul_accumulation", torch.float32, TF32_MATMUL),
    ):
        reason = why_no_effect(option, CHOSEN[option], machine, dtype)
        assert (reason is None) == (name in has)
        assert reason is None or reason.endswith("here it is 1.2.3.")
    everything = Precision("half", "half")
    for dtype in precision.OF_DTYPE:
        flags = flags_for(everything, dtype, GPU, upcast_attention=True)
        assert {name for name, _ in flags} <= has
        before = {name: SWITCHES[name].state() for name in has}
        with applied(flags):
            assert all(SWITCHES[name].read() is value for name, value in flags)
        assert {name: SWITCHES[name].state() for name in has} == before


@pytest.mark.parametrize(("option", "dtype"), [
    ("matmul_accumulation", torch.bfloat16),
])
def test_a_model_of_another_dtype(option: str, dtype: torch.dtype) -> None:
    reason = why_no_effect(option, CHOSEN[option], H200, dtype)
    assert reason is not None and str(dtype).removeprefix("torch.") in reason


def test_with_oneflow(monkeypatch: pytest.MonkeyPatch) -> None:
    oneflow = replace(H200, oneflow=True, capability=(8, 6))
    assert why_no_effect("matmul_accumulation", "half", oneflow) is None
    monkeypatch.delenv("ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL", raising=False)
    assert "CUTLASS" in why_no_effect("convolution_accumulation", "half", oneflow)
    monkeypatch.setenv("ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL", "1")
    assert why_no_effect("convolution_accumulation", "half", oneflow) is None


def test_a_gain_that_is_not_to_be_had_is_said() -> None:
    assert "full speed" in remark("matmul_accumulation", "half", H200)
    assert remark("matmul_accumulation", "half", replace(H200, capability=(8, 9))) is None
    assert described({"matmul_accumulation": "half"}, H200)["matmul_accumulation"].startswith("This GPU sums")
    said = described({"convolution_accumulation": "half"}, H200)
    assert said["convolution_accumulation"].startswith("No effect here")


def test_other_options_have_no_reason() -> None:
    assert why_no_effect("backend", "native", H200) is None and why_no_effect("enabled", "off") is None
