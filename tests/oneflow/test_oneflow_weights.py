"""OneFlow's graphs read the host's own weights at fixed addresses: edits in place take effect, and a parameter at
another address needs another graph."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from builders import SMALL, SMALL_XL, a_call, diffusers_output, diffusers_unet
from oneflow_builders import GRAPHS, Ours, close

from lib_onediff.devices.oneflow.route import STRIDED


def test_after_edits_of_weights_in_place_the_same_graph_computes_with_them() -> None:
    """The output is compared with diffusers' after the edits."""
    unet = diffusers_unet(**SMALL_XL)
    ours = Ours(unet)
    call = a_call(unet)
    before = ours.output(call)
    graphs = GRAPHS.count
    for parameter in unet.parameters():
        # Random, as a LoRA's: norms would undo the same change of all numbers.
        parameter.add_(torch.randn_like(parameter) * parameter.abs().mean() * 0.1)
    expected = diffusers_output(unet, call)
    assert not close(before, expected)
    assert close(ours.output(call), expected)
    assert GRAPHS.count == graphs


def test_a_replaced_parameter_gets_a_new_graph_and_the_restored_one_its_old_graph() -> None:
    """Both outputs are close to diffusers'. The second parameter needs a new graph; with the first one again, its
    graph, which reads that parameter's address, is used again."""
    unet = diffusers_unet(**SMALL)
    ours = Ours(unet)
    call = a_call(unet)
    ours.output(call)
    graphs = GRAPHS.count
    old = unet.conv_out.weight
    unet.conv_out.weight = nn.Parameter(torch.randn_like(old) * 0.1)
    assert close(ours.output(call), diffusers_output(unet, call))
    assert GRAPHS.count == graphs + 1
    # Its address is the one that the first graph reads.
    unet.conv_out.weight = old
    assert close(ours.output(call), diffusers_output(unet, call))
    assert GRAPHS.count == graphs + 1


def test_a_graph_does_not_keep_the_weights_of_a_deleted_unet() -> None:
    """Graphs are kept until the process ends: weights that a graph keeps would never be freed."""
    class Memory(bytearray):
        """A bytearray that can have a weak reference."""

    unet = diffusers_unet(**SMALL)
    ours = Ours(unet)
    call = a_call(unet)
    old = unet.conv_in.weight.data
    memory = Memory(old.numpy().tobytes())
    unet.conv_in.weight.data = torch.frombuffer(memory, dtype=old.dtype).view(old.shape)
    assert close(ours.output(call), diffusers_output(unet, call))
    reference = weakref.ref(memory)
    del memory, unet, ours
    gc.collect()
    assert reference() is None


def test_channels_last_weights_are_refused() -> None:
    """OneFlow can share only contiguous memory."""
    unet = diffusers_unet(**SMALL).to(memory_format=torch.channels_last)
    assert Ours(unet).runner(a_call(unet)).startswith(STRIDED.split("{")[0])
