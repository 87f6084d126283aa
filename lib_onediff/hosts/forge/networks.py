"""The classes of networks in WebUIs of the Forge family, and the functions of the WebUI that each one uses."""
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

# The Python modules of the classes in NETWORKS.
UNET = "backend.nn.unet"
ANIMA = "backend.nn.anima"
KREA2 = "backend.nn.krea"
LUMINA = "backend.nn.lumina"
# The names of all attention functions begin with this.
PREFIX = "attention_"
# The name, without PREFIX, of an exact attention that every release has.
EXACT_ATTENTION = "pytorch"
# The names, without PREFIX, of exact attentions that compute scores in float32 if the WebUI's options say so.
UPCASTING = {"basic", "split", "sub_quad"}


class HostAttention(NamedTuple):
    """Finds the attention function that the user has chosen for a WebUI, which may change between calls.

    functions: the Python module with the WebUI's attention functions, whose names begin with PREFIX.
    caller: the Python module whose code calls the chosen function.
    name: the global name in caller by which the chosen function is called.
    """

    functions: str
    caller: str
    name: str

    def chosen(self) -> Any:
        """The WebUI's attention function that is chosen now."""
        return getattr(importlib.import_module(self.caller), self.name)

    @property
    def chosen_name(self) -> str:
        """The name of the function that is chosen now, without PREFIX, such as "pytorch", "sage" or
        "comfy_kitchen_int8"; "unknown" if it has no name. Only EXACT_ATTENTION and UPCASTING count as exact."""
        return str(getattr(self.chosen(), "__name__", "unknown")).removeprefix(PREFIX)

    def unused(self) -> str | None:
        """The chosen attention in words for the user ("Sage attention") if it may not be exact: OneDiff computes exact
        attention in its place. None if the chosen attention is exact."""
        kind = self.chosen_name
        if kind == EXACT_ATTENTION or kind in UPCASTING:
            return None
        return f"{kind} attention".replace("_", " ").capitalize()

    def upcasts(self, dtype: torch.dtype) -> bool:
        """Whether the host computes attention scores in float32 for inputs of this dtype, by the chosen function and
        the WebUI's options for the precision of attention."""
        if self.chosen_name not in UPCASTING:
            return False
        functions = importlib.import_module(self.functions)
        precision = getattr(functions, "get_attn_precision", None)
        if precision is None:
            # Classic has a global flag instead.
            return getattr(functions, "_ATTN_PRECISION", None) == "fp32"
        # Forge's function takes only a precision; Neo's and ldm_patched's also take the inputs' dtype.
        takes = precision.__code__.co_argcount
        return bool(precision(*(None, dtype)[:takes]) == torch.float32)

    def exactly(self, host: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The host's forward (host), wrapped so that the WebUI uses PyTorch's attention while the forward runs, in
        every thread, and the chosen attention again afterwards. `host` itself if the chosen attention is exact."""
        if self.unused() is None:
            return host

        def with_exact_attention() -> Tensor:
            caller = importlib.import_module(self.caller)
            chosen = self.chosen()
            setattr(caller, self.name, getattr(importlib.import_module(self.functions), PREFIX + EXACT_ATTENTION))
            try:
                return host()
            finally:
                setattr(caller, self.name, chosen)

        return with_exact_attention


@dataclass(frozen=True)
class HostNetwork:
    """A class of networks of a WebUI; a row of NETWORKS.

    module, name: the Python module and the name of the class.
    parameters: the parameters of its forward, in their order.
    attention: finds the function with which the forward computes attention.
    helpers: other functions that the forward calls, each by its global name in `module`: the Python module in which the
        function must be defined. If it is defined elsewhere, an extension has replaced it, and check() refuses.
    models: the models with such a network, by their names for users.
    refuse: raises Refusal if a call depends now on something besides its arguments, such as a global variable.
    call_of: converts a call to ours, or raises Refusal; takes the arguments of unet_call.
    unrounded: parts of the paths of layers whose inputs have more than three dimensions; see StoredWeights.
    prompt: the forward's arguments for the first tensors of Call.prompt, in the same order. Further tensors of
        Call.prompt, such as Krea 2's mask, are of our Call alone.
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
        """What the WebUI must have so that OneDiff can serve networks of this class; see contract.Need."""
        return (
            Need(self.module, f"{self.name}.forward", self.parameters),
            *(Need(self.module, name) for name in self.helpers),
            Need(self.attention.caller, self.attention.name), Need(self.attention.functions, PREFIX + EXACT_ATTENTION),
        )

    @property
    def is_there(self) -> bool:
        """Whether this release of the WebUI meets all needs(). Imports the Python modules that the needs name."""
        return not any(map(lack_of, self.needs()))

    @cached_property
    def code(self) -> Any:
        """The imported Python module of the class."""
        return importlib.import_module(self.module)

    @cached_property
    def kind(self) -> type:
        """The class itself. Raises an exception if the WebUI does not have it; see is_there."""
        found: type = getattr(self.code, self.name)
        return found

    @cached_property
    def names_read(self) -> frozenset[str]:
        """The parameters of the forward, and all names under which its code may read an entry of transformer_options or
        another argument: see names_read_by. An entry with any other name has no effect on the output."""
        return names_read_by(self.code, importlib.import_module(self.attention.functions)) | {*self.parameters}

    def check(self) -> None:
        """Raise Refusal if an extension has replaced a function that these networks call (helpers, attention), or if a
        call depends now on something besides its arguments (refuse). Called at every call."""
        attention = self.attention
        called = [(name, getattr(self.code, name), owner) for name, owner in self.helpers.items()]
        for name, function, owner in (*called, (attention.name, attention.chosen(), attention.functions)):
            if origin(function) != owner:
                raise Refusal(f"the function {name} of the WebUI's model was replaced by {author(function)}")
        self.refuse()


# The networks of Forge and Forge Neo.
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
