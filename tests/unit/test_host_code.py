"""The traits of a host decide which code in a network is the host's own."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL, a_call, diffusers_output, diffusers_unet
from torch import nn

import lib_onediff
from lib_onediff.runtime.runtime import runtime


def brings_weights(layer: nn.Module, given: Any) -> None:
    """Stands for a host's hook that moves the weights of a layer to the GPU for its forward."""


@pytest.mark.parametrize(("movers", "route"), [((__name__,), "plain"), ((), "host")])
def test_only_hooks_of_the_hosts_own_movers_are_served(movers: tuple[str, ...], route: str) -> None:
    """The traits are set after OneDiff has adopted the network, as the GPU tests of streaming do it: those count that
    the network has when it is read."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL), backend="eager")
    network = runtime.services.networks.get(unet)
    assert network is not None
    network.bound.host_traits = replace(network.bound.host_traits, movers=movers)
    unet.conv_in.register_forward_pre_hook(brings_weights)
    call = a_call(unet)
    with torch.no_grad():
        own = diffusers_output(unet, call)
        output = runtime.run(unet, call, lambda: own)
    status = lib_onediff.status()
    assert status["route"] == route
    if route == "host":
        assert output is own and __name__ in status["reason"]
