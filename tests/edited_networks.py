"""The networks for random edits: pairs of a network that OneDiff serves and a twin that the host's own code runs."""
from __future__ import annotations

import contextlib
import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, SMALL, SMALL_XL, diffusers_unet, randomise
from contract_hosts import FamilyHost, Host, Sampler, running
from edits_of_code import Addresses, Sites, addresses_of, sites_at, sites_of
from graph_builders import PretendedGraphs
from ladder_builders import NATIVE, StandInOperators, pretend_a_gpu
from torch import Tensor
from transformer_hosts import Krea2Host, ZImageHost

import lib_onediff
from lib_onediff.bench.models import CONFIGURATIONS, pooled_width
from lib_onediff.core.layer_weights import Weights
from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.binding import Binding

SIZES = ((8, 8), (8, 8), (8, 12), (16, 8))
BATCHES = (2, 2, 1)
TOKENS = (77, 77, 154)
Given = dict[str, Any]
# A network, or a copy or wrapper of it, that can be called like it.
Caller = Callable[..., Any]


# The addresses of the functions that a network's output depends on (edits_of_code.Sites), by Pair.key.
FOUND: dict[str, Addresses] = {}


class Pair(ABC):
    """A network that OneDiff serves, and its twin, which the host's own code runs. Every edit is made to both.

    key: the name in NETWORKS.
    names: the names of the latent, the timestep and the context among the arguments.
    ours: the network that OneDiff serves.
    theirs: the twin.
    changes: the edits of inputs that are in effect, each a function of (arguments, names) that returns other arguments.
    callers: (name, ours, theirs) of copies and wrappers of the two that are also called.
    grad: the gradient mode of the calls.
    """

    key = ""
    names = ("x", "timesteps", "context")
    ours: Any
    theirs: Any

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.changes: list[Callable[[Given, tuple[str, str, str]], Given]] = []
        self.callers: list[tuple[str, Caller, Caller]] = []
        self.grad: Callable[[], Any] = torch.no_grad

    @property
    def networks(self) -> tuple[Any, Any]:
        return self.ours, self.theirs

    def inputs(self, seed: int) -> Given:
        """The arguments of a call. The seed decides their values and sizes."""
        size, batch, tokens = (choices[seed % len(choices)] for choices in (SIZES, BATCHES, TOKENS))
        return self.inputs_of(size, batch, tokens, self.random(seed))

    @abstractmethod
    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        """The arguments of a call of this size. random: draws a tensor of a shape."""

    def random(self, seed: int) -> Callable[..., Tensor]:
        """A function that draws a float32 tensor of a shape. The seed decides the values."""
        generator = torch.Generator().manual_seed(seed)
        return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(self.device)

    def answer(self, caller: Caller, given: Given) -> Any:
        """The output tensor of a network for these arguments."""
        given = dict(given)
        positional = [given.pop(name) for name in self.names if given.get("by position")]
        given.pop("by position", None)
        with self.grad():
            made = caller(*positional, **given)
        made = getattr(made, "sample", made)
        return made[0] if isinstance(made, tuple) else made

    @contextlib.contextmanager
    @abstractmethod
    def image(self, is_announced: bool) -> Iterator[None]:
        """A context whose calls belong to one image. is_announced: whether the host announces its begin and end."""
        yield

    def as_hosts(self, twin: Any) -> Any:
        """A copy of `theirs`, changed so that the host's own code runs it as well."""
        return twin

    @cached_property
    def sites(self) -> Sites:
        """The functions that the output depends on (edits_of_code.Sites). Finding them takes a hundred calls, so it is
        done once for each key."""
        if self.key not in FOUND:
            given = self.inputs(0)
            FOUND[self.key] = addresses_of(sites_of(lambda: self.answer(self.theirs, given), type(self.theirs)))
        return sites_at(FOUND[self.key])


class DiffusersPair(Pair):
    """layout: see builders.LAYOUTS. dtype: the dtype of the weights. options: see compile_unet."""

    names = ("sample", "timestep", "encoder_hidden_states")

    def __init__(self, layout: dict[str, Any], device: str, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(device)
        self.ours, self.theirs = (
            diffusers_unet(**layout).to(self.device, dtype).requires_grad_(False) for _ in range(2)
        )
        self.dtype = dtype
        lib_onediff.compile_unet(self.ours, **options)

    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        config = self.theirs.config
        given: Given = {
            "sample": random(batch, config.in_channels, *size).to(self.dtype),
            "timestep": torch.tensor(417.0, device=self.device, dtype=torch.float32),
            "encoder_hidden_states": random(batch, tokens, config.cross_attention_dim).to(self.dtype),
        }
        if config.addition_embed_type == "text_time":
            ids = torch.tensor([[64.0, 64, 0, 0, 64, 64]] * batch, dtype=self.dtype, device=self.device)
            pooled = random(batch, pooled_width(config)).to(self.dtype)
            given["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": ids}
        return given

    @contextlib.contextmanager
    def image(self, is_announced: bool) -> Iterator[None]:
        with lib_onediff.sampling(self.ours) if is_announced else contextlib.nullcontext():
            yield


class WebuiPair(Pair):
    """A network of a stand-in for a WebUI in which OneDiff is loaded."""

    def __init__(self, host: Host, device: str) -> None:
        super().__init__(device)
        self.host = host
        self.ours = host.unet
        self.theirs = copy.deepcopy(host.unet)
        self._forward = vars(type(self.theirs))["forward"]
        self.as_hosts(self.theirs)
        for network in self.networks:
            network.to(self.device).requires_grad_(False)
        self.adapter = host.begin()
        self.grad = host.no_gradients

    def as_hosts(self, twin: Any) -> Any:
        twin.forward = types.MethodType(self._forward, twin)
        return twin

    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        context = random(batch, tokens, CONTEXT_WIDTH)
        timesteps = torch.linspace(900.25, 150.5, batch, device=self.device, dtype=torch.float32)
        return {"x": random(batch, 4, *size), "timesteps": timesteps, "context": context}

    @contextlib.contextmanager
    def image(self, is_announced: bool) -> Iterator[None]:
        p = SimpleNamespace(sd_model=self.host.checkpoint, sampler=Sampler(), is_hr_pass=False)
        runtime.guard.hook("the settings of this generation", in_generation=True)(runtime.guard.resume)()
        self.adapter.before_sampling(p)
        yield
        self.adapter.after_run(p)


class ForgePair(WebuiPair):
    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        given = super().inputs_of(size, batch, tokens, random)
        return {**given, "control": None, "transformer_options": {}}


class FlowPair(ForgePair):
    """A network whose timesteps are from 0 to 1: the share of noise in the latent."""

    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        given = super().inputs_of(size, batch, tokens, random)
        return {**given, "timesteps": torch.linspace(0.9, 0.2, batch, device=self.device, dtype=torch.float32)}


class AnimaPair(FlowPair):
    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        given = super().inputs_of(size, batch, tokens, random)
        return {**given, "x": given["x"].unsqueeze(2), "context": given["context"].unsqueeze(1)}


class Krea2Pair(FlowPair):
    def inputs_of(self, size: tuple[int, int], batch: int, tokens: int, random: Callable[..., Tensor]) -> Given:
        given = super().inputs_of(size, batch, tokens, random)
        context = random(batch, tokens, Krea2Host.text_layers * Krea2Host.text_width)
        return {**given, "x": given["x"].unsqueeze(2), "context": context}


class AnimaHost(FamilyHost):
    def new_unet(self, **config: Any) -> Any:
        return randomise(self.module("backend.nn.anima").Anima(4, 64, CONTEXT_WIDTH, heads=2, rank=16, blocks=2))

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        image, context = super().noise_and_prompts()
        return image.unsqueeze(2), context.unsqueeze(1)


def forget_everything() -> None:
    """Reset the runtime to its initial state."""
    runtime.guard.forget()
    runtime.tuning_cache.clear()
    runtime.purge()
    runtime.configure(Settings())
    runtime.end_sampling()
    runtime.webui = None


class GraphsOfAddresses(PretendedGraphs):
    """Replays read the memory that the weights had at the capture, as a GPU's do. Here it is not freed meanwhile."""

    def weights_of(self, binding: Binding) -> Callable[[], Weights]:
        captured = binding.weights()
        return lambda: captured


@contextlib.contextmanager
def with_pretended_graphs() -> Iterator[None]:
    """A context in which the CPU counts as a GPU. A replay of a graph computes the forward again from the graph's own
    inputs, with the memory that the weights had at the capture."""
    with pytest.MonkeyPatch.context() as patch:
        pretend_a_gpu(patch, StandInOperators())
        graphs = GraphsOfAddresses()
        patch.setattr(runtime.services.holdings, "made", graphs)
        patch.setattr(runtime.services.holdings, "card", graphs.card)
        yield


@contextlib.contextmanager
def diffusers_pair(layout: dict[str, Any], graphs: bool, device: str, dtype: torch.dtype) -> Iterator[Pair]:
    is_gpu = torch.device(device).type == "cuda"
    if is_gpu and graphs:
        # A network whose heads and groups have sizes that our kernels support.
        layout = CONFIGURATIONS["tiny-sdxl"]
    with with_pretended_graphs() if graphs and not is_gpu else contextlib.nullcontext():
        pair = DiffusersPair(layout, device, dtype, **{"backend": NATIVE} if graphs else {})
        yield pair
        lib_onediff.uncompile_unet(pair.ours)


@contextlib.contextmanager
def webui_pair(name: str, kind: type[WebuiPair], device: str, host_class: type[Host] | None = None) -> Iterator[Pair]:
    with running(name, host_class) as host:
        yield kind(host, device)


# By name, a function of (device, dtype) that returns a context with a new pair. Those of WebUIs are always in float32.
NETWORKS: dict[str, Callable[[str, torch.dtype], Any]] = {
    "sd1": lambda device, dtype: diffusers_pair(SMALL, False, device, dtype),
    "sdxl": lambda device, dtype: diffusers_pair(SMALL_XL, False, device, dtype),
    "sdxl-graphs": lambda device, dtype: diffusers_pair(SMALL_XL, True, device, dtype),
    "a1111": lambda device, dtype: webui_pair("a1111", WebuiPair, device),
    "forge": lambda device, dtype: webui_pair("forge", ForgePair, device),
    "neo": lambda device, dtype: webui_pair("neo", ForgePair, device),
    "reforge": lambda device, dtype: webui_pair("reforge", ForgePair, device),
    "anima": lambda device, dtype: webui_pair("neo", AnimaPair, device, AnimaHost),
    "krea-2": lambda device, dtype: webui_pair("neo", Krea2Pair, device, Krea2Host),
    "z-image": lambda device, dtype: webui_pair("neo", FlowPair, device, ZImageHost),
}
