"""Backends that take turns on one UNet, and weights that change under the native one."""
from __future__ import annotations

import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from ladder_builders import Weather, error, now, small_xl
from torch import nn

import lib_onediff
from lib_onediff.engines import CUDAGRAPH, EAGER, NATIVE
from lib_onediff.model.call import UNetCall
from lib_onediff.runtime.runtime import runtime

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


def test_a_sampling_that_the_host_serves_finds_its_own_layout_after_one_of_ours(weather: Weather) -> None:
    """diffusers announces no sampling: another context tensor is another one."""
    unet = diffusers_unet(**SMALL_XL)
    first, second = a_call(unet), a_call(unet, seed=1)
    lib_onediff.compile_unet(unet, backend=NATIVE)
    served(unet, first)
    assert now() == ("native", "plain") and convolutions_lie(unet, torch.channels_last)
    for _ in range(2):
        by_the_host(unet, second)
        assert convolutions_lie(unet, torch.contiguous_format)


def test_weights_do_not_move_where_we_and_the_host_take_turns_in_a_sampling(weather: Weather) -> None:
    unet = small_xl()
    call = a_call(unet)
    given = call.latent, call.timestep, call.context
    added = {"text_embeds": call.y, "time_ids": torch.empty(len(call.y), 0)}
    for others in ({}, {"cross_attention_kwargs": {"scale": 1.0}}) * 2:
        with torch.no_grad():
            unet(*given, added_cond_kwargs=added, **others)
        assert now()[1] == ("host" if others else "plain") and convolutions_lie(unet, torch.channels_last)


def by_the_host(unet: nn.Module, call: UNetCall) -> None:
    added = {"text_embeds": call.y, "time_ids": torch.empty(len(call.y), 0)}
    with torch.no_grad():
        unet(call.latent, call.timestep, call.context, added_cond_kwargs=added, cross_attention_kwargs={"scale": 1.0})
    assert now()[1] == "host"
