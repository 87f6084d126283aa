"""Functions that extensions set on the UNet (patches in transformer_options) have the same effect in our forward as in
the host's."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, FEW_NORMS_LDM, a_call, ldm_unet, our_output, relative_error, shared_ldm_unet
from comfy_unet import attended, patched_output
from grid import first, grid
from torch import Tensor
from torch.nn import functional

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.hosts.forge.call import HostCall, unet_call
from lib_onediff.hosts.forge.patches import ATTENTIONS, LISTS, MODIFIERS, NORM, PATCHES, REPLACED

READ = frozenset({PATCHES, REPLACED, MODIFIERS, NORM, *LISTS, *ATTENTIONS})
CLOSE = 1e-5
Options = dict[str, Any]


def free_u(h: Tensor, skip: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """As FreeU: writes into half of the channels in place, and returns another skip."""
    h[:, : h.shape[1] // 2] *= 1.3
    return h, skip * (0.8 if options["block"][1] % 2 else 1.1)


def shrink(h: Tensor, options: Options) -> Tensor:
    """As Kohya's Hires.fix: halves the size of the hidden states."""
    at = options["block"] == ("input", 3)
    return functional.interpolate(h, scale_factor=0.5, mode="nearest-exact") if at else h


def grow(h: Tensor, skip: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    return functional.interpolate(h, skip.shape[2:], mode="nearest-exact"), skip


def merged(query: Tensor, key: Tensor, value: Tensor, extra: Options) -> tuple[Tensor, Tensor, Tensor]:
    """As token merging: halves the number of queries."""
    extra["kept"] = query.shape[1]
    return query[:, ::2], key, value


def unmerged(tokens: Tensor, extra: Options) -> Tensor:
    return tokens.repeat_interleave(2, dim=1)[:, : extra["kept"]]


def with_an_image(query: Tensor, key: Tensor, value: Tensor, extra: Options) -> Tensor:
    """As an IP-Adapter: adds a second attention, over its own tokens."""
    own = torch.linspace(-1, 1, 4 * key.shape[2]).view(1, 4, -1).expand(len(key), -1, -1)
    return attended(query, key, value, extra) + 0.6 * attended(query, own, own.flip(1), extra)


def own_value(query: Tensor, key: Tensor, value: Tensor, extra: Options) -> Tensor:
    """As PAG: the attention map is the identity, so each query gets its own value."""
    return value * (1 + extra["transformer_index"])


def blockwise(h: Tensor, when: str, options: Options) -> Tensor:
    place = ("input", "middle", "output", "last").index(options["block"][0])
    return h * (1 + 0.1 * place + 0.01 * options["block"][1]) + (0.1 if when == "after" else 0.0)


def wrapped(norm: Any, h: Tensor, options: Options) -> Tensor:
    return norm(h) * 1.2 + 0.1


OTHER_CONTEXT = torch.linspace(-1, 1, 5 * CONTEXT_WIDTH).view(1, 5, CONTEXT_WIDTH)
CASES: dict[str, Options] = {
    "FreeU": {PATCHES: {"output_block_patch": [free_u]}},
    "HRFix": {PATCHES: {"input_block_patch_after_skip": [shrink], "output_block_patch": [grow]}},
    "token merging": {PATCHES: {"attn1_patch": [merged], "attn1_output_patch": [unmerged]}},
    "input blocks": {PATCHES: {"input_block_patch": [lambda h, options: h * 0.9 + options["block"][1] / 50]}},
    "embedding": {PATCHES: {"emb_patch": [lambda emb, channels, options: emb + channels / 1000]}},
    "between attentions": {PATCHES: {"middle_patch": [lambda x, extra: x * (1.1 + extra["block_index"])]}},
    "another context": {PATCHES: {"attn2_patch": [
        lambda n, context, value, extra: (n * 0.5, OTHER_CONTEXT.expand(len(n), -1, -1), OTHER_CONTEXT * 2),
    ]}},
    "the same context": {PATCHES: {"attn2_patch": [lambda n, context, value, extra: (n * 0.5, context, value)]}},
    "cross attention's output": {PATCHES: {"attn2_output_patch": [lambda n, extra: n * extra["dim_head"] / 4]}},
    "two in turn": {PATCHES: {"attn2_output_patch": [lambda n, extra: n + 1, lambda n, extra: n * 2]}},
    "IP-Adapter": {REPLACED: {"attn2": {("input", 1): with_an_image, ("middle", 0): with_an_image}}},
    "three-part keys": {REPLACED: {"attn2": {("output", 5, 0): with_an_image, ("output", 5, 1): own_value}}},
    "perturbed attention": {REPLACED: {"attn1": {("middle", 0): own_value}}},
    "block modifiers": {MODIFIERS: [blockwise]},
    "norms": {NORM: wrapped},
    "many": {
        PATCHES: {"output_block_patch": [free_u], "attn1_patch": [merged], "attn1_output_patch": [unmerged]},
        REPLACED: {"attn2": {("output", 4): with_an_image}}, MODIFIERS: [blockwise], NORM: wrapped,
    },
}


def ours(unet: Any, call: UNetCall, options: Options, read: frozenset[str] = READ) -> UNetCall | str:
    """The call as Forge's adapter converts it with these options, for our forward. read: the names that the host's
    forward reads from them."""
    return unet_call(unet, HostCall(call.latent, call.timestep, call.context, None, None, options, {}), False, read)


def copied(options: Options) -> Options:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in options.items()}


@grid(case=list(CASES), size=[(16, 16), (16, 32)])
def test_our_forward_calls_functions_of_extensions_at_the_same_points_as_the_host_forward(
    case: str, size: tuple[int, int]
) -> None:
    """case: functions as an extension sets them. expected: the output of ldm's forward with these functions at Forge's
    points. Without the functions, the output must differ."""
    unet = shared_ldm_unet()
    call = a_call(unet, *size)
    options = CASES[case]
    made = ours(unet, call, copied(options))
    assert isinstance(made, UNetCall) and made.patches is not None
    with torch.no_grad():
        output = our_output(unet, made)
        expected = patched_output(unet, call, copied(options))
    assert relative_error(output, expected) < CLOSE
    assert relative_error(output, our_output(unet, call)) > 100 * CLOSE


@pytest.mark.parametrize("case", first(3, ["FreeU", "token merging", "norms", "another context", "block modifiers"]))
def test_our_forward_with_kernels_calls_functions_of_extensions_at_the_same_points(case: str) -> None:
    """Native operators pass more than tensors to each other (hidden states and skip that are not yet concatenated, and
    statistics of an image); functions of extensions get tensors. expected: the output of ldm's forward."""
    pytest.importorskip("triton", reason="needs Triton")
    from lib_onediff.devices.cuda.kernels.operators import NativeOperators

    unet = ldm_unet(**FEW_NORMS_LDM)
    call = a_call(unet, 4, 8, 1, 5)
    options = CASES[case]
    made = ours(unet, call, copied(options))
    with torch.no_grad():
        output = our_output(unet, made, NativeOperators())
        expected = patched_output(unet, call, copied(options))
    assert relative_error(output, expected) < CLOSE
    assert relative_error(output, our_output(unet, call)) > 100 * CLOSE


@pytest.mark.parametrize(("options", "read"), [
    ({PATCHES: {"attn3_patch": [free_u]}}, READ),
    ({REPLACED: {"ff": {("middle", 0): own_value}}}, READ),
    ({"block_inner_modifiers": [blockwise]}, READ | {"block_inner_modifiers"}),
    # A host whose forward does not have this point would not call the function.
    ({PATCHES: {"emb_patch": [free_u]}}, READ - {"emb_patch"}),
])
def test_calls_with_functions_at_unknown_points_are_left_to_the_host(options: Options, read: frozenset[str]) -> None:
    """read: the names that the host's forward reads. In the last case, it does not read the function's name, and so
    would never call the function."""
    unet = shared_ldm_unet()
    with pytest.raises(Refusal, match="another extension changes the UNet in this step: "):
        ours(unet, a_call(unet), options, read)
    assert ours(unet, a_call(unet), {PATCHES: {"attn1_patch": []}, REPLACED: {"attn1": {}}}).patches is None


@pytest.mark.parametrize("name", [MODIFIERS, "block_inner_modifiers"])
def test_a_function_that_the_hosts_forward_never_calls_is_ignored(name: str) -> None:
    """name: the option with the function, which the host's forward does not read."""
    unet = shared_ldm_unet()
    assert ours(unet, a_call(unet), {name: [blockwise]}, READ - {name}).patches is None


def test_the_structure_counts_the_blocks_in_which_a_function_is_called() -> None:
    """Extensions set a function for every block, or every stage, that any UNet may have; only those of this UNet count.
    A graph is chosen by the structure."""
    unet = shared_ldm_unet()
    blocks = sum(hasattr(module, "attn1") for module in unet.modules())
    stages = {(part, number): own_value for part in ("input", "middle", "output") for number in range(16)}
    everywhere = {**stages, **{(*stage, index): own_value for stage in stages for index in range(16)}}
    for places, count in ((stages, blocks), (everywhere, blocks), ({("middle", 0): own_value}, 1)):
        made = ours(unet, a_call(unet), {REPLACED: {"attn1": places}})
        assert made.patches.structure == (f"{REPLACED}[attn1] of {count} blocks by {__name__}",)
