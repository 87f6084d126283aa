"""Backends that take turns on one UNet, and weights that change under the native one."""
from __future__ import annotations

import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from ladder_builders import Weather, error, now, small_xl
from torch import nn

import lib_onediff
from lib_onediff.accelerator import runtime
from lib_onediff.backends import CUDAGRAPH, EAGER, NATIVE

CLOSE = 1e-5


def convolutions_lie(unet: nn.Module, memory_format: torch.memory_format) -> bool:
    convolutions = [module for module in unet.modules() if isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1]
    return all(module.weight.is_contiguous(memory_format=memory_format) for module in convolutions)


def test_backends_may_take_turns_between_calls(weather: Weather) -> None:
    unet = diffusers_unet(**SMALL_XL)
    before = {name: value.clone() for name, value in unet.state_dict().items()}
    call = a_call(unet)
    expected = diffusers_output(unet, call)
    for backend in (NATIVE, CUDAGRAPH, EAGER, NATIVE, EAGER, CUDAGRAPH, NATIVE):
        lib_onediff.compile_unet(unet, backend=backend)
        assert relative_error(served(unet, call), expected) < CLOSE
        assert now()[0] == backend
        assert convolutions_lie(unet, torch.channels_last if backend == NATIVE else torch.contiguous_format)
    assert {entry.key.backend for entry in runtime.table.entries()} == {NATIVE, CUDAGRAPH, EAGER}
    lib_onediff.uncompile_unet(unet)
    for name, value in unet.state_dict().items():
        assert torch.equal(value, before[name]) and value.is_contiguous(), name


def test_weights_may_change_between_calls_of_the_native_backend(weather: Weather) -> None:
    unet = small_xl()
    call = a_call(unet)
    served(unet, call)
    with torch.no_grad():
        for module in unet.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.mul_(1.2)
    assert error(unet, call) < CLOSE
    unet.conv_in.weight = nn.Parameter(2 * unet.conv_in.weight.detach().clone(memory_format=torch.contiguous_format))
    assert error(unet, call) < CLOSE
    unet.load_state_dict({name: 0.9 * value for name, value in unet.state_dict().items()})
    assert error(unet, call) < CLOSE
    assert now()[0] == "native" and convolutions_lie(unet, torch.channels_last)
