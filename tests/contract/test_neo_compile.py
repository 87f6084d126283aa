"""Forge Neo's Torch Compile on a UNet that OneDiff serves: torch.compile does not trace OneDiff's code."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from builders import CONTEXT_WIDTH, relative_error
from contract_hosts import Host, calls_of, random
from test_torch_compile import Traced

from lib_onediff.runtime.runtime import runtime


@pytest.mark.parametrize("host", ["neo"], indirect=True)
def test_torch_compile_traces_no_code_of_ours(host: Host) -> None:
    """Traced is a backend of torch.compile that counts the operators it gets: none from a UNet that OneDiff serves.
    From the UNet's layer time_embed, which OneDiff does not hook, it gets three: tracing itself works."""
    torch._dynamo.reset()
    x = random(2, 4, 8, 8)
    t = torch.full((2,), 500.0)
    context = random(2, 77, CONTEXT_WIDTH)
    arguments: Any = {"context": context, "control": None, "transformer_options": {}}
    traced = Traced()
    try:
        with torch.inference_mode():
            expected = host.unet(x, t, **arguments)
            host.begin()
            compiled = torch.compile(host.unet, backend=traced)
            for _ in range(2):
                output, calls = calls_of(lambda: compiled(x, t, **arguments))
                assert calls == {"plain": 1} and relative_error(output, expected) < 1e-5
            assert traced.operators == 0 and runtime.guard.faults == []
            torch.compile(host.unet.time_embed, backend=traced)(random(2, 32))
        assert traced.operators == 3, "otherwise the count above would prove nothing"
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("host", ["neo"], indirect=True)
def test_users_read_a_note_that_torch_compile_has_no_effect_while_onediff_is_on(host: Host) -> None:
    """The adapter's notes are empty before Neo's option Torch Compile is set on the model."""
    adapter = host.start()
    assert adapter.notes() == []
    host.checkpoint.forge_objects.unet.model._torch_compile_config = {}
    assert len(adapter.notes()) == 1 and "Torch Compile" in adapter.notes()[0]
