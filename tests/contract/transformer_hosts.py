"""Forge Neo with a transformer as its checkpoint, for contract tests."""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from builders import CONTEXT_WIDTH, randomise, relative_error
from contract_hosts import FamilyHost, calls_of, random
from torch import Tensor, nn
from torch.nn import functional

import lib_onediff.hosts.forge.adapter  # noqa: F401 (registers the readers of its networks)
from lib_onediff.core.sizes import TOKENS
from lib_onediff.families.anima.family import FEWEST_TOKENS
from lib_onediff.families.krea2.call import MULTIPLE
from lib_onediff.hosts.contract import WebUI
from lib_onediff.runtime.runtime import runtime


class TransformerHost(FamilyHost, ABC):
    """A subclass for each network defines new_network(), the inputs latent() and context(), and the attributes below.

    is_transformer: whether loaded checkpoints are the transformer; otherwise they are UNets.
    code_name, class_name: the Python module and the name of the network's class. model: its name for users.
    loras_on: the layers on which LoRAs are tested; the first one embeds the patches of the latent.
    low_bit_classes: how many classes of layers in a block may be in eight bits.
    last_layer: the path of the last layer, which no file stores quantized.
    fewest_tokens: the host pads shorter prompts to this length.
    residual_scale: a factor for the weights of the patch embedding, so large that rounding of the residual changes the
        output.
    """

    is_transformer = True
    code_name: ClassVar[str]
    class_name: ClassVar[str]
    model: ClassVar[str]
    loras_on: ClassVar[tuple[str, ...]]
    low_bit_classes: ClassVar[int]
    last_layer: ClassVar[str]
    fewest_tokens: ClassVar[int] = 1
    residual_scale: ClassVar[float] = 32.0
    own_forward: Any = None

    @abstractmethod
    def new_network(self) -> nn.Module:
        """A small network with random weights, of the host's class."""

    def warmed_for(self, tokens: int) -> int:
        """The length of a prompt whose call has the shape that pre-warming with `tokens` prepares."""
        return max(tokens, self.fewest_tokens)

    @abstractmethod
    def latent(self, batch: int, size: tuple[int, int], seed: int) -> Tensor:
        """A random latent. size: height and width in latent pixels."""

    @abstractmethod
    def context(self, batch: int, tokens: int, seed: int) -> Tensor:
        """The embedding of a random prompt, as the host passes it."""

    @property
    def code(self) -> Any:
        return self.module(self.code_name)

    @property
    def network_class(self) -> Any:
        return getattr(self.code, self.class_name)

    def new_unet(self, **config: Any) -> Any:
        return randomise(self.new_network()) if self.is_transformer else super().new_unet(**config)

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        if not self.is_transformer:
            return super().noise_and_prompts()
        return self.latent(1, (8, 8), seed=1), self.context(2, 77, seed=2)

    def start(self) -> WebUI:
        self.own_forward = self.network_class.forward
        return super().start()

    def check_that_only_changed_calls_run_the_host(
        self, changed: Callable[[], Tensor], reason: str, least_change: float = 0.0
    ) -> None:
        """Start OneDiff, and call the network unchanged and changed in turn. OneDiff must compute the unchanged calls,
        with the host's output; the host must compute the changed ones, with this reason in the status.

        changed: makes a change that only the host's code knows, calls the network, undoes the change, and returns the
        output. least_change: the least relative error between the two outputs.
        """
        plain = self.output()
        expected = changed()
        assert relative_error(expected, plain) >= least_change
        self.begin()
        for _ in range(3):
            ours, calls = calls_of(self.output)
            assert calls == {"plain": 1} and relative_error(ours, plain) < 1e-5, runtime.status()["reason"]
            theirs, calls = calls_of(changed)
            assert calls == {"host": 1} and torch.equal(theirs, expected)
            assert reason in runtime.status()["reason"]

    def own_output(self) -> Tensor:
        """output(), by the host's own code, while OneDiff is on."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.network_class, "forward", self.own_forward)
            return self.output()

    def output(
        self, size: tuple[int, int] = (8, 8), batch: int = 2, tokens: int = 20, options: dict[str, Any] | None = None,
        **others: Any,
    ) -> Tensor:
        """The output of one call. size: height and width of the latent. options: its transformer_options. others:
        further arguments, or replacements of x and context."""
        dtype = self.unet.get_submodule(self.last_layer).weight.dtype
        given = {
            "x": self.latent(batch, size, seed=3).to(dtype), "context": self.context(batch, tokens, seed=4).to(dtype),
            **others,
        }
        timesteps = torch.linspace(0.9, 0.2, batch)
        with torch.inference_mode():
            return self.unet(given.pop("x"), timesteps, control=None, transformer_options=options or {}, **given)


class AnimaHost(TransformerHost):
    code_name = "backend.nn.anima"
    class_name = "Anima"
    model = "Anima"
    channels = 4
    width = 64
    low_bit_classes = 6
    last_layer = "final_layer.linear"
    fewest_tokens = FEWEST_TOKENS
    loras_on = (
        "x_embedder.proj.1", "t_embedder.1.linear_2", "final_layer.adaln_modulation.1",
        "final_layer.adaln_modulation.2",
        *(f"blocks.1.adaln_modulation_{place}.{one}" for place in ("self_attn", "cross_attn", "mlp") for one in (1, 2)),
        "blocks.0.self_attn.q_proj", "blocks.0.self_attn.v_proj", "blocks.1.cross_attn.q_proj",
        "blocks.1.cross_attn.k_proj", "blocks.0.self_attn.output_proj", "blocks.1.mlp.layer1", "blocks.0.mlp.layer2",
    )

    def new_network(self) -> nn.Module:
        found: nn.Module = self.network_class(self.channels, self.width, CONTEXT_WIDTH, heads=2, rank=16, blocks=2)
        return found

    def latent(self, batch: int, size: tuple[int, int], seed: int) -> Tensor:
        return random(batch, self.channels, *size, seed=seed).unsqueeze(2)

    def context(self, batch: int, tokens: int, seed: int) -> Tensor:
        return random(batch, 1, tokens, CONTEXT_WIDTH, seed=seed)

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        image, context = super().noise_and_prompts()
        if self.is_transformer:
            # The host pads prompts so.
            context = functional.pad(context, (0, 0, 0, self.fewest_tokens - context.shape[2]))
        return image, context


class Krea2Host(TransformerHost):
    code_name = "backend.nn.krea"
    class_name = "SingleStreamDiT"
    model = "Krea 2"
    channels = 4
    text_width = 32
    text_layers = 12
    low_bit_classes = 4
    last_layer = "last.linear"
    loras_on = (
        "first", "tmlp.0", "tproj.1", "txtmlp.1", "txtmlp.3", "txtfusion.projector", "last.linear",
        "txtfusion.layerwise_blocks.0.attn.wk", "txtfusion.layerwise_blocks.1.mlp.down",
        "txtfusion.refiner_blocks.0.attn.gate", "txtfusion.refiner_blocks.1.mlp.up",
        *(f"blocks.{block}.attn.{one}" for block, one in enumerate(("wq", "gate"))), "blocks.0.attn.wv",
        "blocks.1.attn.wk", "blocks.1.attn.wo", "blocks.0.mlp.gate", "blocks.0.mlp.up", "blocks.1.mlp.down",
    )

    def new_network(self) -> nn.Module:
        found: nn.Module = self.network_class(
            features=64, heads=4, kvheads=2, layers=2, channels=self.channels, txtdim=self.text_width, txtheads=2,
            txtlayers=self.text_layers,
        )
        return found

    def latent(self, batch: int, size: tuple[int, int], seed: int) -> Tensor:
        return random(batch, self.channels, 1, *size, seed=seed)

    def context(self, batch: int, tokens: int, seed: int) -> Tensor:
        found = random(batch, tokens, self.text_layers * self.text_width, seed=seed)
        # The host drops the second dimension if it is 1, which must not be the dimension of tokens.
        return found[:, None] if tokens == 1 else found

    def warmed_for(self, tokens: int) -> int:
        return tokens // TOKENS * MULTIPLE - 3


class ZImageHost(TransformerHost):
    code_name = "backend.nn.lumina"
    class_name = "NextDiT"
    model = "Z-Image"
    channels = 4
    low_bit_classes = 4
    last_layer = "final_layer.linear"
    loras_on = (
        "x_embedder", "cap_embedder.1", "t_embedder.mlp.0", "final_layer.adaLN_modulation.1", "final_layer.linear",
        "noise_refiner.0.adaLN_modulation.0", "noise_refiner.0.attention.out", "context_refiner.0.feed_forward.w2",
        "context_refiner.0.attention.qkv", "layers.0.attention.qkv", "layers.0.feed_forward.w1",
        "layers.1.feed_forward.w3", "layers.1.attention.out", "layers.1.adaLN_modulation.0",
    )

    def new_network(self) -> nn.Module:
        found: nn.Module = self.network_class(
            self.channels, 64, 2, 2, CONTEXT_WIDTH, [16, 8, 8], z_image_modulation=True, time_scale=1000.0,
            pad_tokens_multiple=32,
        )
        return found

    def latent(self, batch: int, size: tuple[int, int], seed: int) -> Tensor:
        return random(batch, self.channels, *size, seed=seed)

    def context(self, batch: int, tokens: int, seed: int) -> Tensor:
        return random(batch, tokens, CONTEXT_WIDTH, seed=seed)


class Lumina2Host(ZImageHost):
    model = "Lumina 2"
    loras_on = tuple(one.replace("adaLN_modulation.0", "adaLN_modulation.1") for one in ZImageHost.loras_on)

    def new_network(self) -> nn.Module:
        found: nn.Module = self.network_class(self.channels, 96, 6, 2, CONTEXT_WIDTH, [4, 6, 6], rope_theta=10000.0)
        return found
