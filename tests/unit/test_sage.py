"""Self attention by the package sageattention: a stand-in of it here, which needs a GPU."""
from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import diffusers_output, generating, relative_error, served
from ladder_builders import Weather, reason
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import EXACT, entry_of, half_call, half_unet, now

import lib_onediff
from lib_onediff.core.settings import MOST_LOW_BIT_ERROR, Settings
from lib_onediff.core.table import State
from lib_onediff.devices.torch import attention
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.forward import transformer_blocks
from lib_onediff.runtime.runtime import runtime

SAGE = "SageAttention"


class Package:
    """sageattention, a little off."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.factor = 1.001

    def sageattn(self, query: Tensor, key: Tensor, value: Tensor, tensor_layout: str, is_causal: bool) -> Tensor:
        assert tensor_layout == "HND" and not is_causal
        self.calls.append(tuple(query.shape))
        return self.factor * nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.fixture
def package(on_a_gpu: Weather, monkeypatch: pytest.MonkeyPatch) -> Package:
    """It is installed, and attention over few keys is worth it."""
    found = Package()
    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=found.sageattn, __spec__=object()))
    monkeypatch.setattr(attention, "FEW_KEYS", 3)
    operators = runtime.devices.named("native")
    monkeypatch.setitem(operators._made, SAGE, Attending(operators._made["native"], attention.SageAttention(
        torch_ops.attention
    )))
    return found


class Attending:
    """Operators with another attention."""

    def __init__(self, operators: Any, attention: Any) -> None:
        self._operators, self.attention = operators, attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operators, name)


def compiled(**options: Any) -> Any:
    chosen = {"low_bit": "sage", "low_bit_budget": MOST_LOW_BIT_ERROR, **options}
    return lib_onediff.compile_unet(half_unet(), **chosen)


def test_self_attention_is_the_packages_and_cross_attention_never(package: Package) -> None:
    unet = compiled()
    call = half_call(unet)
    output = served(unet, call)
    # Now, because a CPU rounds otherwise where weights lie as OneDiff binds them.
    host = diffusers_output(unet, call)
    assert now()[0] == f"native, {SAGE}", reason()
    blocks = len(list(transformer_blocks(runtime.layout_of(unet), 4, 4)))
    assert len(package.calls) % blocks == 0 and all(shape[2] > 3 for shape in package.calls)
    assert entry_of("", attention=SAGE).relative_error == pytest.approx(relative_error(output, host), rel=0.001)
    for _ in range(2):
        assert torch.equal(served(unet, call), output)
    assert now() == (f"native, {SAGE}", "graph")
    count = len(package.calls)
    with generating(runtime, Settings()):
        exact = served(unet, call)
        assert now()[0] == EXACT and len(package.calls) == count
    assert torch.equal(served(lib_onediff.compile_unet(half_unet()), call), exact), "exact is exact"


def test_what_is_wrong_or_fails_leaves_exact_attention(package: Package) -> None:
    package.factor = -3.0
    unet = compiled()
    call = half_call(unet)
    assert torch.equal(served(unet, call), diffusers_output(unet, call)), "the first image is the host's"
    served(unet, call)
    assert now()[0] == EXACT and "it differs" in reason()
    assert entry_of("", attention=SAGE).state is State.FAILED


def test_it_says_why_not(on_a_gpu: Weather) -> None:
    unet = compiled()
    served(unet, half_call(unet))
    assert now()[0] == EXACT and "package sageattention, which is not installed" in reason()


def test_attention_in_float32_stays_so(package: Package) -> None:
    unet = compiled()
    call = half_call(unet)
    with torch.no_grad():
        runtime.run(unet, replace(call, upcast_attention=True), lambda: diffusers_output(unet, call))
    assert now()[0] == EXACT and "not for attention in float32" in reason() and package.calls == []
