"""Small UNets, computed by OneFlow on the CPU in float32. The reference is diffusers' own forward, if not said
otherwise."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

import builders
from builders import a_call, diffusers_output, diffusers_unet
from oneflow_builders import GRAPHS, Ours, close

from lib_onediff.core.leaves import TimeEmbedding
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet import forward as deepcache
from lib_onediff.families.unet.call import Control


@pytest.mark.parametrize("layout", ["SD1", "SDXL"])
def test_each_size_has_one_graph_and_its_output_is_close_to_diffusers(layout: str) -> None:
    """Calls of two sizes, and of the first size again, make two graphs. layout: the layout of the UNet, a name in
    builders."""
    unet = diffusers_unet(**getattr(builders, layout))
    ours = Ours(unet)
    before = GRAPHS.count
    for size, graphs in (((8, 8), 1), ((16, 8), 2), ((8, 8), 2)):
        call = a_call(unet, *size)
        assert close(ours.output(call), diffusers_output(unet, call))
        assert GRAPHS.count - before == graphs


def test_odd_sizes_and_attention_in_float32_are_close_to_diffusers() -> None:
    """After upsampling, the hidden states of a latent of 9x13 must be resized to the skips' size."""
    unet = diffusers_unet(**builders.SMALL)
    for call in (a_call(unet, 9, 13, batch=1), replace(a_call(unet), upcast_attention=True)):
        assert close(Ours(unet).output(call), diffusers_output(unet, call))


def test_with_circular_padding_the_output_is_close_to_diffusers() -> None:
    """WebUIs set circular padding for tileable images. The output differs from the one with zero padding."""
    unet = diffusers_unet(**builders.SMALL)
    call = a_call(unet)
    ours = Ours(unet)
    plain = diffusers_output(unet, call)
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"
            module._reversed_padding_repeated_twice = [module.padding[0]] * 4
    tiled = diffusers_output(unet, call)
    assert close(ours.output(call), tiled) and not close(tiled, plain)


def test_one_graph_adds_the_controlnet_residuals_of_each_call() -> None:
    """The reference is our forward by torch's operators, because diffusers takes residuals in another form."""
    unet = diffusers_unet(**builders.SMALL)
    call = a_call(unet)
    ours = Ours(unet)
    ours.bound.refresh(call)
    layout = ours.bound.layout
    weights = ours.bound.binding.weights()
    residual = torch.randn(2, 16, 8, 8)
    call = replace(call, control=Control(input=(None, residual), output=(None, None, None, residual)))
    expected = deepcache.full_pass(layout, weights, torch_ops, call, 1)[0]
    assert close(ours.output(call), expected)
    # Other residuals of the same shapes.
    other = replace(call, control=Control(input=(None, residual * 2), output=(None, None, None, residual * 3)))
    assert close(ours.output(other), deepcache.full_pass(layout, weights, torch_ops, other, 1)[0])


def test_one_graph_serves_all_prompts_and_timesteps_and_changes_no_earlier_output() -> None:
    """Outputs for other prompts, and for timesteps as integers, are close to diffusers' and come from the same graph. A
    later run does not write into an earlier output."""
    unet = diffusers_unet(**builders.SMALL_XL)
    ours = Ours(unet)
    call = a_call(unet)
    first = ours.output(call)
    kept = first.clone()
    graphs = GRAPHS.count
    for seed in (1, 2):
        other = a_call(unet, seed=seed)
        assert close(ours.output(other), diffusers_output(unet, other))
    integers = replace(call, timestep=torch.tensor([500, 20]))
    assert close(ours.output(integers), diffusers_output(unet, integers))
    assert GRAPHS.count == graphs
    assert torch.equal(first, kept), "a later run has written to an output"


@pytest.mark.parametrize("time", [
    TimeEmbedding(320, True, 0.0, 1.0, None, None, None), TimeEmbedding(32, False, 1.0, 0.5, None, None, None),
])
def test_the_sinusoids_of_a_timestep_are_close_to_those_of_pytorch(time: TimeEmbedding) -> None:
    """The reference is our operator in PyTorch. time: width, order of cosines and sines, frequency shift and scale."""
    from oneflow.utils.tensor import from_torch, to_torch

    from lib_onediff.devices.oneflow.operators import OneFlowOperators

    timestep = torch.tensor([999.75, 0.0, 3.5, 417.0])
    output = to_torch(OneFlowOperators().sinusoids(from_torch(timestep), time))
    assert float((output - torch_ops.sinusoids(timestep, time)).abs().max()) < 1e-6
