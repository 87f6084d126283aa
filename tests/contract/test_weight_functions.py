"""Our forward computes the functions that WebUIs of the Forge family apply to weights at each use, and casts weights
that are stored in another dtype. The results are compared with the WebUI's own."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import Host, calls_of, random
from test_generations import OURS, close, same
from torch import Tensor, nn

from lib_onediff.core.layer_weights import RANKS
from lib_onediff.hosts.forge.weight_functions import LayerFunctions
from lib_onediff.runtime.network import Network
from lib_onediff.runtime.runtime import runtime

# Classic merges every LoRA.
family = pytest.mark.parametrize("host", ["forge", "neo", "reforge"], indirect=True)
BLOCK = "input_blocks.3.1.transformer_blocks.0"
LINEAR = (
    f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn1.to_v", f"{BLOCK}.attn1.to_out.0", f"{BLOCK}.attn2.to_q",
    f"{BLOCK}.attn2.to_k", f"{BLOCK}.ff.net.0.proj", f"{BLOCK}.ff.net.2", "time_embed.0",
    "input_blocks.1.0.emb_layers.1", "output_blocks.0.0.emb_layers.1",
)
CONVOLUTIONS = (
    "input_blocks.3.1.proj_in", "input_blocks.1.0.in_layers.2", "input_blocks.1.0.out_layers.3", "input_blocks.2.0.op",
    "output_blocks.0.0.skip_connection", "input_blocks.0.0", "out.2",
)


def weight_of(host: Host, path: str) -> Tensor:
    return host.unet.get_submodule(path).weight


def lora(host: Host, paths: tuple[str, ...], rank: int = 3, seed: int = 0) -> dict[str, Any]:
    """The patches of a LoRA for these layers: random numbers, large enough to change the image."""
    patches: dict[str, Any] = {}
    for number, path in enumerate(paths, 2 * seed):
        out, *into = weight_of(host, path).shape
        up = 0.3 * random(out, rank, *(1 for _ in into[1:]), seed=number)
        down = 0.3 * random(rank, *into, seed=-1 - number)
        patches[f"{path}.weight"] = ("lora", (up, down, 2.0 * rank, None, None))
    return patches


def loha(host: Host, paths: tuple[str, ...], rank: int = 2) -> dict[str, Any]:
    """The patches of a LoHa, which our forward applies to copies of the weights."""
    patches: dict[str, Any] = {}
    for path in paths:
        weight = weight_of(host, path)
        width = weight[0].numel()
        parts = [0.5 * random(*shape, seed=seed) for seed, shape in enumerate(
            ((len(weight), rank), (rank, width)) * 2
        )]
        patches[f"{path}.weight"] = ("loha", parts)
    return patches


def differences(host: Host, names: tuple[str, ...]) -> dict[str, Any]:
    """Patches that add random numbers to these parameters."""
    return {name: (0.2 * random(*host.unet.get_parameter(name).shape, seed=3),) for name in names}


def network(host: Host) -> Network:
    """The runtime's Network of the WebUI's UNet."""
    found = runtime.services.networks.get(host.unet)
    assert found is not None
    return found


def expected_of(host: Host, *sequence: tuple[Any, ...]) -> list[Any]:
    """The WebUI's own results with each of these sets of LoRAs."""
    made = []
    for loras in sequence:
        host.set_loras(*loras)
        made.append(host.generate())
    return made


@family
def test_loras_on_the_fly_are_computed_beside_their_layers_without_copies_of_weights(host: Host) -> None:
    """LoRAs on the fly are those that the WebUI applies at each use of a weight. Our images are close to the WebUI's
    with the same LoRAs. After the LoRAs are removed, our first image is reproduced bit for bit. After OneDiff is
    switched off, the WebUI reproduces its own images bit for bit."""
    one = lora(host, (*LINEAR, *CONVOLUTIONS))
    two = lora(host, LINEAR[:6], rank=2, seed=7)
    sequence = ((), ((one, 0.5),), ((one, 0.25),), ((one, 0.5), (two, 0.8)), ((two, 0.8),), ())
    expected = expected_of(host, *sequence)
    for index, other in enumerate(expected[:4]):
        assert relative_error(other.latent, expected[index + 1].latent) > 1e-2
    host.start()
    mine = []
    for loras, hosts in zip(sequence, expected, strict=True):
        host.set_loras(*loras)
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, hosts), runtime.status()["reason"]
        kinds = ("LoRA on the fly",) if loras else ()
        assert network(host).weight_marks == kinds
        # There is no copy of a weight, only of up and down.
        floats = sum(part.numel() for patches, _ in loras for _, parts in patches.values() for part in parts[:2])
        # Ranks are padded to multiples of RANKS.
        assert 4 * floats <= network(host).bound.on_the_fly.bytes <= 4 * floats * RANKS / 2
        mine.append(made)
    assert torch.equal(mine[0].latent, mine[-1].latent)
    host.switch(False)
    host.set_loras()
    assert same(host.generate(), expected[0])
    host.set_loras((one, 0.5))
    assert same(host.generate(), expected[1])


@pytest.mark.parametrize("host", ["neo"], indirect=True)
def test_a_lora_strength_that_changes_between_two_steps_takes_effect_at_once(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forge Neo's syntax <lora:x:[1@0,0.25@0.5]> changes the strength during a sampling. Here it is 1 at the first UNet
    call and 0.25 at the second. The image is compared with the WebUI's."""
    model = host.checkpoint.forge_objects.unet.model
    patches = lora(host, (*LINEAR, *CONVOLUTIONS))
    apply = model.apply_model

    def at_its_strength(x: Tensor, t: Tensor, **named: Any) -> Tensor:
        for layer in host.unet.modules():
            for function in layer.__dict__.get("weight_function") or ():
                function.patch[0][0] = 1.0 if t[0] > 5 else 0.25
        return apply(x, t, **named)

    unscheduled, = expected_of(host, ((patches, 1.0),))
    monkeypatch.setattr(model, "apply_model", at_its_strength)
    expected, = expected_of(host, ((patches, 1.0),))
    assert relative_error(unscheduled.latent, expected.latent) > 1e-2
    host.start()
    for _ in range(2):
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, expected), runtime.status()["reason"]
    assert not network(host).bound.on_the_fly.copies


@family
def test_a_loha_and_weight_differences_are_applied_once_for_all_steps(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike a LoRA, a LoHa and differences (numbers added to weights, norms and biases) cannot be computed beside the
    layer: our forward applies them to copies of the weights. Each layer's weight functions are read at most once in a
    generation of two UNet calls. Images are compared with the WebUI's."""
    read: list[nn.Module] = []
    of = LayerFunctions.of
    monkeypatch.setattr(LayerFunctions, "of", lambda self, layer: read.append(layer) or of(self, layer))
    names = (f"{BLOCK}.attn1.to_k.weight", f"{BLOCK}.norm1.weight", f"{BLOCK}.norm2.bias", "out.0.weight",
             "input_blocks.1.0.in_layers.2.bias", f"{BLOCK}.ff.net.0.proj.bias", "out.2.weight")
    other = {**loha(host, (f"{BLOCK}.attn1.to_q", "input_blocks.1.0.in_layers.2")), **differences(host, names)}
    plain = lora(host, (*LINEAR[:3], *CONVOLUTIONS[:1]))
    sequence = ((), ((other, 0.5),), ((other, 0.5), (plain, 0.5)), ((plain, 0.5),), ())
    expected = expected_of(host, *sequence)
    host.start()
    for loras, hosts in zip(sequence, expected, strict=True):
        host.set_loras(*loras)
        read.clear()
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, hosts), runtime.status()["reason"]
        assert bool(read) == bool(loras), len(read)
        assert len(read) == len(set(read)), "a layer's functions were read again for the second call"
    host.switch(False)
    assert same(host.generate(), expected[-1])


@pytest.mark.parametrize("host", ["neo", "reforge"], indirect=True)
def test_a_weight_function_of_another_extension_is_called_at_every_step(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of such a function may depend on anything. Here it depends on a variable that differs between the two
    UNet calls of a generation. Images are compared with the WebUI's."""
    factor = 1.0
    factors = (1.0, 1.0)
    plain = host.generate()
    expected = {}
    patcher = host.checkpoint.forge_objects.unet
    patcher.take_off = lambda layer: None
    host.checkpoint.forge_objects_after_applying_lora.unet = patcher
    host.unet.get_submodule(LINEAR[0]).weight_function = [lambda weight: factor * weight]
    apply = patcher.model.apply_model

    def with_the_factor_of_its_step(x: Tensor, t: Tensor, **named: Any) -> Tensor:
        nonlocal factor
        factor = factors[0 if t[0] > 5 else 1]
        return apply(x, t, **named)

    monkeypatch.setattr(patcher.model, "apply_model", with_the_factor_of_its_step)
    for factors in ((1.0, 1.0), (1.5, 1.5), (1.5, 2.0), (2.0, 1.0)):
        expected[factors] = host.generate()
    assert same(expected[1.0, 1.0], plain)
    assert relative_error(expected[2.0, 1.0].latent, plain.latent) > 1e-3
    assert relative_error(expected[1.5, 2.0].latent, expected[1.5, 1.5].latent) > 1e-3
    host.start()
    for factors in ((1.5, 2.0), (2.0, 1.0), (1.5, 1.5), (1.5, 2.0), (1.0, 1.0)):
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, expected[factors]), runtime.status()["reason"]


@family
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16], ids=str)
def test_weights_stored_in_another_dtype_are_cast_at_each_use_and_not_copied(host: Host, dtype: torch.dtype) -> None:
    """dtype: in which the WebUI stores the weights. LoRAs and a LoHa are applied too. Our images are close to the
    WebUI's. After OneDiff is switched off, the WebUI's image and the stored weights are unchanged, bit for bit."""
    host.store_as(dtype)
    plain = lora(host, (*LINEAR, *CONVOLUTIONS))
    other = loha(host, (f"{BLOCK}.attn1.to_q",))
    sequence = ((), ((plain, 0.5),), ((plain, 0.5), (other, 0.5)), ())
    expected = expected_of(host, *sequence)
    before = {name: parameter.clone() for name, parameter in host.unet.named_parameters()}
    host.start()
    for loras, hosts in zip(sequence, expected, strict=True):
        host.set_loras(*loras)
        made, calls = calls_of(host.generate)
        assert calls == OURS and close(made, hosts), runtime.status()["reason"]
        assert f"weights stored as {str(dtype).removeprefix('torch.')}" in network(host).weight_marks
    # Only biases and norms are kept in the dtype computed in.
    vectors = sum(4 * parameter.numel() for parameter in host.unet.parameters() if parameter.dim() == 1)
    assert network(host).bound.on_the_fly.bytes == vectors
    assert all(parameter.dtype == dtype for parameter in host.unet.parameters())
    host.switch(False)
    assert same(host.generate(), expected[-1])
    for name, parameter in host.unet.named_parameters():
        assert torch.equal(before[name].view(torch.uint8), parameter.view(torch.uint8)), name
