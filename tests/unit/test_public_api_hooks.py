"""accelerate puts its own forward in front of a UNet's: ours goes behind it, and comes off again in any order."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, relative_error, served
from torch import nn

import lib_onediff


class Doubling:
    """A hook that can be seen: it doubles the output. The methods are those of accelerate's ModelHook."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple:
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return type(output)(sample=2 * output.sample)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        return module


def add_as_accelerate(module: Any, hook: Any) -> None:
    if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward"):
        old = module._old_forward
    else:
        old = module._old_forward = module.forward
    module._hf_hook = hook

    def new_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
        return module._hf_hook.post_forward(module, module._old_forward(*args, **kwargs))

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), old)


def remove_as_accelerate(module: Any) -> None:
    del module._hf_hook
    module.forward = module._old_forward
    del module._old_forward


class Offloading(NamedTuple):
    add: Callable[[Any, Any], object]
    remove: Callable[[Any], object]


@pytest.fixture(params=["as accelerate does", "accelerate"])
def offloading(request: pytest.FixtureRequest) -> Offloading:
    if request.param == "accelerate":
        hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
        return Offloading(hooks.add_hook_to_module, hooks.remove_hook_from_module)
    return Offloading(add_as_accelerate, remove_as_accelerate)


@pytest.fixture
def unet() -> Any:
    return diffusers_unet()


def calls_of_ours() -> int:
    return lib_onediff.status()["calls"]["plain"]


def answer(unet: Any) -> tuple[float, int]:
    """(the output as a multiple of the host's, how many calls of ours it took)"""
    before, call = calls_of_ours(), a_call(unet)
    output, expected = served(unet, call), diffusers_output(unet, call)
    factor = round(float(output.norm() / expected.norm()), 3)
    assert relative_error(output, factor * expected) < 1e-5
    return factor, calls_of_ours() - before


@pytest.mark.parametrize("hook_first", [True, False])
@pytest.mark.parametrize("hook_goes_first", [True, False])
def test_ours_goes_behind_a_hook_and_each_goes_without_the_other(
    unet: Any, offloading: Offloading, hook_first: bool, hook_goes_first: bool
) -> None:
    for _ in range(2):
        if hook_first:
            offloading.add(unet, Doubling())
        lib_onediff.compile_unet(unet)
        if not hook_first:
            offloading.add(unet, Doubling())
        # Exchanged for another.
        offloading.add(unet, Doubling())
        assert answer(unet) == (2.0, 1)
        if hook_goes_first:
            offloading.remove(unet)
            assert answer(unet) == (1.0, 1)
            lib_onediff.uncompile_unet(unet)
        else:
            lib_onediff.uncompile_unet(unet)
            assert answer(unet) == (2.0, 0)
            offloading.remove(unet)
        assert answer(unet) == (1.0, 0)


def test_torchs_own_hooks_on_the_unet_run_around_ours(unet: Any) -> None:
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


def test_a_forward_that_somebody_else_has_replaced_is_named_and_kept(unet: Any) -> None:
    def louder(*given: Any, **named: Any) -> Any:
        output = type(unet).forward(unet, *given, **named)
        return type(output)(sample=3 * output.sample)

    unet.forward = louder
    with pytest.raises(ValueError, match="somebody else has replaced this UNet's forward"):
        lib_onediff.compile_unet(unet)
    assert unet.forward is louder
    assert answer(unet)[0] == 3.0
    lib_onediff.uncompile_unet(unet)
    assert unet.forward is louder
    del unet.forward
    lib_onediff.compile_unet(unet)
    assert answer(unet) == (1.0, 1)
    # One that is put over ours wins and stays.
    unet.forward = louder
    lib_onediff.uncompile_unet(unet)
    assert unet.forward is louder and answer(unet) == (3.0, 0)
