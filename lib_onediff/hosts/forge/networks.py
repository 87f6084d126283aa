"""The kinds of networks that hosts of the Forge family compute their steps with, and what each asks of its host."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.call import Call
from ...core.origins import author, origin
from ...core.refusal import Refusal
from ..contract import UNETS, Need, lack_of
from .anima import anima_call, refuse_references
from .call import UNET_PARAMETERS, names_read_by, unet_call
from .krea import krea2_call
from .lumina import z_image_call

UNET = "backend.nn.unet"
ANIMA = "backend.nn.anima"
KREA2 = "backend.nn.krea"
LUMINA = "backend.nn.lumina"
PREFIX = "attention_"
EXACT_ATTENTION = "pytorch"
# Exact too, with scores in float32 where the host wants that.
UPCASTING = {"basic", "split", "sub_quad"}


class HostAttention(NamedTuple):
    """The attention that the user has chosen for a host, which its network calls by a global name.

    functions: the module with a host's attention functions. caller, name: the module and the global name by which
    its UNet calls the chosen one."""

    functions: str
    caller: str
    name: str

    def chosen(self) -> Any:
        """The function that the UNet calls now."""
        return getattr(importlib.import_module(self.caller), self.name)

    @property
    def kind(self) -> str:
        """ "pytorch", "sage", "comfy_kitchen_int8": the name of the chosen one, as far as it tells anything."""
        return str(getattr(self.chosen(), "__name__", "unknown")).removeprefix(PREFIX)

    def unused(self) -> str | None:
        """What people call the attention that the user has chosen for the host, where it may round more than ours."""
        kind = self.kind
        if kind == EXACT_ATTENTION or kind in UPCASTING:
            return None
        return f"{kind} attention".replace("_", " ").capitalize()

    def upcasts(self, dtype: torch.dtype) -> bool:
        """Whether the host computes the UNet's attention scores in float32 when its inputs are of dtype."""
        if self.kind not in UPCASTING:
            return False
        functions = importlib.import_module(self.functions)
        precision = getattr(functions, "get_attn_precision", None)
        if precision is None:
            # Classic has a flag of the module instead.
            return getattr(functions, "_ATTN_PRECISION", None) == "fp32"
        # Forge's takes the wanted precision alone; Neo's and ldm_patched's take the type of the inputs too.
        takes = precision.__code__.co_argcount
        return bool(precision(*(None, dtype)[:takes]) == torch.float32)

    def exactly(self, host: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The host's forward with PyTorch's attention in place of one that may round its inputs, such as to 8 bits."""
        if self.unused() is None:
            return host

        def with_exact_attention() -> Tensor:
            caller, chosen = importlib.import_module(self.caller), self.chosen()
            setattr(caller, self.name, getattr(importlib.import_module(self.functions), PREFIX + EXACT_ATTENTION))
            try:
                return host()
            finally:
                setattr(caller, self.name, chosen)

        return with_exact_attention


@dataclass(frozen=True)
class HostNetwork:
    """A kind of network.

    module, name: of its class. parameters: of its forward, in their order. attention: the function by which it computes
    attention. helpers: other global functions that it calls, each with the module whose code it must be. models: the
    names of the models that have it, for users. refuse: raises Refusal where a call depends on more than its arguments.
    call_of: makes our call of the host's; see unet_call. unrounded: see StoredWeights. prompt: the names of the
    arguments that are Call.prompt, in its order.
    """

    module: str
    name: str
    parameters: tuple[str, ...]
    attention: HostAttention
    helpers: Mapping[str, str]
    models: tuple[str, ...] = UNETS
    refuse: Callable[[], object] = lambda: None
    call_of: Callable[..., Call] = unet_call
    unrounded: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ("context", "y")

    def needs(self) -> tuple[Need, ...]:
        return (
            Need(self.module, f"{self.name}.forward", self.parameters),
            *(Need(self.module, name) for name in self.helpers),
            Need(self.attention.caller, self.attention.name), Need(self.attention.functions, PREFIX + EXACT_ATTENTION),
        )

    @property
    def is_there(self) -> bool:
        """Whether this release has it as we know it."""
        return not any(map(lack_of, self.needs()))

    @cached_property
    def code(self) -> Any:
        """Its module, in a host that has it."""
        return importlib.import_module(self.module)

    @cached_property
    def kind(self) -> type:
        """Its class."""
        found: type = getattr(self.code, self.name)
        return found

    @cached_property
    def names_read(self) -> frozenset[str]:
        """Every name by which it may ask for an option or another argument; those of its forward are among them."""
        return names_read_by(self.code, importlib.import_module(self.attention.functions)) | {*self.parameters}

    def check(self) -> None:
        """Raise Refusal where a call now is not what its arguments say."""
        attention = self.attention
        called = [(name, getattr(self.code, name), owner) for name, owner in self.helpers.items()]
        for name, function, owner in (*called, (attention.name, attention.chosen(), attention.functions)):
            if origin(function) != owner:
                raise Refusal(f"{name} of the WebUI's model was replaced by {author(function)}")
        self.refuse()


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
        ("Anima",), refuse_references, anima_call,
        (".mlp.", "x_embedder.", "final_layer."),
    ),
    HostNetwork(
        KREA2, "SingleStreamDiT", ("x", "timesteps", "context", "attention_mask", "transformer_options"),
        HostAttention("backend.attention", KREA2, "attention_function"),
        {"pad_to_patch_size": "backend.utils", "timestep_embedding": "backend.nn.flux"},
        ("Krea 2",), call_of=krea2_call, prompt=("context",), unrounded=("txtfusion.projector",),
    ),
    HostNetwork(
        LUMINA, "NextDiT", ("x", "timesteps", "context", "num_tokens", "attention_mask", "transformer_options"),
        HostAttention("backend.attention", LUMINA, "attention_function"),
        dict.fromkeys(("pad_to_patch_size", "clamp_fp16"), "backend.utils"), ("Z-Image", "Lumina 2"),
        call_of=z_image_call, prompt=("context",),
    ),
)
