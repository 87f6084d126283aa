"""Functions that extensions set on the modules of A1111's UNet have the same effect in our forward as in ldm's own."""
from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import builders
import pytest
import torch
from builders import FEW_NORMS_LDM, SMALL_LDM, a_call, ldm_output, ldm_unet, our_output, relative_error
from torch import Tensor
from torch.nn import functional

from lib_onediff.core.origins import author
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.hosts.a1111.adapter import release
from lib_onediff.hosts.a1111.patches import does_nothing_now, patches_of
from lib_onediff.hosts.changed_modules import ChangedModules, is_brought
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.scan import HostTraits

CLOSE = 1e-5
DRAWS = random.Random(0)
Undo = Callable[[], None]


def blocks_of(unet: Any) -> list[Any]:
    return [module for module in unet.modules() if hasattr(module, "attn2")]


def set_forwards(unet: Any, name: str, forward: Callable[..., Tensor]) -> Undo:
    attentions = [getattr(block, name) for block in blocks_of(unet)]
    for attention in attentions:
        attention.forward = types.MethodType(forward, attention)

    def undo() -> None:
        for attention in attentions:
            del attention.forward

    return undo


def with_an_image(self: Any, x: Tensor, context: Tensor | None = None, **others: Any) -> Tensor:
    """As an IP-Adapter: a forward that adds a second attention, over other tokens, before the output projection."""
    source = x if context is None else context
    split = lambda tokens: tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
    query = split(self.to_q(x))
    key = split(self.to_k(source))
    value = split(self.to_v(source))
    own = key[:, :, :4].flip(1)
    attended = functional.scaled_dot_product_attention(query, key, value)
    attended = attended + 0.6 * functional.scaled_dot_product_attention(query, own, own)
    return self.to_out(attended.transpose(1, 2).flatten(2))


def image_prompt(unet: Any) -> Undo:
    return set_forwards(unet, "attn2", with_an_image)


def tiles(unet: Any) -> Undo:
    """As HyperTile: self-attention within tiles, whose number is drawn from DRAWS at each call."""

    def tiled(self: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
        parts = 2 ** DRAWS.randint(0, 2)
        return type(self).forward(self, x.reshape(-1, x.shape[1] // parts, x.shape[2]), context).reshape(x.shape)

    return set_forwards(unet, "attn1", tiled)


def merging(unet: Any) -> Undo:
    """As token merging: each block gets a new class, derived from its own one."""
    blocks = blocks_of(unet)
    for block in blocks:
        parent = type(block)

        class Merging(parent):  # type: ignore[valid-type,misc]
            def _forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
                x = self.attn1(self.norm1(x)[:, ::2]).repeat_interleave(2, dim=1)[:, : x.shape[1]] + x
                x = self.attn2(self.norm2(x), context=context) + x
                return self.ff(self.norm3(x)) + x

        block.__class__ = Merging

    def undo() -> None:
        for block in blocks:
            block.__class__ = type(block).__mro__[1]

    return undo


def projections(unet: Any) -> Undo:
    """As ControlLLLite: adds to the inputs of projections. undo() sets their own bound method on the instances, instead
    of deleting the attribute."""
    layers = [layer for block in blocks_of(unet) for layer in (block.attn1.to_q, block.attn1.to_v, block.attn2.to_q)]
    below = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = lambda x, original=layer.forward: original(x + 0.3 * x.flip(1))

    def undo() -> None:
        for layer, original in zip(layers, below, strict=True):
            layer.forward = original

    return undo


CASES = {"image prompt": image_prompt, "tiles": tiles, "merging": merging, "projections": projections}


@pytest.fixture
def unet() -> Iterator[Any]:
    unet = ldm_unet(**SMALL_LDM)
    runtime.adopt(unet, host_traits=HostTraits(inert=does_nothing_now, brought=is_brought))
    yield unet
    runtime.release_all()


def ours(unet: Any, changed: ChangedModules, seed: int = 0) -> Tensor:
    """The runtime's output of a call, with the patches that `changed` finds on the UNet."""
    call = a_call(unet, 16, 16, seed=seed)
    patches = patches_of(changed.at_call(unet))
    with torch.no_grad():
        return runtime.run(
            unet, UNetCall(call.latent, call.timestep, call.context, patches=patches), lambda: ldm_output(unet, call)
        )


def route() -> str:
    return runtime.status()["route"]


@pytest.mark.parametrize("case", CASES)
def test_a_patch_runs_inside_our_forward_until_it_is_removed(unet: Any, case: str) -> None:
    """With the functions that an extension sets on ldm's modules, our output is close to that of ldm's own forward, and
    the reason names this file as their author. After they are removed, our output equals the one before bit for bit."""
    changed = ChangedModules(does_nothing_now)
    plain = ours(unet, changed)
    undo = CASES[case](unet)
    for seed in (0, 1):
        DRAWS.seed(seed)
        expected = ldm_output(unet, a_call(unet, 16, 16, seed=seed))
        DRAWS.seed(seed)
        output = ours(unet, changed, seed)
        assert relative_error(output, expected) < CLOSE and route() == "plain", runtime.status()["reason"]
        assert "test_a1111_patches" in runtime.status()["reason"]
        assert seed or relative_error(output, plain) > 100 * CLOSE
    undo()
    assert torch.equal(ours(unet, changed), plain) and route() == "plain", runtime.status()["reason"]


def boosted(tensors: list[Tensor], dim: int, original_function: Callable[..., Tensor]) -> Tensor:
    """As FreeU: writes to half of the channels of the hidden states in place, and concatenates a scaled skip."""
    hidden_states, skip = tensors
    hidden_states[:, : hidden_states.shape[1] // 2] *= 1.3
    return original_function([hidden_states, 0.8 * skip], dim=dim)


FREEU = functools.partial(boosted, original_function=builders.ResizingTorch().cat)


@pytest.mark.parametrize(("size", "triton"), [((16, 16), False), ((12, 21), False), ((4, 5), True)])
def test_a_function_that_replaces_the_concatenation_with_skips_runs_inside_our_forward(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int], triton: bool
) -> None:
    """FREEU replaces torch.cat in the module of ldm's UNet, as the FreeU extension does. With it, our output is close
    to ldm's, and far from ours without it. At odd sizes, skips and hidden states differ in size. triton: with our
    kernels, which without FREEU read both tensors instead of a concatenation."""
    monkeypatch.setattr(builders.ResizingTorch, "cat", staticmethod(FREEU))
    ops: Any = torch_ops
    unet = ldm_unet(**FEW_NORMS_LDM)
    if triton:
        pytest.importorskip("triton", reason="needs Triton")
        from lib_onediff.devices.cuda.kernels.operators import NativeOperators

        ops = NativeOperators()
    call = a_call(unet, *size, batch=1, tokens=5)
    patches = patches_of({}, FREEU)
    assert patches is not None and patches.structure == ("skips by test_a1111_patches",)
    with torch.no_grad():
        output = our_output(unet, replace(call, patches=patches), ops)
        expected = ldm_output(unet, call)
        assert relative_error(output, expected) < CLOSE
        assert relative_error(output, our_output(unet, call)) > 100 * CLOSE


def test_functions_of_controlnet_reference_are_a_patch_only_while_their_bank_has_features(unet: Any) -> None:
    """Reference-only of sd-webui-controlnet removes its forward of the UNet after use, but leaves its functions on
    inner modules. With an empty bank they compute what the module's class computes, and our output stays the same."""

    def hacked_basic_transformer_inner_forward(self: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
        return type(self)._forward(self, x + sum(self.bank), context)

    def hacked_group_norm_forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return type(self).forward(self, *args, **kwargs)

    changed = ChangedModules(does_nothing_now)
    plain = ours(unet, changed)
    for block in blocks_of(unet):
        block._forward = types.MethodType(hacked_basic_transformer_inner_forward, block)
        block.bank = []
    for stage in (unet.middle_block, unet.output_blocks[0]):
        stage.forward = types.MethodType(hacked_group_norm_forward, stage)
        stage.mean_bank = []
    assert torch.equal(ours(unet, changed), plain) and route() == "plain", runtime.status()["reason"]
    blocks_of(unet)[0].bank = [1.0]
    assert relative_error(ours(unet, changed), plain) > CLOSE
    assert "block by test_a1111_patches" in runtime.status()["reason"]


def test_the_forward_that_hypertile_sets_is_a_patch_only_while_hypertile_is_on(unet: Any) -> None:
    """does_nothing_now() says whether a module's forward computes the same as its class, and reads HyperTile's switch
    for it. A function of another extension around HyperTile's forward hides the switch, and counts as a patch."""
    attention = blocks_of(unet)[0].attn1
    switch = types.SimpleNamespace(enabled=True, forward=attention.forward)
    attention.__dict__["__webui_hypertile_params"] = switch
    attention.forward = functools.wraps(switch.forward)(lambda *args, **kwargs: switch.forward(*args, **kwargs))
    assert not does_nothing_now(unet, attention)
    switch.enabled = False
    assert does_nothing_now(unet, attention)
    below = attention.forward
    attention.forward = lambda *args, **kwargs: below(*args, **kwargs)
    assert not does_nothing_now(unet, attention), "another extension's function around it"


def test_an_attention_function_of_the_webui_that_an_extension_has_bound_is_no_patch(unet: Any) -> None:
    """The WebUI's attention functions are in modules.sd_hijack_optimizations, and our attention replaces them. Our
    output stays the same bit for bit. A call of the function would raise AssertionError."""
    space: dict[str, Any] = {"__name__": "modules.sd_hijack_optimizations"}
    exec("def forward(self, x, context=None, mask=None): raise AssertionError('ours computes it')", space)
    changed = ChangedModules(does_nothing_now)
    plain = ours(unet, changed)
    undo = set_forwards(unet, "attn2", space["forward"])
    assert torch.equal(ours(unet, changed), plain) and route() == "plain", runtime.status()["reason"]
    assert "compute within" not in runtime.status()["reason"]
    undo()


@pytest.mark.parametrize(("path", "name"), [
    ("/webui/extensions/sd-webui-controlnet/scripts/hook.py", "sd-webui-controlnet"),
    ("/webui/extensions-builtin/hypertile/hypertile.py", "hypertile"),
    ("/venv/tomesd/patch.py", "tomesd.patch"), ("/webui/extensions/loose.py", "tomesd.patch"),
])
def test_reasons_name_the_extension_that_users_have_installed(path: str, name: str) -> None:
    """author(), the name in reasons, is the extension's folder, below extensions/ or extensions-builtin/, that contains
    the function's file; for other files, it is the function's module."""
    space: dict[str, Any] = {"__name__": "tomesd.patch", "__file__": path}
    exec("def function(): pass", space)
    assert author(types.MethodType(space["function"], object())) == name
    assert author(functools.partial(space["function"])) == name


@pytest.mark.parametrize("tag, expected", [
    ("v1.10.1", "A1111 v1.10.1"), ("1.10.1", "A1111 1.10.1"), ("<none>", "A1111"), (None, "A1111"),
])
def test_the_release_has_no_version_if_the_webui_finds_none(
    monkeypatch: pytest.MonkeyPatch, tag: str | None, expected: str
) -> None:
    """release() is A1111's name and version. tag: what modules.launch_utils.git_tag() returns, "<none>" without git;
    None: there is no such function."""
    launch = types.ModuleType("modules.launch_utils")
    if tag is not None:
        monkeypatch.setattr(launch, "git_tag", lambda: tag, raising=False)
    monkeypatch.setitem(sys.modules, launch.__name__, launch)
    assert release() == expected
