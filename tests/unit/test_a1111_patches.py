"""What extensions set on the modules of A1111's UNet runs within our forward as it does within ldm's own."""
from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import a_call, ldm_output, ldm_unet, relative_error
from test_blocks import controlled_forward
from torch import Tensor
from torch.nn import functional

from lib_onediff.hosts.a1111.controlnet_loop import HostLoop
from lib_onediff.hosts.a1111.inert import does_nothing_now
from lib_onediff.hosts.a1111.patches import ForeignModules, is_brought
from lib_onediff.model.call import UNetCall
from lib_onediff.model.patches import HostTraits
from lib_onediff.options.settings import Settings
from lib_onediff.runtime.runtime import runtime

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
    """As an IP-Adapter: a second attention over tokens of its own, before the output's projection."""
    source = x if context is None else context
    split = lambda tokens: tokens.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
    query, key, value = split(self.to_q(x)), split(self.to_k(source)), split(self.to_v(source))
    own = key[:, :, :4].flip(1)
    attended = functional.scaled_dot_product_attention(query, key, value)
    attended = attended + 0.6 * functional.scaled_dot_product_attention(query, own, own)
    return self.to_out(attended.transpose(1, 2).flatten(2))


def image_prompt(unet: Any) -> Undo:
    return set_forwards(unet, "attn2", with_an_image)


def tiles(unet: Any) -> Undo:
    """As HyperTile: into random tiles, by a generator of its own."""

    def tiled(self: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
        parts = 2 ** DRAWS.randint(0, 2)
        return type(self).forward(self, x.reshape(-1, x.shape[1] // parts, x.shape[2]), context).reshape(x.shape)

    return set_forwards(unet, "attn1", tiled)


def merging(unet: Any) -> Undo:
    """As token merging: each block gets a class of its own, derived from the block's."""
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


CASES = {"image prompt": image_prompt, "tiles": tiles, "merging": merging}


@pytest.fixture
def unet() -> Iterator[Any]:
    unet = ldm_unet()
    runtime.adopt(unet, host_traits=HostTraits(inert=does_nothing_now, by_content=True, brought=is_brought))
    yield unet
    runtime.release_all()


def ours(unet: Any, foreign: ForeignModules, seed: int = 0) -> Tensor:
    call = a_call(unet, 16, 16, seed=seed)
    patches = foreign.at_call(unet)
    with torch.no_grad():
        return runtime.run(
            unet, UNetCall(call.latent, call.timestep, call.context, patches=patches), lambda: ldm_output(unet, call)
        )


def route() -> str:
    return runtime.status()["route"]


@pytest.mark.parametrize("case", CASES)
def test_within_ours_and_off_again_between_two_calls(unet: Any, case: str) -> None:
    foreign = ForeignModules()
    plain = ours(unet, foreign)
    undo = CASES[case](unet)
    for seed in (0, 1):
        DRAWS.seed(seed)
        expected = ldm_output(unet, a_call(unet, 16, 16, seed=seed))
        DRAWS.seed(seed)
        output = ours(unet, foreign, seed)
        assert relative_error(output, expected) < CLOSE and route() == "plain", runtime.status()["reason"]
        assert "test_a1111_patches" in runtime.status()["reason"]
        assert seed or relative_error(output, plain) > 100 * CLOSE
    undo()
    assert torch.equal(ours(unet, foreign), plain) and route() == "plain", runtime.status()["reason"]


@pytest.mark.parametrize("case", CASES)
def test_within_our_blocks_in_a_foreign_loop(unet: Any, case: str) -> None:
    from ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential

    call = a_call(unet, 16, 16)
    loop = HostLoop([TimestepEmbedSequential])
    loop.serve()
    loop.watch(unet)
    unet.forward = types.MethodType(controlled_forward, unet)
    try:
        undo = CASES[case](unet)
        with torch.no_grad():
            for _ in range(2):
                DRAWS.seed(1)
                with runtime.settings_for_run(Settings(enabled=False)):
                    expected = unet.forward(call.latent, call.timestep, call.context)
                DRAWS.seed(1)
                output = unet.forward(call.latent, call.timestep, call.context)
                assert relative_error(output, expected) < CLOSE
                assert route() == "blocks", runtime.status()["reason"]
                assert "test_a1111_patches" in runtime.status()["reason"]
            undo()
            unet.forward(call.latent, call.timestep, call.context)
            assert route() == "blocks" and "test_a1111_patches" not in runtime.status()["reason"]
    finally:
        loop.stop()


def test_what_keeps_a_state_between_calls_is_the_hosts(unet: Any) -> None:
    calls = []

    def counting(self: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
        calls.append(1)
        return type(self).forward(self, x, context) * (1 + len(calls))

    set_forwards(unet, "attn2", counting)
    ours(unet, ForeignModules())
    assert route() == "host" and "differs each time" in runtime.status()["reason"]
