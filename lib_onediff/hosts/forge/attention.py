"""The attention that the user has chosen for a host of the Forge family, which its UNet calls by a global name."""
from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What hosts and their extensions call an attention function, and what people call it.
ATTENTIONS = {
    "attention_sage": "SageAttention", "attention_sage3": "SageAttention 3", "attention_flash": "FlashAttention",
    "attention_xformers": "xformers",
}
# These round queries and keys to 8 bits or fewer.
APPROXIMATE_ATTENTIONS = {"attention_sage", "attention_sage3"}
EXACT_ATTENTION = "attention_pytorch"
UPCASTING_ATTENTIONS = {"attention_basic", "attention_split", "attention_sub_quad"}


class HostAttention(NamedTuple):
    """functions: the module with a host's attention functions. caller, name: the module and the global name by which
    its UNet calls the chosen one."""

    functions: str
    caller: str
    name: str

    def chosen(self) -> Any:
        """The function that the UNet calls now."""
        return getattr(importlib.import_module(self.caller), self.name)

    def unused(self) -> str | None:
        """What people call the attention that the user has chosen for the host and that we do not use."""
        return ATTENTIONS.get(self.chosen().__name__)

    def upcasts(self, dtype: torch.dtype) -> bool:
        """Whether the host computes the UNet's attention scores in float32 when its inputs are of dtype."""
        if self.chosen().__name__ not in UPCASTING_ATTENTIONS:
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
        """The host's forward with PyTorch's attention in place of one that rounds its inputs to 8 bits."""
        chosen = self.chosen()
        exact = getattr(importlib.import_module(self.functions), EXACT_ATTENTION, None)
        if chosen.__name__ not in APPROXIMATE_ATTENTIONS or exact is None:
            return host

        def with_exact_attention() -> Tensor:
            caller = importlib.import_module(self.caller)
            setattr(caller, self.name, exact)
            try:
                return host()
            finally:
                setattr(caller, self.name, chosen)

        return with_exact_attention
