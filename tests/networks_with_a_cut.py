"""The networks of edits_in_samplings.py. Each has a twin whose forward, the host's code, is the reference for OneDiff's
whole steps (all layers are computed) and cached ones (the activation at DeepCache's cut is reused)."""
from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from builders import SMALL_XL
from contract_hosts import running
from edited_networks import AnimaHost, AnimaPair, DiffusersPair, Given, Pair, with_pretended_graphs
from ladder_builders import NATIVE
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime

INTERVAL = 3


class Cut(ABC):
    """Runs the host's forward of a network as a whole step or as a cached one. found: the activation at the cut in the
    last call of whole(). kept: the activation that cached() reuses."""

    kept: Tensor | None = None

    def __init__(self, network: Any) -> None:
        self.network = network
        self.found: Tensor | None = None

    @abstractmethod
    def part(self, network: Any) -> list[nn.Module]:
        """The modules that a cached step computes."""

    @abstractmethod
    def hooks(self, kept: Tensor | None) -> list[Any]:
        """Register hooks that store the activation in found, or, unless kept is None, replace it by kept."""

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(None, *args, **kwargs)

    def cached(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.kept, *args, **kwargs)

    def _run(self, kept: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        hooks = self.hooks(kept)
        try:
            return self.network(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()


class UNetCut(Cut):
    """The cut at depth 1: the input of the last resnet is the concatenation of the activation that is reused and the
    first convolution's output, which a cached step computes."""

    def part(self, network: Any) -> list[nn.Module]:
        return [
            network.conv_in, network.time_embedding, network.up_blocks[-1].resnets[-1], network.conv_norm_out,
            network.conv_out, network.add_embedding,
        ]

    def hooks(self, kept: Tensor | None) -> list[Any]:
        beside = self.network.conv_in.out_channels

        def cut(module: nn.Module, inputs: tuple[Any, ...]) -> Any:
            hidden_states, *others = inputs
            inner = hidden_states.shape[1] - beside
            if kept is None:
                self.found = hidden_states[:, :inner].detach().clone()
                return None
            return torch.cat([kept, hidden_states[:, inner:]], dim=1), *others

        return [self.network.up_blocks[-1].resnets[-1].register_forward_pre_hook(cut)]


class TransformerCut(Cut):
    """The cut at depth 1: a cached step computes the first block, and adds what all other blocks added in the last
    whole step. blocks: the name of the network's list of blocks."""

    def __init__(self, network: Any, blocks: str) -> None:
        super().__init__(network)
        self.blocks = blocks

    def part(self, network: Any) -> list[nn.Module]:
        blocks = getattr(network, self.blocks)
        return [*(child for child in network.children() if child is not blocks), blocks[0]]

    def hooks(self, kept: Tensor | None) -> list[Any]:
        blocks = getattr(self.network, self.blocks)
        first: list[Tensor] = []

        def at_last(block: nn.Module, inputs: Any, output: Tensor) -> Any:
            if kept is None:
                self.found = (output - first[0]).detach()
                return None
            return first[0] + kept

        return [
            blocks[0].register_forward_hook(lambda block, inputs, output: first.append(output)),
            blocks[-1].register_forward_hook(at_last),
        ]


class CosmosPair(DiffusersPair):
    """diffusers' Cosmos transformer, with OneDiff and without."""

    names = ("hidden_states", "timestep", "encoder_hidden_states")

    def __init__(self) -> None:
        from test_cosmos import network

        Pair.__init__(self)
        self.ours = network(num_layers=4)
        self.theirs = network(num_layers=4)
        lib_onediff.compile_unet(self.ours, backend=NATIVE, deepcache_interval=INTERVAL)

    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        from test_cosmos import CONTEXT_WIDTH

        height, width = size
        return {
            "hidden_states": random(batch, 4, 1, height, width), "timestep": torch.full((batch,), 0.5),
            "encoder_hidden_states": random(batch, tokens, CONTEXT_WIDTH),
            "padding_mask": torch.zeros(1, 1, 8 * height, 8 * width),
        }


@contextlib.contextmanager
def sdxl() -> Iterator[tuple[Pair, Cut]]:
    options = {"backend": NATIVE, "deepcache_interval": INTERVAL}
    with with_pretended_graphs():
        pair = DiffusersPair(SMALL_XL, "cpu", torch.float32, **options)
        yield pair, UNetCut(pair.theirs)
        lib_onediff.uncompile_unet(pair.ours)


@contextlib.contextmanager
def cosmos() -> Iterator[tuple[Pair, Cut]]:
    with with_pretended_graphs():
        pair = CosmosPair()
        yield pair, TransformerCut(pair.theirs, "transformer_blocks")
        lib_onediff.uncompile_unet(pair.ours)


@contextlib.contextmanager
def anima() -> Iterator[tuple[Pair, Cut]]:
    """Anima in Forge Neo, which applies functions to weights at each call."""
    with with_pretended_graphs(), running("neo", AnimaHost) as host:
        pair = AnimaPair(host, "cpu")
        runtime.configure(Settings(backend=NATIVE, deepcache_interval=INTERVAL))
        yield pair, TransformerCut(pair.theirs, "blocks")


NETWORKS: dict[str, Callable[[], Any]] = {"sdxl": sdxl, "cosmos": cosmos, "anima": anima}
