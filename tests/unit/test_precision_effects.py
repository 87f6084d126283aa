"""Options of precision and speed that have no effect on a machine, and the notes that say so in the settings."""
from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grid import grid

from lib_onediff.core import precision
from lib_onediff.core.precision import HALF_SUMS, SWITCHES, TF32_CONVOLUTION, TF32_MATMUL, applied, flags_for
from lib_onediff.core.settings import Settings
from lib_onediff.devices.cuda.kernels import launching
from lib_onediff.runtime.runtime import Runtime, runtime
from lib_onediff.ui import effects
from lib_onediff.ui.effects import why_no_effect

GPU = torch.device("cuda", 0)
# NVIDIA GPUs by their compute capabilities, an AMD GPU, and no GPU.
NVIDIA = "9.0"
TURING = "7.5"
PASCAL = "6.1"
AMD = "AMD"
NONE = ""


def use_gpu(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    """Let torch report a GPU: an NVIDIA GPU of this compute capability, an AMD GPU, or NONE."""
    monkeypatch.setattr(torch.version, "hip", "6.4" if gpu == AMD else None)
    said = {
        "is_available": bool(gpu), "device_count": int(bool(gpu)), "current_device": 0,
        "get_device_name": "NVIDIA RTX", "mem_get_info": (24 << 30, 24 << 30),
        "get_device_capability": (9, 4) if gpu in (AMD, NONE) else tuple(map(int, gpu.split("."))),
    }
    monkeypatch.setattr(launching, "driver_here", lambda: SimpleNamespace(version=lambda: (12, 8)))
    for name, answer in said.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)


def use_packages(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these packages be importable besides the present ones; OneFlow only if it is among them."""
    find = importlib.util.find_spec
    known = {"oneflow"}

    def there(name: str, *others: Any) -> Any:
        if name not in known:
            return find(name, *others)
        return find("torch") if name in names else None

    monkeypatch.setattr(importlib.util, "find_spec", there)
    monkeypatch.setattr(effects, "find_spec", there)


@pytest.mark.parametrize(("option", "value", "gpu", "part"), [
    ("accumulation", "half", NVIDIA, None), ("accumulation", "half", NONE, "can use none"),
    ("accumulation", "half", AMD, "AMD"), ("accumulation", "half", PASCAL, "NVIDIA RTX has 6.1"),
    ("accumulation", "full", NONE, None),
    ("vae_precision", "bf16", NVIDIA, None), ("vae_precision", "bf16", TURING, "NVIDIA RTX has 7.5"),
    ("vae_precision", "fp16", NONE, "slower"), ("vae_precision", "fp16", AMD, None),
    ("vae_precision", "bf16", NONE, None), ("backend", "native", NONE, None),
    ("low_bit", "auto", NONE, "an NVIDIA GPU"), ("low_bit", "int8", AMD, "AMD"), ("low_bit", "off", NONE, None),
    ("low_bit", "int8", TURING, None), ("low_bit", "int8", PASCAL, "capability 7.5"), ("low_bit", "fp8", TURING, "8.9"),
    ("low_bit_only", True, NONE, "an NVIDIA GPU"), ("low_bit_only", False, NONE, None),
    ("second_gpu", "off", NONE, None), ("second_gpu", "auto", NONE, "no GPU"),
    ("second_gpu", "auto", NVIDIA, "one GPU"),
], ids=str)
def test_options_without_effect_on_a_machine_have_a_note(
    option: str, value: Any, gpu: str, part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpu: the machine's GPU, see use_gpu. part: some words of the note below the option; None: no note, because the
    option has an effect with this value, or switches something off."""
    use_gpu(monkeypatch, gpu)
    use_packages(monkeypatch)
    monkeypatch.setattr(runtime, "devices", Runtime().devices)
    reason = why_no_effect(option, value)
    assert reason is None if part is None else part in (reason or ""), reason


def test_half_accumulation_has_an_effect_on_an_old_gpu_with_oneflow_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU has compute capability 6.1, and torch sums in float16 from 7.0 on. OneFlow has no such limit."""
    use_gpu(monkeypatch, PASCAL)
    use_packages(monkeypatch)
    assert why_no_effect("accumulation", "half") is not None
    use_packages(monkeypatch, "oneflow")
    assert why_no_effect("accumulation", "half") is None


@grid(
    missing=[(), *((name,) for name in SWITCHES), tuple(SWITCHES)],
    says=[AttributeError, AssertionError],
)
def test_a_switch_that_this_torch_lacks_is_reported_and_never_written(
    missing: tuple[str, ...], says: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The note of half accumulation names torch's version; the switches that torch has are set and restored. missing:
    the switches that torch lacks, as torch 2.3 lacks that for float16 sums. says: the exception that reading a missing
    one raises; torch 2.1 raises AssertionError."""
    class Lacking:
        """torch.backends.cuda.matmul or cudnn without some of its attributes."""

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
    has = {name for name, switch in SWITCHES.items() if switch.read() is not None}
    assert has.isdisjoint(missing)
    use_gpu(monkeypatch, NVIDIA)
    use_packages(monkeypatch)
    reason = why_no_effect("accumulation", "half")
    assert reason is None if HALF_SUMS in has else torch.__version__ in (reason or "")
    everything = Settings(accumulation="half")
    for dtype in precision.OF_DTYPE:
        flags = flags_for(everything, dtype, GPU, upcast_attention=True)
        assert {name for name, _ in flags} <= has
        before = {name: SWITCHES[name].state() for name in has}
        with applied(flags):
            assert all(SWITCHES[name].read() is value for name, value in flags)
        assert {name: SWITCHES[name].state() for name in has} == before
