"""What speaks against serving a call on a host of the Forge family, in one line for the user each."""
from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...model.binding import BOUND_DTYPES, STORED_DTYPES
from ...model.patches import origin, package
from .traits import APPROXIMATE_ATTENTIONS, ATTENTIONS, Traits

EXACT_ATTENTION = "attention_pytorch"
UPCASTING_ATTENTIONS = {"attention_basic", "attention_split", "attention_sub_quad"}


def why_not_unet(unet: nn.Module, original: Any) -> str | None:
    """Why this UNet, as it is loaded now, needs the host's forward. original: what stood as its class's forward."""
    source = origin(original)
    if package(source) != package(type(unet).__module__):
        return f"{type(unet).__name__}.forward was replaced by {source}"
    stored, computed = getattr(unet, "storage_dtype", None), getattr(unet, "computation_dtype", None)
    if stored != computed and not (stored in STORED_DTYPES and computed in BOUND_DTYPES):
        stored, computed = (str(kind).removeprefix("torch.") for kind in (stored, computed))
        return f"the UNet is stored as {stored} and computed in {computed}: the WebUI casts its weights at every call"
    return None


class Helpers:
    """The functions that the host's UNet calls."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits
        self._own: dict[tuple[str, str, str], Any] = {}

    def replaced(self) -> str | None:
        """The one that is not the host's own, in a line for the user; None where all are. Asked at every call."""
        functions = self._traits.helper_functions()
        if functions != self._own:
            for (_, name, owner), function in functions.items():
                source = origin(function)
                if source != owner:
                    return f"{name} of the WebUI's UNet was replaced by {source}"
            self._own = functions
        return None


def replaced_vae_helper(traits: Traits, decoder: Any) -> str | None:
    """The function by which the host's VAE computes attention, when it is not the host's own."""
    function = traits.vae_attention(decoder)
    source = origin(function)
    ours_to_trust = (traits.attention, traits.vae)
    return None if source in ours_to_trust else f"the attention of the WebUI's VAE was replaced by {source}"


def upcasts_attention(traits: Traits, dtype: torch.dtype) -> bool:
    """Whether the host computes the UNet's attention scores in float32 when its inputs are of dtype."""
    if traits.attention_function().__name__ not in UPCASTING_ATTENTIONS:
        return False
    attention = traits.module(traits.attention)
    precision = getattr(attention, "get_attn_precision", None)
    if precision is None:
        # Classic has a flag of the module instead.
        return getattr(attention, "_ATTN_PRECISION", None) == "fp32"
    # Forge's takes the wanted precision alone; Neo's and ldm_patched's take the type of the inputs too.
    takes = precision.__code__.co_argcount
    return precision(*(None, dtype)[:takes]) == torch.float32


def unused_attention(traits: Traits) -> str | None:
    """What people call the attention that the user has chosen for the host and that we do not use."""
    return ATTENTIONS.get(traits.attention_function().__name__)


def with_exact_attention(traits: Traits, host: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The host's forward with PyTorch's attention in place of one that rounds its inputs to 8 bits."""
    chosen = traits.attention_function()
    exact = getattr(traits.module(traits.attention), EXACT_ATTENTION, None)
    if chosen.__name__ not in APPROXIMATE_ATTENTIONS or exact is None:
        return host

    def exactly() -> Tensor:
        user = traits.module(traits.attention_user)
        setattr(user, traits.attention_name, exact)
        try:
            return host()
        finally:
            setattr(user, traits.attention_name, chosen)

    return exactly


def names_read_by(*modules: types.ModuleType) -> frozenset[str]:
    """Every string that the functions of these modules hold as a constant: the keys by which they can read a mapping
    are among them."""
    return frozenset(
        constant for module in modules for function in functions_of(module) for constant in strings_in(function)
    )


def functions_of(module: types.ModuleType) -> Iterator[types.CodeType]:
    """The code of the functions and methods that are written in a module."""
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            member = getattr(member, "__func__", member)
            while hasattr(member, "__wrapped__"):
                member = member.__wrapped__
            code = getattr(member, "__code__", None)
            if code is not None and code.co_filename == getattr(module, "__file__", None):
                yield code


def strings_in(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from (item for item in constant if isinstance(item, str))
        elif isinstance(constant, types.CodeType):
            yield from strings_in(constant)
