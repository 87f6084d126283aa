"""What we do not run, code that others put into classes included, is refused with one line, and the host's own output
comes back bit for bit."""
from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import SMALL, a_call, diffusers_output, diffusers_unet, served
from torch import Tensor, nn

import lib_onediff

ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1"


class AdapterLinear(nn.Module):
    """A linear layer wrapped as PEFT does it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(base.in_features, 2, bias=False)
        self.lora_b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x))


class LoudLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class LoudGroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def replace_linear(unet: Any, wrap: Callable[[nn.Linear], nn.Module]) -> None:
    out = unet.get_submodule(ATTENTION).to_out
    out[0] = wrap(out[0])


def loud_linear(old: nn.Linear) -> nn.Linear:
    new = LoudLinear(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    return new


def hook(unet: Any) -> None:
    unet.mid_block.resnets[0].register_forward_hook(lambda module, given, output: 2 * output)


def pre_hook(unet: Any) -> None:
    unet.mid_block.register_forward_pre_hook(lambda module, given: (2 * given[0], *given[1:]))


def own_forward(unet: Any) -> None:
    resnet = unet.mid_block.resnets[0]
    resnet.forward = lambda *given, **named: 2 * type(resnet).forward(resnet, *given, **named)


def loud_group_norm(unet: Any) -> None:
    resnet = unet.mid_block.resnets[0]
    new = LoudGroupNorm(resnet.norm2.num_groups, resnet.norm2.num_channels, resnet.norm2.eps)
    new.load_state_dict(resnet.norm2.state_dict())
    resnet.norm2 = new


def pad_by(unet: Any, mode: str) -> None:
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = mode


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a hook": (hook, "mid_block.resnets.0 has a forward hook"),
    "a hook before": (pre_hook, "mid_block has a forward hook"),
    "a forward of one layer": (own_forward, "mid_block.resnets.0 has a forward of its own, set by test_unet_refusals"),
    "a wrapped linear layer": (
        lambda unet: replace_linear(unet, AdapterLinear), f"{ATTENTION}.to_out.0 is a .*AdapterLinear"
    ),
    "a linear layer with a forward of its own": (
        lambda unet: replace_linear(unet, loud_linear), "LoudLinear"
    ),
    "a group norm with a forward of its own": (loud_group_norm, "LoudGroupNorm"),
    "mirrored edges": (lambda unet: pad_by(unet, "reflect"), "conv_in is a .*Conv2d: padding mode reflect"),
    "another activation": (lambda unet: setattr(unet, "conv_act", nn.GELU()), "the output's activation is GELU"),
}
EVERY_CHANGE = pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)


def must_be_the_hosts(unet: Any, reason: str, seed: int = 0) -> None:
    call = a_call(unet, seed=seed)
    assert torch.equal(served(unet, call), diffusers_output(unet, call))
    status = lib_onediff.status()
    assert status["route"] == "host"
    assert re.search(reason, status["reason"]), status["reason"]
    assert "\n" not in status["reason"]


@EVERY_CHANGE
def test_a_changed_unet_is_left_to_the_host(change: Callable[[Any], object], reason: str) -> None:
    unet = diffusers_unet()
    plain = served(unet, a_call(unet))
    change(unet)
    assert not torch.equal(served(unet, a_call(unet)), plain)
    lib_onediff.compile_unet(unet)
    must_be_the_hosts(unet, reason)


@EVERY_CHANGE
def test_a_unet_changed_after_it_was_proved_is_left_to_the_host(change: Callable[[Any], object], reason: str) -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain"
    change(unet)
    must_be_the_hosts(unet, reason, seed=1)


@pytest.mark.parametrize("undo", ["hook", "padding"])
def test_ours_comes_back_when_the_change_is_undone(undo: str) -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    if undo == "hook":
        handle = unet.mid_block.register_forward_hook(lambda *given: None)
    else:
        pad_by(unet, "reflect")
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "host"
    if undo == "hook":
        handle.remove()
    else:
        pad_by(unet, "zeros")
    served(unet, a_call(unet, seed=1))
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_circular_padding_is_ours_and_can_be_switched_back() -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    for seed, mode in enumerate(("zeros", "circular", "zeros")):
        pad_by(unet, mode)
        call = a_call(unet, seed=seed)
        assert torch.allclose(served(unet, call), diffusers_output(unet, call), atol=1e-5)
        assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_dropout_in_training_mode_is_left_to_the_host() -> None:
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL, dropout=0.5))
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain"
    unet.train()
    served(unet, a_call(unet, seed=1))
    assert lib_onediff.status()["route"] == "host"


def test_an_extra_parameter_is_refused_by_name() -> None:
    unet = diffusers_unet()
    unet.mid_block.register_parameter("strange", nn.Parameter(torch.zeros(3)))
    lib_onediff.compile_unet(unet)
    must_be_the_hosts(unet, "1 parameters that we do not know, such as mid_block.strange")


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
        assert (status["route"], "replaced by test_unet_refusals" in status["reason"]) == ("host", True), status
        assert kind.__name__ in status["reason"]
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]
