"""A call of Forge Neo's SingleStreamDiT (backend.nn.krea), which is Krea 2, as ours."""
from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.call import Call
from ...families.krea2.call import Krea2Call, filled_prompt
from .call import HostCall, transformer_call


def krea2_call(network: Any, given: HostCall, *how: Any) -> Call:
    """As transformer_call. The host has each prompt as long as it is."""

    def call_of(latent: Tensor, timestep: Tensor, context: Tensor, **others: Any) -> Krea2Call:
        return Krea2Call(latent, timestep, *filled_prompt(context), **others)

    return transformer_call(call_of, network, given, *how)
