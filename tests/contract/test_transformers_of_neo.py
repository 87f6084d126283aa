"""Neo's transformers: their calls are ours, and their images the host's."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import calls_of, running
from test_forge_family import load
from test_generations import OURS, attributes, close, same
from test_weight_functions import lora
from torch import Tensor
from transformer_hosts import AnimaHost, Krea2Host, Lumina2Host, TransformerHost, ZImageHost

from lib_onediff.core.call import Cut, CutMemory
from lib_onediff.core.layer_weights import LayerWeights, Weights
from lib_onediff.core.leaves import Block
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.torch import operators
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.binding import Binding, shares_storage
from lib_onediff.weights.low_bit import every_low_bit_layer

HOSTS = (AnimaHost, Krea2Host, ZImageHost, Lumina2Host)
SIZES = [((8, 8), 2, 20), ((17, 23), 1, 20), ((17, 23), 3, 512), ((6, 32), 2, 601), ((32, 6), 1, 1)]
# Of a call with 77 tokens, and with more.
WARMED_TOKENS = (77, 601)


@pytest.fixture(params=HOSTS, ids=lambda kind: kind.model)
def host(fresh_runtime: None, request: pytest.FixtureRequest) -> Iterator[TransformerHost]:
    with running("neo", request.param) as made:
        yield made


def test_the_forward_is_the_hosts(host: TransformerHost) -> None:
    expected = [host.output(*size) for size in SIZES]
    host.begin()
    for size, theirs in zip(SIZES, expected, strict=True):
        ours, calls = calls_of(partial(host.output, *size))
        assert calls == {"plain": 1} and relative_error(ours, theirs) < 1e-5, runtime.status()["reason"]


def test_an_edit_of_any_parameter_counts_at_the_next_call(host: TransformerHost) -> None:
    host.begin()
    before = host.output()
    names = [name for name, _ in host.unet.named_parameters()]
    for name in names[::7]:
        with torch.inference_mode(host.unet.get_parameter(name).is_inference()), torch.no_grad():
            host.unet.get_parameter(name).mul_(1.5).add_(0.02)
        ours, calls = calls_of(host.output)
        assert calls == {"plain": 1}, runtime.status()["reason"]
        assert relative_error(ours, host.own_output()) < 1e-5 and not torch.equal(ours, before), name
        before = ours


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_a_half_type_it_is_as_near_to_float32_as_the_hosts(host: TransformerHost, dtype: torch.dtype) -> None:
    network = host.unet.to(dtype)
    network.storage_dtype = network.computation_dtype = dtype
    # So that the residual is much larger than what is added to it, and its rounding shows.
    network.get_submodule(host.loras_on[0]).weight.data *= host.residual_scale
    theirs = host.output((17, 23))
    host.checkpoint.forge_objects.unet.model.diffusion_model = copy.deepcopy(network).float()
    exact = host.output((17, 23))
    host.checkpoint.forge_objects.unet.model.diffusion_model = network
    host.begin()
    ours, calls = calls_of(lambda: host.output((17, 23)))
    assert calls == {"plain": 1} and ours.dtype == dtype, runtime.status()["reason"]
    assert relative_error(ours.float(), exact) < 1.1 * relative_error(theirs.float(), exact)


@pytest.mark.parametrize(("online", "stored"), [
    (True, torch.float32), (False, torch.float32), (True, torch.float16), (True, torch.bfloat16),
], ids=str)
def test_loras_on_every_kind_of_layer(host: TransformerHost, online: bool, stored: torch.dtype) -> None:
    """stored: the type of the weights, which are computed in float32."""
    if stored != torch.float32:
        host.store_as(stored)
    one = lora(host, host.loras_on)
    two = lora(host, host.loras_on[1:9], rank=2, seed=7)
    sequence: Any = ((), ((one, 0.5),), ((one, 0.25),), ((one, 0.25), (two, 0.8)), ())
    expected = []
    made = []
    for loras in sequence:
        host.set_loras(*loras, online=online)
        expected.append(host.generate())
    for index, theirs in enumerate(expected[:-1]):
        assert relative_error(theirs.latent, expected[index + 1].latent) > 1e-2
    host.start()
    for number, loras in enumerate(sequence):
        host.set_loras(*loras, online=online)
        ours, calls = calls_of(host.generate)
        assert calls == OURS and close(ours, expected[number]), runtime.status()["reason"]
        made.append(ours)
    assert same(made[0], made[-1])


def test_functions_that_a_transformer_never_calls_change_nothing(host: TransformerHost) -> None:
    def merged(*given: Any) -> Any:
        raise AssertionError("nobody calls this")

    # As the option "Token merging ratio" puts them there for every model.
    options = {"patches": {"attn1_patch": [merged], "attn1_output_patch": [merged]}}
    expected = host.output(options=options)
    host.begin()
    for _ in range(2):
        ours, calls = calls_of(lambda: host.output(options=options))
        assert calls == {"plain": 1} and relative_error(ours, expected) < 1e-5, runtime.status()["reason"]


@pytest.mark.parametrize("host", [Krea2Host, ZImageHost, Lumina2Host], ids=lambda kind: kind.model, indirect=True)
def test_a_prompt_with_a_dimension_too_many_fails_as_in_the_host(host: TransformerHost) -> None:
    context = host.context(2, 20, seed=4).unflatten(1, (2, 10))
    with pytest.raises(Exception) as theirs:
        host.output(context=context)
    host.begin()
    with pytest.raises(theirs.type) as ours:
        host.output(context=context)
    assert str(ours.value) == str(theirs.value)
    assert "the prompt is (2, 2, 10" in runtime.status()["reason"]


def test_a_unet_after_a_transformer_and_back(host: TransformerHost) -> None:
    expected = {}
    for host.is_transformer in (False, True):
        host.checkpoint = host.make()
        expected[host.is_transformer] = host.generate()
    adapter = host.start()
    for host.is_transformer in (False, True, False, True):
        load(host, host.make())
        ours, calls = calls_of(host.generate)
        assert calls == OURS and close(ours, expected[host.is_transformer]), runtime.status()["reason"]
        assert (adapter.model_name() == host.model) is host.is_transformer and adapter.why_not_served() is None


def test_nothing_is_left_of_us(host: TransformerHost) -> None:
    kind = host.network_class
    expected = host.generate()
    names = attributes(host)
    forward = kind.forward
    before = {name: (tensor, tensor.clone()) for name, tensor in host.unet.state_dict(keep_vars=True).items()}
    adapter = host.start()
    assert calls_of(host.generate)[1] == OURS and kind.forward is not forward
    assert any(shares_storage(tensor) for tensor in host.unet.parameters())
    adapter.stop()
    assert kind.forward is forward and attributes(host) == names
    for name, tensor in host.unet.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1]) and not shares_storage(tensor), name
    made, calls = calls_of(host.generate)
    assert calls == {} and same(made, expected)


@pytest.mark.parametrize("tokens", WARMED_TOKENS)
def test_warming_makes_the_shape_of_the_call_to_come(host: TransformerHost, tokens: int) -> None:
    host.start().warm(96, 64, 2, tokens)
    warmed, = runtime.table.entries()
    assert calls_of(lambda: host.output((8, 12), 2, host.warmed_for(tokens)))[1] == {"plain": 1}
    assert runtime.table.entries() == [warmed] and warmed.uses == 2


class Read(dict[str, LayerWeights]):
    """Weights that note what is read of them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> LayerWeights:
        self.names.append(name)
        return super().__getitem__(name)


def bound(host: TransformerHost) -> Binding:
    binding = Binding(host.unet, FAMILIES.read(host.unet))
    binding.bind()
    return binding


def test_layers_are_read_unit_by_unit_and_those_of_a_block_may_be_in_eight_bits(host: TransformerHost) -> None:
    binding = bound(host)
    layout = binding.layout
    family = FAMILIES.of(layout)
    call = family.example(layout, (8, 8), 2, 77, torch.randn)
    units = family.units(layout, call)
    read = Read(binding.weights())
    unit_of = {name: number for number, names in enumerate(units) for name in names}
    assert sorted(name for names in units for name in names) == sorted(binding.groups)
    family.output(layout, read, operators, call)
    assert set(read.names) == set(unit_of)
    order = [unit_of[name] for name in read.names if name != layout.patches.path]
    assert order == sorted(order)
    classes = [one.layer_class for one in every_low_bit_layer(layout)]
    assert len(set(classes)) == host.low_bit_classes
    assert len(classes) == host.low_bit_classes * sum(bool(block.token_layers) for block in layout.layers(Block))


def test_cut_in_two_it_repeats_the_others_change_and_reads_the_first_blocks_alone(host: TransformerHost) -> None:
    binding = bound(host)
    layout = binding.layout
    family = FAMILIES.of(layout)
    call = family.example(layout, (8, 8), 2, 77, torch.randn)
    expected = family.output(layout, binding.weights(), operators, call)
    memory = CutMemory()
    assert family.deepest(layout) == len(layout.blocks) - 1
    for reads in (False, True):
        cut = replace(call, cut=Cut(1, reads, memory))
        read = Read(binding.weights())
        assert relative_error(family.output(layout, read, operators, cut), expected) < 1e-6
        assert set(read.names) == {name for names in family.units(layout, cut) for name in names}


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_our_kernels_compute_the_same_and_leave_the_inputs_alone(host: TransformerHost) -> None:
    binding = bound(host)
    layout = binding.layout
    family = FAMILIES.of(layout)
    call = family.example(layout, (5, 6), 2, 77, torch.randn)
    inputs = {name: getattr(call, name) for name in ("context", "mask") if getattr(call, name, None) is not None}
    call = replace(call, **{name: tensor[:, :20].contiguous() for name, tensor in inputs.items()})
    kept = replace(call, context=call.context.clone(), latent=call.latent.clone())  # type: ignore[call-arg, attr-defined]
    ours: Tensor = family.output(layout, binding.weights(), NativeOperators(), call)
    expected = family.output(layout, binding.weights(), operators, kept)
    assert relative_error(ours, expected) < 1e-5
    assert torch.equal(call.latent, kept.latent) and all(map(torch.equal, call.prompt, kept.prompt))
