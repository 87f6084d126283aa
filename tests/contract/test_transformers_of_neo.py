"""OneDiff computes Forge Neo's transformers: the outputs are close to those of the host's own forward, also with LoRAs
and after edits of weights. The host is a stand-in for Neo with small random networks."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from bound_network import BoundNetwork
from builders import relative_error
from contract_hosts import calls_of, running
from test_forge_family import load
from test_generations import OURS, attributes, close, same
from test_weight_functions import lora
from transformer_hosts import AnimaHost, Krea2Host, Lumina2Host, TransformerHost, ZImageHost

from lib_onediff.core.call import Cut, CutMemory
from lib_onediff.core.leaves import Block
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.joining import shares_storage
from lib_onediff.weights.low_bit import every_low_bit_layer

HOSTS = (AnimaHost, Krea2Host, ZImageHost, Lumina2Host)
# Latent height and width, batch, and tokens of the prompt.
SIZES = [((8, 8), 2, 20), ((17, 23), 1, 20), ((17, 23), 3, 512), ((6, 32), 2, 601), ((32, 6), 1, 1)]
# Lengths of prompts to pre-warm, in tokens: one chunk of 77, and more.
WARMED_TOKENS = (77, 601)


@pytest.fixture(params=HOSTS, ids=lambda kind: kind.model)
def host(fresh_runtime: None, request: pytest.FixtureRequest) -> Iterator[TransformerHost]:
    """A stand-in for Neo with one of the transformers. OneDiff is off until begin() or start()."""
    with running("neo", request.param) as made:
        yield made


def test_our_output_is_close_to_the_host_output_at_every_size(host: TransformerHost) -> None:
    """SIZES has odd sizes, several batches, and prompts of 1 to 601 tokens."""
    expected = [host.output(*size) for size in SIZES]
    host.begin()
    for size, theirs in zip(SIZES, expected, strict=True):
        ours, calls = calls_of(partial(host.output, *size))
        assert calls == {"plain": 1} and relative_error(ours, theirs) < 1e-5, runtime.status()["reason"]


def test_an_edit_of_any_parameter_in_place_takes_effect_at_the_next_call(host: TransformerHost) -> None:
    """After each edit, our output is close to own_output(), that of the host's forward with the same edits, and differs
    from the one before. To save time, only every seventh parameter is edited."""
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
def test_in_half_precision_our_error_is_at_most_a_tenth_larger_than_that_of_the_host(
    host: TransformerHost, dtype: torch.dtype
) -> None:
    """Both errors are against exact, the host's output with the same weights in float32."""
    network = host.unet.to(dtype)
    network.storage_dtype = network.computation_dtype = dtype
    # Makes the residual much larger than what is added to it, so that its rounding changes the output.
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
def test_our_images_with_loras_on_every_kind_of_layer_are_close_to_those_of_the_host(
    host: TransformerHost, online: bool, stored: torch.dtype
) -> None:
    """Images with several LoRAs are made in turn. The last image has no LoRA, as the first, and equals it bit for bit.
    online: whether the LoRAs are computed at each use; otherwise the host merges them into the weights. stored: the
    dtype in which the weights are stored; products are in float32."""
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


def test_unet_patches_in_the_transformer_options_are_ignored_as_by_the_host(host: TransformerHost) -> None:
    """Our output with the patches is close to the host's. A call of a patch would raise AssertionError."""
    def merge_tokens(*given: Any) -> Any:
        raise AssertionError("a transformer never calls this")

    # The WebUI's option "Token merging ratio" sets these for every model.
    options = {"patches": {"attn1_patch": [merge_tokens], "attn1_output_patch": [merge_tokens]}}
    expected = host.output(options=options)
    host.begin()
    for _ in range(2):
        ours, calls = calls_of(lambda: host.output(options=options))
        assert calls == {"plain": 1} and relative_error(ours, expected) < 1e-5, runtime.status()["reason"]


@pytest.mark.parametrize("host", [Krea2Host, ZImageHost, Lumina2Host], ids=lambda kind: kind.model, indirect=True)
def test_a_prompt_with_one_dimension_too_many_raises_the_same_error_as_without_onediff(host: TransformerHost) -> None:
    """The 20 tokens are split into two dimensions, (2, 10). The reason in the status contains the prompt's shape."""
    context = host.context(2, 20, seed=4).unflatten(1, (2, 10))
    with pytest.raises(Exception) as theirs:
        host.output(context=context)
    host.begin()
    with pytest.raises(theirs.type) as ours:
        host.output(context=context)
    assert str(ours.value) == str(theirs.value)
    assert "(2, 2, 10" in runtime.status()["reason"]


def test_unets_and_transformers_are_served_in_turn(host: TransformerHost) -> None:
    """Checkpoints of both kinds are loaded in turn. OneDiff computes each, and each image is close to the host's.
    host.is_transformer: whether host.make() makes a transformer; otherwise a UNet."""
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


def test_stopping_restores_the_forward_the_attributes_and_the_weights_of_the_host(host: TransformerHost) -> None:
    """While OneDiff is on, weights that it multiplies in one product share memory. After adapter.stop(), every weight
    is the same tensor with the same values in memory of its own, and the image equals the host's bit for bit."""
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
def test_a_call_of_a_pre_warmed_shape_adds_no_entry_to_the_table(host: TransformerHost, tokens: int) -> None:
    """The table has an entry for each shape of calls that OneDiff has prepared; here the image size and the prompt
    length. The call uses the prepared entry. tokens: the prompt length that pre-warming is asked for.
    warmed_for(tokens): the length of a prompt whose call has the prepared shape. The two differ where prompts are
    padded."""
    host.start().warm(96, 64, 2, tokens)
    warmed, = runtime.table.entries()
    assert calls_of(lambda: host.output((8, 12), 2, host.warmed_for(tokens)))[1] == {"plain": 1}
    assert runtime.table.entries() == [warmed] and warmed.uses == 2


def test_our_forward_reads_the_weights_unit_by_unit(host: TransformerHost) -> None:
    """family.units() lists every weight once, in units in the order in which the forward reads them. In this order,
    streaming copies weights to the GPU that do not fit on it."""
    bound = BoundNetwork(host.unet)
    call = bound.example()
    units = bound.family.units(bound.layout, call)
    assert sorted(name for names in units for name in names) == sorted(bound.binding.groups)
    bound.output(call)
    bound.check_reads(call)


def test_low_bit_offers_eight_bits_for_the_same_layers_of_every_block_and_for_no_others(host: TransformerHost) -> None:
    """A layer's class is its place in a block. The layers that every_low_bit_layer() lists have low_bit_classes
    classes, and are as many as if each block with token layers had one of each class."""
    layout = BoundNetwork(host.unet).layout
    classes = [one.layer_class for one in every_low_bit_layer(layout)]
    assert len(set(classes)) == host.low_bit_classes
    assert len(classes) == host.low_bit_classes * sum(bool(block.token_layers) for block in layout.layers(Block))


def test_a_cached_step_repeats_the_full_one_and_reads_only_the_units_that_it_computes(host: TransformerHost) -> None:
    """With a cut after the first block, a full step (reads=False) keeps what the later blocks add to the residual, and
    a cached step (reads=True) adds it again instead of computing these blocks. With the same inputs, the outputs of
    both are close to the output without a cut."""
    bound = BoundNetwork(host.unet)
    call = bound.example()
    expected = bound.output(call)
    memory = CutMemory()
    assert bound.family.deepest(bound.layout) == len(bound.layout.blocks) - 1
    for reads in (False, True):
        cut = replace(call, cut=Cut(1, reads, memory))
        assert relative_error(bound.output(cut), expected) < 1e-6
        bound.check_reads(cut)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_our_forward_with_triton_kernels_is_close_to_that_with_torch_and_keeps_its_inputs(
    host: TransformerHost
) -> None:
    """Without a GPU, Triton's interpreter runs the kernels. kept: a copy of the call from before, whose tensors the
    call must still equal."""
    bound = BoundNetwork(host.unet)
    call = bound.example((5, 6))
    inputs = {name: getattr(call, name) for name in ("context", "mask") if getattr(call, name, None) is not None}
    call = replace(call, **{name: tensor[:, :20].contiguous() for name, tensor in inputs.items()})
    kept = replace(call, context=call.context.clone(), latent=call.latent.clone())
    ours = bound.output(call, NativeOperators())
    assert relative_error(ours, bound.output(kept)) < 1e-5
    assert torch.equal(call.latent, kept.latent) and all(map(torch.equal, call.prompt, kept.prompt))
