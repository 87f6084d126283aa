"""The kinds of networks that hosts of the Forge family compute their steps with, and what each asks of its host."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

from ...core.origins import author, origin
from ...core.refusal import Refusal
from ..contract import UNETS
from ..needs import Need, lack_of
from .attention import EXACT, PREFIX, HostAttention
from .call import UNET_PARAMETERS, names_read_by

UNET, ANIMA = "backend.nn.unet", "backend.nn.anima"


class HostNetwork(NamedTuple):
    """A kind of network.

    module, name: of its class. parameters: of its forward, in their order. attention: the function by which it computes
    attention. helpers: other global functions that it calls, each with the module whose code it must be. models: whose
    network it is, in words. check: raises Refusal where what the host does at a call is not among its arguments.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    attention: HostAttention
    helpers: Mapping[str, str]
    models: str = UNETS
    check: Callable[[], object] = lambda: None

    def needs(self) -> tuple[Need, ...]:
        return (
            Need(self.module, f"{self.name}.forward", self.parameters),
            *(Need(self.module, name) for name in self.helpers),
            Need(self.attention.caller, self.attention.name), Need(self.attention.functions, PREFIX + EXACT),
        )

    @property
    def is_there(self) -> bool:
        """Whether this release has it as we know it."""
        return not any(map(lack_of, self.needs()))


class LoadedNetwork:
    """A kind of network that the running host has. kind: its class."""

    def __init__(self, network: HostNetwork) -> None:
        self._network, self._code = network, importlib.import_module(network.module)
        self.kind: type = getattr(self._code, network.name)
        self.parameters, self.attention, self.models = network.parameters, network.attention, network.models

    @cached_property
    def names_read(self) -> frozenset[str]:
        """Every name by which it may ask for an option or another argument; those of its forward are among them."""
        return names_read_by(self._code, importlib.import_module(self.attention.functions)) | {*self.parameters}

    def check(self) -> None:
        """Raise Refusal where a call now is not what its arguments say."""
        attention = self.attention
        called = [(name, getattr(self._code, name), owner) for name, owner in self._network.helpers.items()]
        for name, function, owner in (*called, (attention.name, attention.chosen(), attention.functions)):
            if origin(function) != owner:
                raise Refusal(f"{name} of the WebUI's model was replaced by {author(function)}")
        self._network.check()


def refuse_references() -> None:
    """Anima's forward looks for other images by itself, beside its arguments."""
    if importlib.import_module("backend.args").dynamic_args.ref_latents:
        raise Refusal("the image is made after another one ([Anima] Enable Reference)")


# Of Forge and Forge Neo.
NETWORKS = (
    HostNetwork(
        UNET, "IntegratedUNet2DConditionModel", UNET_PARAMETERS,
        HostAttention("backend.attention", UNET, "attention_function"),
        dict.fromkeys(("apply_control", "timestep_embedding", "checkpoint"), UNET),
    ),
    HostNetwork(
        ANIMA, "Anima", ("x", "timesteps", "context", "padding_mask"),
        HostAttention("backend.attention", ANIMA, "attention_function"), {"pad_to_patch_size": "backend.utils"},
        "Anima", refuse_references,
    ),
)
