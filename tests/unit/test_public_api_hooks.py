"""UNets with hooks of accelerate or torch, or with a forward that other code has set on the instance: what runs, and
what stays after OneDiff is removed."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, relative_error, served
from torch import nn

import lib_onediff

hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")


class Doubling(hooks.ModelHook):
    """A hook that doubles the output."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return type(output)(sample=2 * output.sample)


@pytest.fixture
def unet() -> Any:
    return diffusers_unet()


def calls_of_ours() -> int:
    return lib_onediff.status()["calls"]["plain"]


def factor_and_calls(unet: Any) -> tuple[float, int]:
    """(the factor between the output of the UNet and diffusers' own, the number of calls that OneDiff served)"""
    before = calls_of_ours()
    call = a_call(unet)
    output = served(unet, call)
    expected = diffusers_output(unet, call)
    factor = round(float(output.norm() / expected.norm()), 3)
    assert relative_error(output, factor * expected) < 1e-5
    return factor, calls_of_ours() - before


@pytest.mark.parametrize("hook_first", [True, False])
@pytest.mark.parametrize("hook_goes_first", [True, False])
def test_our_forward_runs_inside_of_a_hook_of_accelerate_and_either_can_be_removed_first(
    unet: Any, hook_first: bool, hook_goes_first: bool
) -> None:
    """The hook doubles the output, so that factor_and_calls() is (2, 1) with both. hook_first: the hook is set before
    compiling. hook_goes_first: the hook is removed before uncompiling."""
    for _ in range(2):
        if hook_first:
            hooks.add_hook_to_module(unet, Doubling())
        lib_onediff.compile_unet(unet)
        if not hook_first:
            hooks.add_hook_to_module(unet, Doubling())
        # Replaces the hook.
        hooks.add_hook_to_module(unet, Doubling())
        assert factor_and_calls(unet) == (2.0, 1)
        if hook_goes_first:
            hooks.remove_hook_from_module(unet)
            assert factor_and_calls(unet) == (1.0, 1)
            lib_onediff.uncompile_unet(unet)
        else:
            lib_onediff.uncompile_unet(unet)
            assert factor_and_calls(unet) == (2.0, 0)
            hooks.remove_hook_from_module(unet)
        assert factor_and_calls(unet) == (1.0, 0)


def test_forward_hooks_of_torch_run_before_and_after_our_forward(unet: Any) -> None:
    """A forward pre-hook runs before our forward, and a forward hook after it, whose doubled output is what the caller
    gets."""
    lib_onediff.compile_unet(unet)
    seen: list[str] = []
    unet.register_forward_pre_hook(lambda module, given: seen.append("before"))
    unet.register_forward_hook(lambda module, given, output: (seen.append("after"), (2 * output[0],))[1])
    before = calls_of_ours()
    call = a_call(unet)
    with torch.no_grad():
        output = unet(call.latent, call.timestep, call.context, return_dict=False)[0]
    assert relative_error(output, 2 * diffusers_output(unet, call)) < 1e-5
    assert seen == ["before", "after"]
    assert calls_of_ours() == before + 1


def test_a_unet_whose_forward_other_code_has_replaced_is_refused_and_keeps_that_forward(unet: Any) -> None:
    """The other forward triples the output. If it is set after compiling, it runs instead of ours, and stays after
    uncompiling."""

    def louder(*given: Any, **named: Any) -> Any:
        output = type(unet).forward(unet, *given, **named)
        return type(output)(sample=3 * output.sample)

    unet.forward = louder
    with pytest.raises(ValueError, match="other code has replaced this UNet's forward"):
        lib_onediff.compile_unet(unet)
    assert unet.forward is louder
    assert factor_and_calls(unet)[0] == 3.0
    lib_onediff.uncompile_unet(unet)
    assert unet.forward is louder
    del unet.forward
    lib_onediff.compile_unet(unet)
    assert factor_and_calls(unet) == (1.0, 1)
    # A forward that is set later runs instead of ours, and stays.
    unet.forward = louder
    lib_onediff.uncompile_unet(unet)
    assert unet.forward is louder and factor_and_calls(unet) == (3.0, 0)
