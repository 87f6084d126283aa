"""A host's traits (HostTraits) declare which hooks in a network are the host's own."""
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
    """Stands for a host's hook that moves a layer's weights to the GPU before its forward."""


@pytest.mark.parametrize(("movers", "route"), [((__name__,), "plain"), ((), "host")])
def test_a_network_with_a_hook_is_served_only_if_the_host_declares_that_it_moves_weights(
    movers: tuple[str, ...], route: str
) -> None:
    """movers: the Python modules whose hooks only move weights; the hook here is of this test's module. With any other
    hook, the host serves. The traits are replaced after compile_unet(): OneDiff uses those that are set when it reads
    the network's layers."""
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
