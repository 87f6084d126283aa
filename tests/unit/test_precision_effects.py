"""Choices of precision that change nothing on a machine, and the sentences that say so."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from grid import grid

from lib_onediff.core import precision
from lib_onediff.core.precision import (
    HALF_SUMS,
    SWITCHES,
    TF32_CONVOLUTION,
    TF32_MATMUL,
    applied,
    flags_for,
)
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.effects import Machine, described, remark, why_no_effect

GPU = torch.device("cuda", 0)
H200 = Machine("2.13.0", "NVIDIA H200", (9, 0), False, frozenset(SWITCHES))
NO_GPU, ALONE = {"capability": None, "gpu": ""}, {"capability": None, "gpu": "", "cpu_alone": True}
HALF, SINGLE = torch.float16, torch.float32


@pytest.mark.parametrize(("option", "value", "changes", "dtype", "part"), [
    ("matmul_accumulation", "half", {}, HALF, None), ("matmul_accumulation", "half", {}, SINGLE, None),
    ("vae_precision", "bf16", {}, None, None),
    ("convolution_accumulation", "half", {}, None, "Only OneFlow"),
    *(("matmul_accumulation", "half", NO_GPU, dtype, "can use none here") for dtype in (HALF, SINGLE, None)),
    *(("matmul_accumulation", "half", {"amd": True}, dtype, "AMD") for dtype in (HALF, SINGLE, None)),
    ("matmul_accumulation", "half", {"capability": (6, 1)}, HALF, "this NVIDIA H200 has 6.1."),
    ("matmul_accumulation", "half", {"capability": (7, 5)}, SINGLE, "this NVIDIA H200 has 7.5."),
    ("vae_precision", "bf16", {"capability": (7, 5)}, None, "this NVIDIA H200 has 7.5."),
    # A GPU that is not NVIDIA's, or none.
    ("vae_precision", "fp16", NO_GPU, None, None), ("vae_precision", "fp16", ALONE, None, "slower"),
    ("vae_precision", "bf16", ALONE, None, None),
    ("matmul_accumulation", "half", {}, torch.bfloat16, "bfloat16"),
    ("matmul_accumulation", "half", {"oneflow": True, "capability": (8, 6)}, None, None),
    ("convolution_accumulation", "half", {"oneflow": True, "capability": (8, 6)}, None, "CUTLASS"),
    ("backend", "native", {}, None, None), ("matmul_accumulation", "full", NO_GPU, None, None),
], ids=str)
def test_what_changes_nothing_on_a_machine_is_said(
    option: str, value: str, changes: dict[str, Any], dtype: torch.dtype | None, part: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ONEFLOW_KERENL_CONV_ENABLE_CUTLASS_IMPL", raising=False)
    reason = why_no_effect(option, value, replace(H200, **changes), *([] if dtype is None else [dtype]))
    assert reason is None if part is None else part in (reason or ""), reason


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


@grid(
    missing=[(), *((name,) for name in SWITCHES), tuple(SWITCHES)],
    says=[AttributeError, AssertionError],
)
def test_switches_that_torch_lacks(
    missing: tuple[str, ...], says: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch 2.3 lacks float16 sums, which 2.1 says by an AssertionError: what is missing is said to be, and never
    touched; the rest works."""
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
        reason = why_no_effect(option, "half", machine, dtype)
        assert (reason is None) == (name in has)
        assert reason is None or reason.endswith("here it is 1.2.3.")
    everything = Settings(matmul_accumulation="half", convolution_accumulation="half")
    for dtype in precision.OF_DTYPE:
        flags = flags_for(everything, dtype, GPU, upcast_attention=True)
        assert {name for name, _ in flags} <= has
        before = {name: SWITCHES[name].state() for name in has}
        with applied(flags):
            assert all(SWITCHES[name].read() is value for name, value in flags)
        assert {name: SWITCHES[name].state() for name in has} == before


def test_a_gain_that_is_not_to_be_had_is_said() -> None:
    assert "full speed" in remark("matmul_accumulation", "half", H200)
    assert remark("matmul_accumulation", "half", replace(H200, capability=(8, 9))) is None
    assert described({"matmul_accumulation": "half"}, H200)["matmul_accumulation"].startswith("This GPU sums")
    said = described({"convolution_accumulation": "half"}, H200)
    assert said["convolution_accumulation"].startswith("No effect here")
