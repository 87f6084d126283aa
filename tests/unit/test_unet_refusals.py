"""Our forward refuses UNets and calls that it would not compute as the host does, such as those with classes that an
extension has patched. The host computes them, and the reason is one line."""
from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL, SMALL_XL, a_call, diffusers_output, diffusers_unet, ldm_structure, served
from grid import grid
from torch import Tensor, nn
from torch.nn import functional

import lib_onediff
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet.call import UNetCall

ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1"


class AdapterLinear(nn.Module):
    """A wrapper around a linear layer, as PEFT's adapters are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(x)


class LoudLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def wrapped(unet: Any) -> None:
    out = unet.get_submodule(ATTENTION).to_out
    out[0] = AdapterLinear(out[0])


def another_class(unet: Any) -> None:
    unet.get_submodule(ATTENTION).to_out[0].__class__ = LoudLinear


def hook(unet: Any) -> None:
    unet.mid_block.resnets[0].register_forward_hook(lambda module, given, output: 2 * output)


def own_forward(unet: Any) -> None:
    resnet = unet.mid_block.resnets[0]
    resnet.forward = lambda *given, **named: 2 * type(resnet).forward(resnet, *given, **named)


def pad_by(unet: Any, mode: str) -> None:
    for module in unet.modules():
        if isinstance(module, nn.Conv2d):
            module.padding_mode = mode


@pytest.mark.parametrize(("change", "reason"), [
    (hook, "test_unet_refusals has set a hook on mid_block.resnets.0"),
    (own_forward, "mid_block.resnets.0.forward was replaced by test_unet_refusals"),
    (wrapped, f"{ATTENTION}.to_out.0 is a .*AdapterLinear"), (another_class, "LoudLinear"),
    (lambda unet: pad_by(unet, "reflect"), "conv_in is a .*Conv2d .padding mode reflect"),
    (lambda unet: setattr(unet, "conv_act", nn.GELU()), "the output's activation is GELU"),
], ids=["a hook", "a forward", "a wrapped layer", "a layer's own forward", "mirrored edges", "another activation"])
def test_a_unet_that_an_extension_has_changed_is_computed_by_the_host(
    change: Callable[[Any], object], reason: str
) -> None:
    """Before the change, OneDiff computes the UNet. Afterwards the output equals that of diffusers' own forward bit for
    bit, and differs from the one before. reason: a regular expression."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    plain = served(unet, call)
    assert lib_onediff.status()["route"] == "plain"
    change(unet)
    output = served(unet, call)
    assert torch.equal(output, diffusers_output(unet, call)) and not torch.allclose(output, plain)
    status = lib_onediff.status()
    assert status["route"] == "host" and re.search(reason, status["reason"]), status["reason"]
    assert "\n" not in status["reason"]


@pytest.mark.parametrize(("config", "change", "reason"), [
    (SMALL_XL, lambda call: {"y": None}, "the pooled prompt is missing"),
    (SMALL_XL, lambda call: {"y": call.y[:, :5]}, r"the pooled prompt \(shape \(2, 5\)\) does not fit"),
    (SMALL, lambda call: {"y": call.timestep}, "takes no pooled prompt"),
    (SMALL, lambda call: {"timestep_condition": call.timestep}, "a guidance embedding"),
    (SMALL, lambda call: {"context": call.context[..., :5]}, "the prompt .* does not fit"),
    (SMALL, lambda call: {"context": call.context[:1]}, "different batch sizes"),
    (SMALL, lambda call: {"latent": call.latent[:, :3]}, "takes 4 channels"),
    (SMALL, lambda call: {"latent": call.latent[..., :0]}, "empty"),
])
def test_inputs_that_do_not_fit_the_network_are_refused(
    config: dict[str, Any], change: Callable[[UNetCall], dict[str, Any]], reason: str
) -> None:
    """The unchanged call is accepted. change: returns fields of the call with other values; y is the pooled prompt.
    reason: a regular expression for the refusal."""
    unet = diffusers_unet(**config)
    layout, call = FAMILIES.read(unet), a_call(unet)
    family = FAMILIES.of(layout)
    family.refuse_call(layout, call)
    with pytest.raises(Refusal, match=reason):
        family.refuse_call(layout, replace(call, **change(call)))


def test_our_forward_computes_circular_padding_until_it_is_switched_off() -> None:
    """The convolutions pad with zeros, then circularly (the WebUI's "Tiling"), then with zeros. Each of our outputs is
    close to the host's."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    for seed, mode in enumerate(("zeros", "circular", "zeros")):
        pad_by(unet, mode)
        call = a_call(unet, seed=seed)
        assert torch.allclose(served(unet, call), diffusers_output(unet, call), atol=1e-5)
        assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


@pytest.mark.parametrize("lacking", [slice(1, 2), slice(None)], ids=["one block", "all blocks"])
def test_our_forward_computes_residual_blocks_whose_first_convolution_has_no_bias(lacking: slice) -> None:
    """Our output is close to the host's. Our forward fuses these biases with shifts, but some blocks may have none.
    lacking: the blocks without a bias."""
    unet = diffusers_unet()
    convolutions = [module.conv1 for module in unet.modules() if type(module).__name__ == "ResnetBlock2D"]
    for convolution in convolutions:
        nn.init.normal_(convolution.bias)
    for convolution in convolutions[lacking]:
        convolution.bias = None
    unet = lib_onediff.compile_unet(unet)
    call = a_call(unet)
    assert torch.allclose(served(unet, call), diffusers_output(unet, call), atol=1e-5)
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_the_host_computes_a_unet_with_an_unknown_parameter_or_with_dropout_in_training_mode() -> None:
    """Our forward has neither. Once the parameter is removed, OneDiff computes the UNet. A new parameter that no code
    uses is not found at the next call, as a changed attribute of a module is, so the test also sets an attribute."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL, dropout=0.5))
    for change, reason in (
        (lambda: unet.mid_block.register_parameter("strange", nn.Parameter(torch.zeros(3))),
         "it has unknown parameters (1), such as mid_block.strange"),
        (lambda: delattr(unet.mid_block, "strange"), ""),
        (unet.train, "dropout drops values at random: call eval()"),
    ):
        change()
        unet.conv_in.noted = reason
        served(unet, a_call(unet))
        assert lib_onediff.status()["route"] == ("host" if reason else "plain")
        assert reason in lib_onediff.status()["reason"]


def louder(original: Callable, disguised: bool) -> Callable:
    """A patched function. disguised: with the name and the module of the original, as functools.wraps sets them."""

    def patched(self: Any, *given: Any, **named: Any) -> Any:
        output = original(self, *given, **named)
        if isinstance(output, tuple):
            return tuple(2 * part for part in output)
        return type(output)(sample=2 * output.sample) if hasattr(output, "sample") else 2 * output

    return functools.wraps(original)(patched) if disguised else patched


# (module, class, method) of patches.
PLACES = [
    ("diffusers.models.attention_processor", "Attention", "forward"), ("torch.nn", "Linear", "forward"),
    ("diffusers.models.attention_processor", "AttnProcessor2_0", "__call__"),
    ("diffusers", "UNet2DConditionModel", "forward"),
]


@grid(place=PLACES, proved=[False, True], disguised=[False, True])
def test_the_host_computes_calls_while_a_class_is_patched(
    place: tuple[str, str, str], proved: bool, disguised: bool
) -> None:
    """The output equals that of the patched host bit for bit; after the patch is removed, OneDiff computes. proved:
    whether our output was compared with the host's before the patch. disguised: whether the patch has the name and the
    module of the original."""
    module, name, method = place
    kind = getattr(importlib.import_module(module), name)
    unet = lib_onediff.compile_unet(diffusers_unet())
    plain = served(unet, a_call(unet)) if proved else diffusers_output(unet, a_call(unet))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method, louder(getattr(kind, method), disguised))
        # Its prompt is a new tensor, which begins another sampling.
        call = a_call(unet)
        output = served(unet, call)
        assert torch.equal(output, diffusers_output(unet, call)) and not torch.allclose(output, plain)
        status = lib_onediff.status()
        assert (status["route"], "replaced by test_unet_refusals" in status["reason"]) == ("host", True), status
        assert kind.__name__ in status["reason"]
    served(unet, a_call(unet))
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


class Scaler(nn.Module):
    """As the module that the extension Kohya's Hires.fix puts around a block, which scales the block's input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *given: Any) -> Tensor:
        return self.block(functional.interpolate(x, scale_factor=0.5), *given)


def test_the_reason_names_the_wrapper_that_replaces_a_block_and_the_extension_that_made_it() -> None:
    """In a UNet of ldm, an extension has put a module of its own (Scaler) in the place of a block, around it. With the
    block itself put back, the UNet is accepted."""
    unet = ldm_structure({})
    unet.input_blocks[2] = Scaler(unet.input_blocks[2])
    with pytest.raises(Refusal, match=f"^{__name__} has replaced input_blocks.2 by its own Scaler$"):
        FAMILIES.read(unet)
    unet.input_blocks[2] = unet.input_blocks[2].block
    FAMILIES.read(unet)
