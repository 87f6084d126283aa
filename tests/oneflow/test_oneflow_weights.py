"""OneFlow reads the host's own weights where they lie: edits are seen, and what lies elsewhere has another graph."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from builders import SMALL, SMALL_XL, a_call, diffusers_output, diffusers_unet
from oneflow_builders import GRAPHS, Ours, agree

from lib_onediff.devices.oneflow.route import STRIDED


def test_edits_in_place() -> None:
    unet = diffusers_unet(**SMALL_XL)
    ours = Ours(unet)
    call = a_call(unet)
    before = ours.output(call)
    graphs = GRAPHS.count
    for parameter in unet.parameters():
        # As a LoRA does: there is less to see of what is the same everywhere.
        parameter.add_(torch.randn_like(parameter) * parameter.abs().mean() * 0.1)
    expected = diffusers_output(unet, call)
    assert not agree(before, expected)
    assert agree(ours.output(call), expected)
    assert GRAPHS.count == graphs


def test_a_replaced_parameter() -> None:
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet)
    call = a_call(unet)
    ours.output(call)
    graphs = GRAPHS.count
    old = unet.conv_out.weight
    unet.conv_out.weight = nn.Parameter(torch.randn_like(old) * 0.1)
    assert agree(ours.output(call), diffusers_output(unet, call))
    assert GRAPHS.count == graphs + 1
    # The old one lies where it lay.
    unet.conv_out.weight = old
    assert agree(ours.output(call), diffusers_output(unet, call))
    assert GRAPHS.count == graphs + 1


def test_a_graph_keeps_no_weights() -> None:
    class Watched(bytearray):
        """Memory that says when it is gone."""

    unet = diffusers_unet(**SMALL)
    ours = Ours(unet)
    call = a_call(unet)
    old = unet.conv_in.weight.data
    memory = Watched(old.numpy().tobytes())
    unet.conv_in.weight.data = torch.frombuffer(memory, dtype=old.dtype).view(old.shape)
    assert agree(ours.output(call), diffusers_output(unet, call))
    gone = weakref.ref(memory)
    del memory, unet, ours
    gc.collect()
    assert gone() is None


def test_weights_in_another_order() -> None:
    unet = diffusers_unet(**SMALL).to(memory_format=torch.channels_last)
    assert Ours(unet).runner(a_call(unet)).startswith(STRIDED.split("{")[0])
