"""The host owns its weights: OneDiff keeps neither an unloaded UNet nor any of its tensors alive."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from builders import a_call, diffusers_unet, served
from torch import nn

import lib_onediff


def test_an_unloaded_unet_is_freed_at_once_and_not_when_garbage_is_collected() -> None:
    gc.collect()
    gc.disable()
    try:
        unet = lib_onediff.compile_unet(diffusers_unet())
        served(unet, a_call(unet))
        gone = weakref.ref(unet)
        del unet
        assert gone() is None
    finally:
        gc.enable()


CHANGES: dict[str, Callable[[Any], object]] = {
    "another prompt": lambda unet: served(unet, a_call(unet, tokens=154)),
    "FreeU": lambda unet: (unet.enable_freeu(0.9, 0.2, 1.2, 1.4), served(unet, a_call(unet, seed=1))),
    "a refusal": lambda unet: (setattr(unet, "conv_act", nn.GELU()), served(unet, a_call(unet, seed=1))),
    "uncompiled": lib_onediff.uncompile_unet,
    "another type": lambda unet: unet.half(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_unet_is_freed_whatever_happened_to_it(change: Callable[[Any], object]) -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    served(unet, a_call(unet))
    change(unet)
    gone = weakref.ref(unet), weakref.ref(unet.conv_in.weight)
    del unet
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
