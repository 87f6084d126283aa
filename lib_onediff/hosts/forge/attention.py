"""The attention that the user has chosen for a host of the Forge family, which its UNet calls by a global name."""
from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

PREFIX = "attention_"
EXACT = "pytorch"
# Exact too, with scores in float32 where the host wants that.
UPCASTING = {"basic", "split", "sub_quad"}


class HostAttention(NamedTuple):
    """functions: the module with a host's attention functions. caller, name: the module and the global name by which
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
        return None if kind == EXACT or kind in UPCASTING else f"{kind} attention".replace("_", " ").capitalize()

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
            setattr(caller, self.name, getattr(importlib.import_module(self.functions), PREFIX + EXACT))
            try:
                return host()
            finally:
                setattr(caller, self.name, chosen)

        return with_exact_attention
