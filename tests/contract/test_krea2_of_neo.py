"""Forge Neo's Krea 2: its prompts and norms, and what is left to the host. Tests of all transformers of Neo are in
test_transformers_of_neo."""
from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import calls_of, random, running
from left_to_the_host import replace_part
from torch import Tensor, nn
from transformer_hosts import Krea2Host

from lib_onediff.core.refusal import Refusal
from lib_onediff.families.krea2.family import Krea2s
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime


@pytest.fixture
def host(fresh_runtime: None) -> Iterator[Krea2Host]:
    with running("neo", Krea2Host) as made:
        yield made


def test_a_call_whose_tensors_do_not_fit_the_network_is_refused(host: Krea2Host) -> None:
    """Three valid calls are accepted. Each change then gives one tensor of a valid call wrong dimensions, channels,
    dtype or batch size. Without the check, our forward would fail or broadcast. The 80 tokens are 64 of the padded
    prompt and 16 patches of the latent."""
    host.start()
    family = Krea2s()
    layout = FAMILIES.read(host.unet)
    call = family.example(layout, (7, 8), 2, 20, torch.randn)
    mask = torch.ones(2, 64, dtype=torch.bool)
    positions = torch.zeros(1, 64 + 16, 3)
    for given in (call, replace(call, mask=None, positions=positions), replace(call, latent=call.latent[:, :, 0])):
        family.refuse_call(layout, given)
    for change, reason in (
        ({"latent": call.latent[:, :2]}, "latent .*fit"), ({"latent": call.latent[0]}, "latent .*fit"),
        ({"latent": call.latent.expand(-1, -1, 2, -1, -1)}, "one image"),
        ({"context": call.context[..., :5]}, "prompt .*fit"), ({"context": call.context[:1]}, "different batch sizes"),
        ({"mask": mask[:, :5]}, "mask has"), ({"mask": mask.float()}, "mask has"),
        ({"positions": positions[:, 1:]}, "80 tokens"),
    ):
        with pytest.raises(Refusal, match=reason):
            family.refuse_call(layout, replace(call, **change))


def test_a_latent_without_the_dimension_of_frames_is_served(host: Krea2Host) -> None:
    """Krea 2's latents are (batch, channels, frames, height, width). One without frames gets an output without frames,
    close to the host's."""
    latent = host.latent(2, (7, 8), seed=5)[:, :, 0]
    expected = host.output(x=latent)
    host.begin()
    ours, calls = calls_of(lambda: host.output(x=latent))
    assert calls == {"plain": 1} and ours.shape == latent.shape and relative_error(ours, expected) < 1e-5


def test_prompts_of_1_to_64_tokens_share_one_cache_entry(host: Krea2Host) -> None:
    """Our forward pads prompts to multiples of 64 tokens, so that one CUDA graph serves all these lengths. Each output
    is close to the host's."""
    lengths = (64, 1, 20, 63)
    expected = [host.output(tokens=length) for length in lengths]
    host.begin()
    for length, theirs in zip(lengths, expected, strict=True):
        ours, calls = calls_of(partial(host.output, tokens=length))
        assert calls == {"plain": 1} and relative_error(ours, theirs) < 1e-5
    entry, = runtime.table.entries()
    assert entry.uses == len(lengths) and entry.key.tokens == 64


def test_with_float32_norms_and_bfloat16_weights_our_error_is_at_most_that_of_the_host(host: Krea2Host) -> None:
    """Quantized files keep their norms in float32. Both errors are measured against the host's output with all weights
    in float32. Ours may be a tenth larger."""
    network = host.unet.bfloat16()
    network.storage_dtype = network.computation_dtype = torch.bfloat16
    for module in network.modules():
        if type(module).__name__ == "RMSNorm":
            module.float()
    theirs = host.output()
    model = host.checkpoint.forge_objects.unet.model
    model.diffusion_model = copy.deepcopy(network).float()
    exact = host.output()
    model.diffusion_model = network
    host.begin()
    ours, calls = calls_of(host.output)
    assert calls == {"plain": 1}, runtime.status()["reason"]
    assert relative_error(ours.float(), exact) < 1.1 * relative_error(theirs.float(), exact)


def double_result(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Replace a function by one that returns twice its result."""
    function = getattr(owner, name)

    def twice(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        return tuple(2 * one for one in found) if isinstance(found, tuple) else 2 * found

    patch.setitem(vars(owner), name, twice)


# By a part of the reason: what an extension replaces, or an argument of the call that our forward does not read.
CHANGES: dict[str, Callable[[Krea2Host, pytest.MonkeyPatch], object]] = {
    "attention_function": lambda host, patch: double_result(patch, host.code, "attention_function"),
    "pad_to_patch_size": lambda host, patch: double_result(patch, host.code, "pad_to_patch_size"),
    "timestep_embedding": lambda host, patch: double_result(patch, host.code, "timestep_embedding"),
    "apply_rope": lambda host, patch: double_result(patch, host.code, "apply_rope"),
    "blocks.1.attn": lambda host, patch: double_result(patch, host.unet.blocks[1].attn, "forward"),
}
ARGUMENTS: dict[str, Any] = {
    "ref_latents": [random(1, Krea2Host.channels, 1, 8, 8, seed=9)], "attention_mask": torch.ones(2, 20),
    "class labels": random(2, 8),
}


@pytest.mark.parametrize("reason", [*CHANGES, *ARGUMENTS])
def test_only_calls_with_something_that_our_forward_does_not_compute_are_left_to_the_host(
    host: Krea2Host, reason: str
) -> None:
    """The calls have a replaced function of the host (CHANGES) or an argument that our forward does not read
    (ARGUMENTS). Their output is the host's, to the bit; unchanged calls between them are OneDiff's. reason: a key of
    these two, and a part of the reason in the status."""
    def changed() -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if reason in ARGUMENTS:
                return host.output(**{reason if "_" in reason else "y": ARGUMENTS[reason]})
            CHANGES[reason](host, patch)
            return host.output()

    host.check_that_only_changed_calls_run_the_host(changed, reason)


@pytest.mark.parametrize(("reason", "path", "value"), [
    ("approximate is none", "tmlp.1", nn.GELU()), ("expected GELU", "tproj.0", nn.SiLU()),
    ("expected RMSNorm", "blocks.0.prenorm", nn.LayerNorm(64)), ("heads of keys", "blocks.1.attn.kvheads", 4),
    ("such as blocks.0.extra", "blocks.0.extra", nn.Linear(2, 2)),
    ("such as blocks.0.mod.other", "blocks.0.mod.other", nn.Parameter(torch.zeros(1))),
    ("expected a linear layer", "blocks.0.mlp.up", nn.Conv1d(2, 2, 1)),
])
def test_a_network_with_an_unknown_module_or_value_is_refused(
    host: Krea2Host, reason: str, path: str, value: Any
) -> None:
    """Our forward would ignore the difference. value: replaces or adds the module, parameter or attribute at path.
    reason: a part of the refusal."""
    replace_part(host.unet, path, value)
    host.start()
    with pytest.raises(Refusal, match=reason):
        FAMILIES.read(host.unet)
