"""Code that another package puts in the place of a class's own is never bypassed, whenever and however it is put."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_output, diffusers_unet, served

import lib_onediff


def attention() -> tuple[type, str]:
    from diffusers.models.attention_processor import Attention

    return Attention, "forward"


def residual_block() -> tuple[type, str]:
    from diffusers.models.resnet import ResnetBlock2D

    return ResnetBlock2D, "forward"


def feed_forward() -> tuple[type, str]:
    from diffusers.models.attention import GEGLU

    return GEGLU, "forward"


def torch_layer() -> tuple[type, str]:
    return torch.nn.Linear, "forward"


def processor() -> tuple[type, str]:
    from diffusers.models.attention_processor import AttnProcessor2_0

    return AttnProcessor2_0, "__call__"


def whole_unet() -> tuple[type, str]:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel, "forward"


def louder(original: Callable, disguised: bool) -> Callable:
    """What a patch does; disguised: as functools.wraps makes it, with the name and the module of what it replaces."""

    def patched(self: Any, *given: Any, **named: Any) -> Any:
        output = original(self, *given, **named)
        if isinstance(output, tuple):
            return tuple(2 * part for part in output)
        return type(output)(sample=2 * output.sample) if hasattr(output, "sample") else 2 * output

    return functools.wraps(original)(patched) if disguised else patched


@pytest.mark.parametrize("disguised", [False, True], ids=["plain", "with functools.wraps"])
@pytest.mark.parametrize("proved", [False, True], ids=["before the first call", "after the first call"])
@pytest.mark.parametrize("place", [attention, residual_block, feed_forward, torch_layer, processor, whole_unet])
def test_a_patched_class_is_the_hosts_until_the_patch_is_gone(
    place: Callable[[], tuple[type, str]], proved: bool, disguised: bool
) -> None:
    kind, method = place()
    unet = lib_onediff.compile_unet(diffusers_unet())
    plain = served(unet, a_call(unet)) if proved else diffusers_output(unet, a_call(unet))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, louder(getattr(kind, method), disguised))
        call = a_call(unet)  # a new prompt tensor: another sampling
        output = served(unet, call)
        assert torch.equal(output, diffusers_output(unet, call))
        assert not torch.allclose(output, plain)
        status = lib_onediff.status()
        assert (status["route"], "replaced by test_unet_patched_classes" in status["reason"]) == ("host", True), status
        assert kind.__name__ in status["reason"]
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
