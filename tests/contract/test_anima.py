"""Forge Neo's Anima: calls whose inputs, replaced functions or modules our forward does not support are computed by the
host's own forward."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import calls_of, random, running
from left_to_the_host import replace_part
from torch import Tensor, nn
from transformer_hosts import AnimaHost

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.anima.call import AnimaCall
from lib_onediff.families.anima.family import Animas
from lib_onediff.families.registry import FAMILIES
from lib_onediff.hosts.forge.call import HostCall, transformer_call
from lib_onediff.runtime.runtime import runtime


@pytest.fixture
def host(fresh_runtime: None) -> Iterator[AnimaHost]:
    with running("neo", AnimaHost) as made:
        yield made


def test_a_call_whose_tensors_do_not_fit_the_network_is_refused(host: AnimaHost) -> None:
    """Each change makes one tensor of a valid call wrong: its number of dimensions, its channels, or its batch size.
    Without the check, our forward would raise another exception or broadcast. A call with class labels, which Anima
    does not have, is refused as well."""
    family = Animas()
    layout = FAMILIES.read(host.unet)
    call = family.example(layout, (8, 8), 2, 20, torch.randn)
    family.refuse_call(layout, call)
    for change, reason in (
        ({"latent": call.latent[:, :, 0]}, "latent .*fit"), ({"latent": call.latent[:, :2]}, "latent .*fit"),
        ({"context": call.context[..., :5]}, "prompt .*fit"), ({"context": call.context[:1]}, "different batch sizes"),
    ):
        with pytest.raises(Refusal, match=reason):
            family.refuse_call(layout, replace(call, **change))
    given = HostCall(call.latent, call.timestep, call.context, call.timestep, None, {}, {})
    with pytest.raises(Refusal, match="class labels"):
        transformer_call(AnimaCall, host.unet, given, False, ())


def test_a_norm_that_multiplies_by_one_plus_its_weight_is_computed_as_by_the_host(host: AnimaHost) -> None:
    """Forge Neo's RMSNorm multiplies by 1 + weight if its attribute `add` is set. This changes the host's output by
    more than 1 %, so that a forward that multiplies by the weight alone fails the comparison."""
    theirs = host.output()
    for module in host.unet.modules():
        if type(module).__name__ == "RMSNorm":
            module.add = True
    expected = host.output()
    assert relative_error(theirs, expected) > 1e-2
    host.begin()
    ours, calls = calls_of(host.output)
    assert calls == {"plain": 1} and relative_error(ours, expected) < 1e-5, runtime.status()["reason"]


def double_result(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Replace a function by one that returns twice its result."""
    function = getattr(owner, name)
    patch.setitem(vars(owner), name, lambda *given, **named: 2 * function(*given, **named))


def with_reference(host: AnimaHost, patch: pytest.MonkeyPatch) -> None:
    arguments = host.module("backend.args").dynamic_args
    patch.setattr(arguments, "ref_latents", [random(1, AnimaHost.channels, 1, 8, 8, seed=9)])


@pytest.mark.parametrize(("reason", "change", "arguments"), [
    ("a reference image", with_reference, {}),
    ("padding_mask", None, {"padding_mask": torch.ones(2, 1, 8, 8)}),
    ("one image", None, {"x": random(2, AnimaHost.channels, 2, 8, 8)}),
    ("attention_function", lambda host, patch: double_result(patch, host.code, "attention_function"), {}),
    ("pad_to_patch_size", lambda host, patch: double_result(patch, host.code, "pad_to_patch_size"), {}),
    ("cross_attn", lambda host, patch: double_result(patch, host.unet.blocks[1].cross_attn, "forward"), {}),
])
def test_only_calls_with_unsupported_inputs_or_replaced_functions_are_computed_by_the_host(
    host: AnimaHost, reason: str, change: Any, arguments: Any
) -> None:
    """Unsupported calls alternate with plain ones, which OneDiff must still compute.

    change: replaces a function, or sets an option of the host, during the call. arguments: added to the call.
    reason: a part of the reason in the status.
    """
    def changed() -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if change is not None:
                change(host, patch)
            return host.output(**arguments)

    host.check_that_only_changed_calls_run_the_host(changed, reason, least_change=1e-2)


def wrap_function(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Replace a function by 1.5 times its result, as forge-couple does: by a wrapper with the original's names
    (functools.wraps) and torch's decorator no_grad."""
    function = getattr(owner, name)
    patch.setattr(owner, name, functools.wraps(function)(torch.no_grad()(lambda *given: 1.5 * function(*given))))


def double_attention_of_each_block(patch: pytest.MonkeyPatch, host: AnimaHost) -> None:
    """Replace a method on the instance of each block's self-attention, as an extension for PAG (perturbed-attention
    guidance) does."""
    for block in host.unet.blocks:
        operation = block.self_attn.torch_attention_op
        patch.setitem(vars(block.self_attn), "torch_attention_op", lambda *given, of=operation: 2 * of(*given))


# By a part of the reason: an extension's replacement of a function or constant that the host's code looks up by name.
BY_NAME: dict[str, Callable[[AnimaHost, pytest.MonkeyPatch], object]] = {
    "_fn": lambda host, patch: double_result(patch, host.code, "_fn"),
    "apply_rope_split_half": lambda host, patch: double_result(patch, host.code.ck, "apply_rope_split_half"),
    "torch_attention_op": lambda host, patch: wrap_function(patch, host.code.Attention, "torch_attention_op"),
    "blocks.0.self_attn.torch_attention_op was replaced by": lambda host, patch: double_attention_of_each_block(
        patch, host
    ),
    "unpatchify": lambda host, patch: wrap_function(patch, host.code.Anima, "unpatchify"),
    "prepare_embedded_sequence": lambda host, patch: wrap_function(patch, host.code.Anima, "prepare_embedded_sequence"),
    "Block.forward": lambda host, patch: wrap_function(patch, host.code.Block, "forward"),
    "BASE": lambda host, patch: patch.setattr(host.code, "BASE", 500.0),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_calls_in_which_a_function_of_the_host_is_replaced_are_computed_by_the_host(host: AnimaHost, name: str) -> None:
    """The function is replaced after the first call, which compares our output with the host's. Our forward does not
    call this function, so the host must compute each call with the replacement, and the reason must name this test's
    module as its owner. name: a key of BY_NAME."""
    def replaced() -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            BY_NAME[name](host, patch)
            return host.output()

    host.check_that_only_changed_calls_run_the_host(replaced, name, least_change=1e-2)
    assert name == "BASE" or __name__ in runtime.status()["reason"]


@pytest.mark.parametrize(("reason", "path", "value"), [
    ("2 frames of a video", "patch_temporal", 2),
    ("without weight", "blocks.1.layer_norm_mlp", nn.LayerNorm(64)),
    ("without weight", "final_layer.layer_norm", nn.LayerNorm(64)),
    ("blocks.0.mlp.activation", "blocks.0.mlp.activation", nn.GELU("tanh")),
    ("expected SiLU", "blocks.1.adaln_modulation_mlp.0", nn.GELU()),
    ("not take a padding mask", "x_embedder.proj", nn.Sequential(nn.Identity(), nn.Linear(16, 64, bias=False))),
    ("its positions have unusual frequencies", "pos_embedder.dim_spatial_range", torch.ones(5)),
    ("such as blocks.0.extra", "blocks.0.extra", nn.Linear(2, 2)),
])
def test_a_network_with_an_unknown_module_or_value_is_refused(
    host: AnimaHost, reason: str, path: str, value: Any
) -> None:
    """Our forward would ignore the module or value. path: the path of the module, parameter or attribute that is
    replaced by `value`. reason: a part of the Refusal's message."""
    replace_part(host.unet, path, value)
    with pytest.raises(Refusal, match=reason):
        FAMILIES.read(host.unet)
