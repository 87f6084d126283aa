"""Neo's Anima: its calls are ours and its images the host's; what only the host knows is the host's."""
from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, randomise, relative_error
from contract_hosts import FamilyHost, calls_of, random, running
from test_forge_family import load
from test_generations import OURS, attributes, close, same
from test_weight_functions import lora
from torch import Tensor, nn
from torch.nn import functional

from lib_onediff.core.layer_weights import LayerWeights, Weights
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.cuda.kernels.operators import NativeOperators
from lib_onediff.devices.torch import operators
from lib_onediff.families.anima.family import FEWEST_TOKENS, Animas
from lib_onediff.families.registry import FAMILIES
from lib_onediff.hosts.forge.call import HostCall, anima_call
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.binding import Binding, shares_storage
from lib_onediff.weights.low_bit import every_low_bit_layer

CHANNELS = 4
WIDTH = 64
LAYERS = (
    "x_embedder.proj.1", "t_embedder.1.linear_2", "final_layer.adaln_modulation.1", "final_layer.adaln_modulation.2",
    *(f"blocks.1.adaln_modulation_{place}.{layer}" for place in ("self_attn", "cross_attn", "mlp") for layer in (1, 2)),
    "blocks.0.self_attn.q_proj", "blocks.0.self_attn.v_proj", "blocks.1.cross_attn.q_proj",
    "blocks.1.cross_attn.k_proj", "blocks.0.self_attn.output_proj", "blocks.1.mlp.layer1", "blocks.0.mlp.layer2",
)


class AnimaHost(FamilyHost):
    """is_anima: whether the checkpoints that it loads are."""

    is_anima = True

    def new_unet(self, **config: Any) -> Any:
        if not self.is_anima:
            return super().new_unet(**config)
        return randomise(self.code.Anima(CHANNELS, WIDTH, CONTEXT_WIDTH, heads=2, rank=16, blocks=2))

    @property
    def code(self) -> Any:
        return self.module("backend.nn.anima")

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        image, context = super().noise_and_prompts()
        if not self.is_anima:
            return image, context
        return image.unsqueeze(2), functional.pad(context, (0, 0, 0, FEWEST_TOKENS - context.shape[1])).unsqueeze(1)

    def output(
        self, size: tuple[int, int] = (8, 8), batch: int = 2, tokens: int = 20, frames: int = 1,
        options: dict[str, Any] | None = None, **others: Any,
    ) -> Tensor:
        """Of one call of the network. options: its transformer_options."""
        dtype = self.unet.final_layer.linear.weight.dtype
        latent = random(batch, CHANNELS, frames, *size, seed=3).to(dtype)
        context = random(batch, 1, tokens, CONTEXT_WIDTH, seed=4).to(dtype)
        with torch.inference_mode():
            return self.unet(
                latent, torch.linspace(0.9, 0.2, batch), context=context, control=None,
                transformer_options=options or {}, **others,
            )


@pytest.fixture
def host(fresh_runtime: None) -> Iterator[AnimaHost]:
    with running("neo", AnimaHost) as made:
        yield made


def test_inputs_of_another_network_are_refused(host: AnimaHost) -> None:
    family = Animas()
    layout = FAMILIES.read(host.unet)
    call = family.example(layout, (8, 8), 2, 20, torch.randn)
    family.refuse_call(layout, call)
    for change, reason in (
        ({"latent": call.latent[:, :, 0]}, "the latent is"), ({"latent": call.latent[:, :2]}, "the latent is"),
        ({"context": call.context[..., :5]}, "the prompt is"), ({"context": call.context[:1]}, "different batches"),
    ):
        with pytest.raises(Refusal, match=reason):
            family.refuse_call(layout, replace(call, **change))
    given = HostCall(call.latent, call.timestep, call.context, call.timestep, None, {}, {})
    with pytest.raises(Refusal, match="no label"):
        anima_call(host.unet, given, False, ())


CALLS = [((8, 8), 2, 20), ((17, 23), 1, 20), ((17, 23), 3, 512), ((6, 32), 2, 601), ((32, 6), 1, 1)]


def test_the_forward_is_the_hosts(host: AnimaHost) -> None:
    expected = [host.output(*call) for call in CALLS]
    host.begin()
    for call, theirs in zip(CALLS, expected, strict=True):
        ours, calls = calls_of(partial(host.output, *call))
        assert calls == {"plain": 1} and relative_error(ours, theirs) < 1e-5, runtime.status()["reason"]


def test_norms_by_one_plus_their_weight_are_the_hosts(host: AnimaHost) -> None:
    theirs = host.output()
    for module in host.unet.modules():
        if type(module).__name__ == "RMSNorm":
            module.add = True
    expected = host.output()
    assert relative_error(theirs, expected) > 1e-2
    host.begin()
    ours, calls = calls_of(host.output)
    assert calls == {"plain": 1} and relative_error(ours, expected) < 1e-5, runtime.status()["reason"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_a_half_type_it_is_as_near_to_float32_as_the_hosts(host: AnimaHost, dtype: torch.dtype) -> None:
    network = host.unet.to(dtype)
    network.storage_dtype = network.computation_dtype = dtype
    # So that the residual stream is much larger than what is added to it, and its rounding shows.
    network.x_embedder.proj[1].weight.data *= 32
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
def test_loras_on_every_kind_of_layer(host: AnimaHost, online: bool, stored: torch.dtype) -> None:
    """stored: the type of the weights, which are computed in float32."""
    if stored != torch.float32:
        host.store_as(stored)
    one = lora(host, LAYERS)
    two = lora(host, LAYERS[1:9], rank=2, seed=7)
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


def doubled(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """What this gives, twice."""
    function = getattr(owner, name)
    patch.setitem(vars(owner), name, lambda *given, **told: 2 * function(*given, **told))


def with_reference(host: AnimaHost, patch: pytest.MonkeyPatch) -> None:
    arguments = host.module("backend.args").dynamic_args
    patch.setattr(arguments, "ref_latents", [random(1, CHANNELS, 1, 8, 8, seed=9)])


@pytest.mark.parametrize(("reason", "change", "told"), [
    ("made after another one", with_reference, {}),
    ("padding_mask", None, {"padding_mask": torch.ones(2, 1, 8, 8)}),
    ("one image", None, {"frames": 2}),
    ("attention_function", lambda host, patch: doubled(patch, host.code, "attention_function"), {}),
    ("pad_to_patch_size", lambda host, patch: doubled(patch, host.code, "pad_to_patch_size"), {}),
    ("cross_attn", lambda host, patch: doubled(patch, host.unet.blocks[1].cross_attn, "forward"), {}),
])
def test_what_only_the_host_knows_is_the_hosts(host: AnimaHost, reason: str, change: Any, told: Any) -> None:
    def changed() -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if change is not None:
                change(host, patch)
            return host.output(**told)

    plain = host.output()
    expected = changed()
    assert relative_error(expected, plain) > 1e-2
    host.begin()
    for _ in range(2):
        ours, calls = calls_of(host.output)
        assert calls == {"plain": 1} and relative_error(ours, plain) < 1e-5
        theirs, calls = calls_of(changed)
        assert calls == {"host": 1} and torch.equal(theirs, expected) and reason in runtime.status()["reason"]


def test_functions_that_anima_never_calls_change_nothing(host: AnimaHost) -> None:
    def merged(*given: Any) -> Any:
        raise AssertionError("nobody calls this")

    # As the option "Token merging ratio" puts them there for every model.
    options = {"patches": {"attn1_patch": [merged], "attn1_output_patch": [merged]}}
    expected = host.output(options=options)
    host.begin()
    for _ in range(2):
        ours, calls = calls_of(lambda: host.output(options=options))
        assert calls == {"plain": 1} and relative_error(ours, expected) < 1e-5, runtime.status()["reason"]


def wrapped(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """As forge-couple decorates: by the names of what it replaces, over those of torch's decorator too."""
    function = getattr(owner, name)
    patch.setattr(owner, name, functools.wraps(function)(torch.no_grad()(lambda *given: 1.5 * function(*given))))


def set_on_instances(patch: pytest.MonkeyPatch, host: AnimaHost) -> None:
    """As a PAG extension does."""
    for block in host.unet.blocks:
        operation = block.self_attn.torch_attention_op
        patch.setitem(vars(block.self_attn), "torch_attention_op", lambda *given, of=operation: 2 * of(*given))


BY_NAME: dict[str, Callable[[AnimaHost, pytest.MonkeyPatch], object]] = {
    "_fn": lambda host, patch: doubled(patch, host.code, "_fn"),
    "apply_rope_split_half": lambda host, patch: doubled(patch, host.code.ck, "apply_rope_split_half"),
    "torch_attention_op": lambda host, patch: wrapped(patch, host.code.Attention, "torch_attention_op"),
    "blocks.0.self_attn has a torch_attention_op": lambda host, patch: set_on_instances(patch, host),
    "unpatchify": lambda host, patch: wrapped(patch, host.code.Anima, "unpatchify"),
    "prepare_embedded_sequence": lambda host, patch: wrapped(patch, host.code.Anima, "prepare_embedded_sequence"),
    "Block.forward": lambda host, patch: wrapped(patch, host.code.Block, "forward"),
    "BASE": lambda host, patch: patch.setattr(host.code, "BASE", 500.0),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_what_it_calls_by_name_counts_when_it_is_replaced_after_a_proof(host: AnimaHost, name: str) -> None:
    def replaced() -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            BY_NAME[name](host, patch)
            return host.output()

    plain = host.output()
    expected = replaced()
    assert relative_error(expected, plain) > 1e-2
    host.begin()
    for _ in range(3):
        ours, calls = calls_of(host.output)
        assert calls == {"plain": 1} and relative_error(ours, plain) < 1e-5
        theirs, calls = calls_of(replaced)
        reason = runtime.status()["reason"]
        assert calls == {"host": 1} and torch.equal(theirs, expected) and name in reason, reason
        assert name == "BASE" or __name__ in reason, reason


def test_a_unet_after_anima_and_back(host: AnimaHost) -> None:
    expected = {}
    for host.is_anima in (False, True):
        host.checkpoint = host.make()
        expected[host.is_anima] = host.generate()
    adapter = host.start()
    for host.is_anima in (False, True, False, True):
        load(host, host.make())
        ours, calls = calls_of(host.generate)
        assert calls == OURS and close(ours, expected[host.is_anima]), runtime.status()["reason"]
        assert (adapter.model_name() == "Anima") is host.is_anima and adapter.why_not_served() is None


def test_nothing_is_left_of_us(host: AnimaHost) -> None:
    kind = host.code.Anima
    expected = host.generate()
    names = attributes(host)
    forward = kind.forward
    weight = host.unet.blocks[0].self_attn.q_proj.weight
    before = {name: (tensor, tensor.clone()) for name, tensor in host.unet.state_dict(keep_vars=True).items()}
    adapter = host.start()
    assert calls_of(host.generate)[1] == OURS and kind.forward is not forward and shares_storage(weight)
    adapter.stop()
    assert kind.forward is forward and attributes(host) == names
    for name, tensor in host.unet.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1]) and not shares_storage(tensor), name
    made, calls = calls_of(host.generate)
    assert calls == {} and same(made, expected)


@pytest.mark.parametrize(("tokens", "called_with"), [(77, FEWEST_TOKENS), (601, 601)])
def test_warming_makes_the_shape_of_the_call_to_come(host: AnimaHost, tokens: int, called_with: int) -> None:
    host.start().warm(96, 64, 2, tokens)
    warmed, = runtime.table.entries()
    assert calls_of(lambda: host.output((8, 12), 2, called_with))[1] == {"plain": 1}
    assert runtime.table.entries() == [warmed] and warmed.uses == 2


@pytest.mark.parametrize(("reason", "path", "value"), [
    ("2 images of a video", "patch_temporal", 2),
    ("without weight", "blocks.1.layer_norm_mlp", nn.LayerNorm(WIDTH)),
    ("without weight", "final_layer.layer_norm", nn.LayerNorm(WIDTH)),
    ("blocks.0.mlp.activation", "blocks.0.mlp.activation", nn.GELU("tanh")),
    ("expected SiLU", "blocks.1.adaln_modulation_mlp.0", nn.GELU()),
    ("no padding mask", "x_embedder.proj", nn.Sequential(nn.Identity(), nn.Linear(4 * CHANNELS, WIDTH, bias=False))),
    ("frequencies that OneDiff does not know", "pos_embedder.dim_spatial_range", torch.ones(5)),
    ("do not know, such as blocks.0.extra", "blocks.0.extra", nn.Linear(2, 2)),
])
def test_a_module_that_we_do_not_know_is_refused(host: AnimaHost, reason: str, path: str, value: Any) -> None:
    above, _, name = path.rpartition(".")
    setattr(host.unet.get_submodule(above), name, value)
    with pytest.raises(Refusal, match=reason):
        FAMILIES.read(host.unet)


class Read(dict[str, LayerWeights]):
    """Weights that note what is read of them."""

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> LayerWeights:
        self.names.append(name)
        return super().__getitem__(name)


def test_layers_are_read_unit_by_unit_and_six_of_a_block_may_be_in_eight_bits(host: AnimaHost) -> None:
    family = Animas()
    layout = FAMILIES.read(host.unet)
    call = family.example(layout, (8, 8), 2, 77, torch.randn)
    binding = Binding(host.unet, layout)
    binding.bind()
    units = family.units(layout, call)
    read = Read(binding.weights())
    unit_of = {name: number for number, names in enumerate(units) for name in names}
    assert sorted(name for names in units for name in names) == sorted(binding.groups)
    family.output(layout, read, operators, call)
    assert set(read.names) == set(unit_of)
    order = [unit_of[name] for name in read.names]
    assert order == sorted(order)
    classes = [one.layer_class for one in every_low_bit_layer(layout)]
    assert len(set(classes)) == 6 and len(classes) == 6 * len(host.unet.blocks)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_our_kernels_compute_the_same(host: AnimaHost) -> None:
    family = Animas()
    layout = FAMILIES.read(host.unet)
    binding = Binding(host.unet, layout)
    call = family.example(layout, (5, 6), 2, 77, torch.randn)
    binding.bind()
    call = replace(call, context=call.context[:, :20])
    ours, expected = (family.output(layout, binding.weights(), ops, call) for ops in (NativeOperators(), operators))
    assert relative_error(ours, expected) < 1e-5
