"""Checkpoints whose weights Forge Neo stores in 4 or 8 bits: our forward computes with the numbers in the file, an edit
of a stored weight takes effect at the next call, and the host serves formats that OneDiff does not support."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import Made, calls_of, random, running
from stored_hosts import (
    DISABLED,
    FORMATS,
    GROUP,
    Moved,
    StoredAnima,
    StoredKrea2,
    StoredUNet,
    StoredZImage,
    sensitivity,
    stored_bits,
    tensors_of,
)
from test_generations import BY_HOST, OURS, attributes, same
from test_weight_functions import loha, lora, network
from torch import Tensor, nn

from lib_onediff.core.layer_weights import RANKS
from lib_onediff.core.refusal import Refusal
from lib_onediff.families.registry import FAMILIES
from lib_onediff.hosts.forge.stored_weights import StoredWeights
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.binding import Binding
from lib_onediff.weights.joining import shares_storage

CLOSE = 1e-5


@pytest.fixture
def host(fresh_runtime: None) -> Iterator[StoredAnima]:
    with running("neo", StoredAnima) as made:
        yield made


@pytest.fixture
def unet_host(fresh_runtime: None) -> Iterator[StoredUNet]:
    with running("neo", StoredUNet) as made:
        yield made


@pytest.fixture
def krea2_host(fresh_runtime: None) -> Iterator[StoredKrea2]:
    with running("neo", StoredKrea2) as made:
        yield made


@pytest.fixture
def z_image_host(fresh_runtime: None) -> Iterator[StoredZImage]:
    with running("neo", StoredZImage) as made:
        yield made


def generate_as_stored(host: Moved) -> Made:
    """A generation by the WebUI's own code with the numbers in the file and unrounded inputs; see
    StoredNeo.as_stored."""
    with host.as_stored():
        return host.generate()


def largest_error(name: str) -> float:
    """The largest accepted relative error of one call of ours. In INT8, a few inputs may be rounded up in our forward
    and down in the host's."""
    return 0.02 if name.startswith("INT8") else CLOSE


def limit_of(host: Moved, name: str) -> float:
    """The largest accepted relative error of our generation against generate_as_stored(). Call it before OneDiff is
    started."""
    return max(CLOSE, 4 * sensitivity(host)) if name.startswith("INT8") else CLOSE


CASES = [
    *(("host", name, DISABLED) for name in FORMATS), ("host", "MXFP8", ()), ("host", "NVFP4", ()),
    ("unet_host", "INT8 (ConvRot)", DISABLED), ("unet_host", "FP8 (e4m3, scaled)", DISABLED),
    ("unet_host", "NVFP4", DISABLED), ("unet_host", "GGUF Q4_K", DISABLED),
    *(
        (host, name, DISABLED) for host in ("krea2_host", "z_image_host")
        for name in ("INT8 (ConvRot)", "FP8 (e4m3, scaled)", "NVFP4", "GGUF Q8_0")
    ),
]


@pytest.mark.parametrize(("of", "name", "disabled"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_a_checkpoint_in_every_format_is_served_and_switching_off_restores_it(
    of: str, name: str, disabled: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """of: the host's fixture. name: the format. disabled: formats in which the host's GPU cannot multiply, so that the
    host decodes the weights. For the others, the host rounds the layers' inputs, which our forward does not (except in
    INT8). So our latent is compared with that of generate_as_stored()."""
    host = request.getfixturevalue(of)
    plain = host.generate()
    host.store(name, disabled)
    expected = host.generate()
    exact = generate_as_stored(host)
    limit = limit_of(host, name)
    assert relative_error(expected.latent, plain.latent) > 1e-3
    before = stored_bits(host)
    parameters = dict(host.unet.named_parameters())
    host.start()
    for _ in range(2):
        made, calls = calls_of(host.generate)
        assert calls == OURS, runtime.status()["reason"]
        assert relative_error(made.latent, exact.latent) < limit
    assert f"{name.removesuffix(' by rows')} weights" in network(host).weight_marks
    host.switch(False)
    now = stored_bits(host)
    assert now.keys() == before.keys() and all(now[one].equal(before[one]) for one in before)
    assert all(parameter is parameters[path] for path, parameter in host.unet.named_parameters())
    assert not any(shares_storage(tensor) for _, tensor in tensors_of(host))
    made, calls = calls_of(host.generate)
    assert calls == {} and same(made, expected)


# --- LoRAs ---------------------------------------------------------------------------------------------------------

PLACES = ("self_attn", "cross_attn", "mlp")
ALONE = ("t_embedder.1.linear_2", "blocks.0.self_attn.output_proj", "blocks.1.cross_attn.q_proj", "blocks.1.mlp.layer1")
# Of the layers that our forward multiplies as one, all or none: a layer without a LoRA would round its input in the
# host, and not in ours.
ADAPTED = (
    *ALONE, *(f"blocks.1.self_attn.{one}_proj" for one in "qkv"), *(f"blocks.0.cross_attn.{one}_proj" for one in "kv"),
    *(f"blocks.{block}.adaln_modulation_{place}.{layer}" for block in (0, 1) for place in PLACES for layer in (1, 2)),
    "final_layer.adaln_modulation.1", "final_layer.adaln_modulation.2", "blocks.0.mlp.layer2",
)


@pytest.mark.parametrize("name", ["INT8 (ConvRot)", "FP8 (e4m3, scaled)", "FP8 (e5m2, scaled)", "NVFP4", "GGUF Q8_0"])
def test_unmerged_loras_are_computed_beside_stored_weights(host: StoredAnima, name: str) -> None:
    """Our latent is compared with that of generate_as_stored() with the same LoRAs. OneDiff keeps the LoRAs' factors in
    float32, and no decoded weight."""
    host.store(name)
    one, two = lora(host, ADAPTED), lora(host, ALONE, rank=2, seed=7)
    sequence: Any = ((), ((one, 0.5),), ((one, 0.0),), ((one, 0.25), (two, 0.8)), ((two, 0.8),), ())
    expected = []
    for loras in sequence:
        host.set_loras(*loras)
        expected.append(generate_as_stored(host))
    for theirs, after in zip(expected, expected[1:], strict=False):
        assert relative_error(theirs.latent, after.latent) > 0.05
    limit = limit_of(host, name)
    before = stored_bits(host)
    host.start()
    for loras, theirs in zip(sequence, expected, strict=True):
        host.set_loras(*loras)
        made, calls = calls_of(host.generate)
        assert calls == OURS, runtime.status()["reason"]
        assert relative_error(made.latent, theirs.latent) < limit
        # No decoded weight is kept.
        marks = (f"{name} weights", *(["LoRA on the fly"] if loras else []))
        assert network(host).weight_marks == marks
        floats = sum(part.numel() for patches, _ in loras for _, parts in patches.values() for part in parts[:2])
        # Ranks are padded to multiples of RANKS.
        assert 4 * floats <= network(host).bound.on_the_fly.bytes <= 4 * floats * RANKS / 2
    host.switch(False)
    now = stored_bits(host)
    assert all(now[one].equal(before[one]) for one in before)


@pytest.mark.parametrize("name", ["INT8 by rows", "INT8 (ConvRot)", "FP8 (e4m3, scaled)", "NVFP4"])
def test_our_images_follow_loras_that_the_host_merges_into_stored_weights_and_removes(
    host: StoredAnima, name: str
) -> None:
    """The host stores a merged weight, rounded, in a new tensor with other scales, which our forward must read. Our
    latent is compared with that of generate_as_stored() at each strength."""
    host.store(name)
    one = lora(host, ADAPTED)
    sequence: Any = ((), ((one, 0.5),), ((one, 0.25),), ())
    expected = []
    for loras in sequence:
        host.set_loras(*loras, online=False)
        expected.append(generate_as_stored(host))
    limit = limit_of(host, name)
    host.start()
    for loras, theirs in zip(sequence, expected, strict=True):
        host.set_loras(*loras, online=False)
        made, calls = calls_of(host.generate)
        assert calls == OURS, runtime.status()["reason"]
        assert relative_error(made.latent, theirs.latent) < limit
        assert network(host).weight_marks == (f"{name.removesuffix(' by rows')} weights",)


@pytest.mark.parametrize("name", ["INT8", "FP8 (e5m2, scaled)", "GGUF Q8_0"])
def test_a_loha_is_applied_to_a_decoded_copy_of_its_layers_weight(host: StoredAnima, name: str) -> None:
    """Unlike a LoRA, a LoHa cannot be computed beside the layer. Only the one layer that has it gets a decoded copy."""
    path = "blocks.1.mlp.layer2"
    difference = loha(host, (path,))
    host.store(name)
    host.set_loras((difference, 0.5))
    expected = host.generate() if name == "INT8" else generate_as_stored(host)
    host.start()
    made, calls = calls_of(host.generate)
    assert calls == OURS, runtime.status()["reason"]
    assert relative_error(made.latent, expected.latent) < (0.02 if name == "INT8" else CLOSE)
    assert network(host).weight_marks == (f"{name} weights", "weights changed on the fly")
    assert network(host).bound.on_the_fly.bytes == 4 * host.unet.get_submodule(path).weight.shape.numel()


# --- edits ---------------------------------------------------------------------------------------------------------

EDITED = (
    "blocks.0.self_attn.k_proj", "blocks.1.self_attn.output_proj", "blocks.0.cross_attn.v_proj", "blocks.1.mlp.layer1",
    "blocks.0.adaln_modulation_mlp.2", "t_embedder.1.linear_2",
)


# By layer: all layers with the same input, which our forward computes in one product.
BESIDE = {
    "blocks.0.self_attn.k_proj": [f"blocks.0.self_attn.{one}_proj" for one in "qkv"],
    "blocks.0.cross_attn.v_proj": [f"blocks.0.cross_attn.{one}_proj" for one in "kv"],
    "blocks.0.adaln_modulation_mlp.2": [
        f"blocks.{number}.adaln_modulation_{place}.2" for number in range(2) for place in PLACES
    ],
}


def make_edit(edit: Any, host: StoredAnima, path: str, seed: int) -> None:
    """Edit a layer. An edit of the format is made in all layers with the same input, because files store them alike."""
    paths = BESIDE.get(path, [path]) if edit in OF_A_FORMAT else [path]
    for one in paths:
        edit(host, host.unet.get_submodule(one), Random(seed))


def decoded_weight(layer: Any) -> Tensor:
    """The decoded weight of a layer, in float32."""
    weight = layer.weight
    if hasattr(weight, "dequantize") and hasattr(weight, "_qdata"):
        return weight.dequantize().float()
    kind = getattr(weight, "gguf_cls", None)
    return weight.data.float() if kind is None else kind.dequantize_pytorch(weight).float()


def edit_scale(host: StoredAnima, layer: Any, chance: Random) -> None:
    if hasattr(layer.weight, "_params"):
        scale = layer.weight._params.scale
        scale.add_(1) if scale.dtype == torch.uint8 else scale.mul_(chance.choice((0.5, 2.0)))


def edit_numbers(host: StoredAnima, layer: Any, chance: Random) -> None:
    numbers = getattr(layer.weight, "_qdata", layer.weight.data).view(torch.uint8)
    numbers.copy_(numbers.roll(chance.randint(1, 3), dims=0))


def in_another_format(host: StoredAnima, layer: Any, chance: Random) -> None:
    """Store other numbers in a random format of MIXED."""
    kind, options = FORMATS[chance.choice(MIXED)]
    weight = decoded_weight(layer)
    layer.weight = nn.Parameter(1.5 * weight, requires_grad=False)
    layer.read(kind, **options)


def in_plain_numbers(host: StoredAnima, layer: Any, chance: Random) -> None:
    """Replace the stored weight by one that is not quantized."""
    layer.weight = nn.Parameter(1.5 * decoded_weight(layer), requires_grad=False)


def in_nvfp4(host: StoredAnima, layer: Any, chance: Random) -> None:
    layer.weight = nn.Parameter(decoded_weight(layer), requires_grad=False)
    layer.read("nvfp4")


def in_q4(host: StoredAnima, layer: Any, chance: Random) -> None:
    layer.weight = nn.Parameter(decoded_weight(layer), requires_grad=False)
    layer.read(host.module("backend.operations_gguf").Q4_K)


def edit_rotation(host: StoredAnima, layer: Any, chance: Random) -> None:
    """Switch ConvRot's rotation of an INT8 weight on or off, in a new tensor or in the present one: the same stored
    numbers then mean another weight."""
    weight = layer.weight
    if getattr(weight, "_layout_cls", "") == "TensorWiseINT8Layout":
        params = dataclasses.replace(weight._params, convrot=not weight._params.convrot, convrot_groupsize=GROUP)
        if chance.random() < 0.5:
            weight._params = params
        else:
            layer.weight = nn.Parameter(type(weight)(weight._qdata, weight._layout_cls, params), requires_grad=False)


def edit_decoding(host: StoredAnima, layer: Any, chance: Random) -> None:
    """Switch on or off whether the host decodes this weight before it multiplies."""
    if hasattr(layer, "_full_precision_mm"):
        layer._full_precision_mm = not layer._full_precision_mm


def put_lora(host: StoredAnima, layer: Any, chance: Random) -> None:
    rows, width = layer.weight.shape
    seed = chance.randrange(1000)
    what = ("lora", (0.3 * random(rows, 2, seed=seed), 0.3 * random(2, width, seed=seed + 1), 2.0, None, None))
    patch = [chance.choice((0.0, 0.5, 1.0)), what, 1.0, None, None, True]
    made = host.module("backend.patcher.base").OnlineLoRAPatch("a file", "weight", patch)
    layer.weight_function = [*layer.weight_function[:1], made]


def take_loras(host: StoredAnima, layer: Any, chance: Random) -> None:
    layer.weight_function = []


EDITS = (
    edit_scale, edit_numbers, in_another_format, in_plain_numbers, edit_rotation, edit_decoding, put_lora, take_loras,
)
OF_A_FORMAT = (in_another_format, in_plain_numbers, edit_rotation, edit_decoding)
MIXED = ("INT8", "INT8 by rows", "INT8 (ConvRot)", "FP8 (e4m3, scaled)", "FP8 (e5m2, scaled)", "MXFP8", "NVFP4")


@pytest.mark.parametrize("edit", EDITS[:-1], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", ["INT8 (ConvRot)", "FP8 (e4m3, scaled)", "NVFP4"])
def test_the_call_after_an_edit_of_a_stored_weight_computes_with_the_edit(
    host: StoredAnima, name: str, edit: Any
) -> None:
    """Edits are in place or in new tensors, in inference mode and outside. Our output is compared with the host's for
    the edited weights. Every edit except edit_decoding and edit_rotation must change the host's output."""
    host.store(name)
    host.begin()
    plain, calls = calls_of(host.output)
    assert calls == {"plain": 1} and relative_error(plain, host.theirs()) < largest_error(name)
    # The other format may be one that rounds inputs.
    most = largest_error("INT8" if edit is in_another_format else name)
    has_effect = False
    for seed, path in enumerate(EDITED):
        before = host.theirs()
        with torch.inference_mode(seed % 2 == 1):
            make_edit(edit, host, path, seed)
        expected = host.theirs()
        has_effect |= relative_error(before, expected) > 2 * largest_error(name)
        made, calls = calls_of(host.output)
        assert calls == {"plain": 1}, (path, runtime.status()["reason"])
        assert relative_error(made, expected) < most, path
    assert has_effect or edit in (edit_decoding, edit_rotation), "no edit has changed the output"


@pytest.mark.parametrize(("name", "edit", "place"), [
    ("INT8", edit_rotation, 0), ("INT8 (ConvRot)", in_plain_numbers, 2), ("INT8 by rows", in_nvfp4, 1),
    ("FP8 (e4m3, scaled)", in_plain_numbers, 0), ("MXFP8", in_nvfp4, 2), ("GGUF Q8_0", in_q4, 0),
])
def test_layers_with_one_input_are_decoded_if_their_formats_differ(
    host: StoredAnima, name: str, edit: Any, place: int
) -> None:
    """Some files store a few layers with more bits than their neighbours. If layers with one input differ, our forward
    decodes their weights and rounds no inputs. edit: makes the formats of two or more such layers differ. place: index
    of the layer in BESIDE."""
    host.store(name)
    path, beside = list(BESIDE.items())[place]
    for one in {path, beside[0]}:
        edit(host, host.unet.get_submodule(one), Random(0))
    before = attributes(host)
    host.begin()
    made, calls = calls_of(host.output)
    assert calls == {"plain": 1}, runtime.status()["reason"]
    # A GGUF file has its plain weights in float16, so this call is in float16.
    most = {"I": 0.03, "G": 2e-3}.get(name[0], CLOSE)
    assert relative_error(made, host.theirs()) < most
    host.switch(False)
    assert attributes(host) == before


@pytest.mark.parametrize("seed", range(2))
def test_outputs_after_random_edits_of_stored_weights_are_close_to_those_of_the_host(
    host: StoredAnima, seed: int
) -> None:
    """Each of 25 outputs is close to the host's for the edited weights. More than 15 must be computed by our forward:
    the host's forward is correct anyway."""
    chance = Random(seed)
    host.store(chance.choice(MIXED))
    host.begin()
    ours = 0
    for number in range(25):
        path = chance.choice(EDITED)
        edit = chance.choice(EDITS)
        make_edit(edit, host, path, chance.randrange(1000))
        made, calls = calls_of(host.output)
        expected = host.theirs()
        if calls == {"host": 1}:
            expected = host.theirs(as_stored=False)
        else:
            ours += 1
        assert relative_error(made, expected) < largest_error("INT8"), (number, edit.__name__, path, calls)
    assert ours > 15, runtime.status()["reason"]


# --- unsupported formats -------------------------------------------------------------------------------------------

BROKEN, FUSED = "blocks.1.mlp.layer2", "blocks.0.self_attn.k_proj"


def with_params(layer: Any, **changes: Any) -> None:
    weight = layer.weight
    params = dataclasses.replace(weight._params, **changes)
    layer.weight = nn.Parameter(type(weight)(weight._qdata, weight._layout_cls, params), requires_grad=False)


def in_unknown_layout(host: StoredAnima, layer: Any) -> None:
    host.tensors.LAYOUTS["OfTomorrowLayout"] = host.tensors.TensorWiseINT8Layout
    weight = layer.weight
    layer.weight = nn.Parameter(type(weight)(weight._qdata, "OfTomorrowLayout", weight._params), requires_grad=False)


def with_unknown_format(host: StoredAnima, layer: Any) -> None:
    """Also give the layer the format name that a file of a later release could have."""
    in_unknown_layout(host, layer)
    layer.quant_format = "convrot_w4a4"


def in_four_bits(host: StoredAnima, layer: Any) -> None:
    """As in Forge with bitsandbytes: a parameter of the class ForgeParams4bit."""
    kind = type("ForgeParams4bit", (nn.Parameter,), {"quant_type": "nf4"})
    weight = nn.Parameter(decoded_weight(layer), requires_grad=False)
    weight.__class__ = kind
    layer.weight = weight


def by_older_operations(host: StoredAnima, layer: Any) -> None:
    """As Forge Neo before 2.26 stores INT8: a plain parameter, and a mark on the layer."""
    layer.__dict__["_is_quantized"] = True
    layer.weight = nn.Parameter(layer.weight._qdata, requires_grad=False)


def transposed(host: StoredAnima, layer: Any) -> None:
    made = host.tensors.QuantizedTensor.from_float(decoded_weight(layer).t().contiguous(), "TensorWiseINT8Layout")
    layer.weight = nn.Parameter(made.t(), requires_grad=False)
    assert layer.weight._params.transposed


def of_another_package(host: StoredAnima, layer: Any) -> None:
    """Give the weight a class of the same name from another package."""
    kind = type(layer.weight)
    with_params(layer)
    layer.weight.__class__ = type(kind.__name__, (kind,), {"__module__": "somebodys.tensors"})


def unbaked(host: StoredAnima, layer: Any) -> None:
    """As a GGUF weight whose loading is not finished."""
    layer.weight.baked = False


# By case: the stored format, the function that makes the layer's weight unsupported, and a part of the reason.
UNKNOWN = {
    "layout": ("INT8", in_unknown_layout, "stored as int8_tensorwise (OfTomorrowLayout), which"),
    "a name in the file": ("INT8", with_unknown_format, "stored as convrot_w4a4 (OfTomorrowLayout), which OneDiff"),
    "nf4": ("INT8", in_four_bits, "stored in nf4 (bitsandbytes), which OneDiff does not support"),
    "older operations": ("INT8", by_older_operations, "INT8 weights were loaded by a Forge Neo before 2.26"),
    "transposed": ("INT8", transposed, "stored as TensorWiseINT8Layout and transposed"),
    "another package": (
        "INT8", of_another_package, "somebodys.tensors.QuantizedTensor, which OneDiff does not support"
    ),
    "no scale": ("INT8", lambda host, layer: with_params(layer, scale=None), "a weight in INT8 lacks its scale"),
    "no scales of blocks": (
        "NVFP4", lambda host, layer: with_params(layer, block_scale=None), "a weight in NVFP4 lacks its scale"
    ),
    "three scales": (
        "INT8", lambda host, layer: with_params(layer, scale=torch.ones(3, 1)), "INT8 has 3 scales for 64 rows"
    ),
    "rotation": (
        "INT8", lambda host, layer: with_params(layer, convrot=True, convrot_groupsize=1024), "ConvRot groups of 1024"
    ),
    "no power of four": (
        "INT8", lambda host, layer: with_params(layer, convrot=True, convrot_groupsize=32), "a ConvRot group of 32"
    ),
    "not baked": ("GGUF Q8_0", unbaked, "not finished loading a weight stored as GGUF Q8_0"),
}


def answer(work: Any) -> Any:
    """The result of work(), or its exception as text."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def alike(made: Any, expected: Any) -> bool:
    """Whether two results of answer() are equal."""
    if isinstance(made, Tensor) and isinstance(expected, Tensor):
        return torch.equal(made.nan_to_num(), expected.nan_to_num())
    return type(made) is type(expected) and bool(made == expected)


@pytest.mark.parametrize(("case", "path"), [*((case, BROKEN) for case in UNKNOWN), ("layout", FUSED)])
def test_the_host_serves_while_a_layers_format_is_unsupported(host: StoredAnima, case: str, path: str) -> None:
    """case: a key of UNKNOWN. path: the layer of a served network that gets the unsupported weight; our forward
    computes the layer FUSED in one product with others. Calls then return the host's output or exception, with the
    reason in the status. With the old weight, our output equals the one before to the bit. Switching off leaves no view
    of a fused tensor."""
    name, breaks, reason = UNKNOWN[case]
    host.store(name)
    layer = host.unet.get_submodule(path)
    whole = layer.weight
    before = stored_bits(host)
    host.begin()
    proved = host.output()
    for _ in range(2):
        breaks(host, layer)
        expected = answer(lambda: host.theirs(as_stored=False))
        for _ in range(2):
            made, calls = calls_of(lambda: answer(host.output))
            assert alike(made, expected) and calls in ({"host": 1}, {}), calls
            assert reason in runtime.status()["reason"], runtime.status()["reason"]
        # Restored, the network is served again.
        layer.weight = whole
        layer.__dict__.pop("_is_quantized", None)
        if hasattr(layer, "quant_format"):
            layer.quant_format = FORMATS[name].kind
        for tensor, (_, bits) in zip(tensors_of(host), before.items(), strict=True):
            tensor[1].view(-1).view(torch.uint8).copy_(bits)
        if hasattr(whole, "baked"):
            whole.baked = True
        made, calls = calls_of(host.output)
        assert calls == {"plain": 1} and torch.equal(made, proved), runtime.status()["reason"]
    breaks(host, layer)
    answer(host.output)
    host.switch(False)
    assert not any(shares_storage(tensor) for _, tensor in tensors_of(host)) and runtime.guard.faults == []
    assert alike(answer(host.output), expected)


def test_the_host_serves_a_checkpoint_with_an_unsupported_layout(host: StoredAnima) -> None:
    """The checkpoint has such a layer from the start, not by a later edit. The reason and Binding's Refusal have the
    layout's name."""
    host.store("INT8 (ConvRot)")
    in_unknown_layout(host, host.unet.get_submodule(BROKEN))
    expected = host.generate()
    adapter = host.start()
    made, calls = calls_of(host.generate)
    assert calls == BY_HOST and torch.equal(made.latent, expected.latent) and runtime.guard.faults == []
    assert "OfTomorrowLayout" in (adapter.why_not_served() or runtime.status()["reason"])
    with pytest.raises(Refusal, match="OfTomorrowLayout"):
        Binding(host.unet, FAMILIES.read(host.unet), StoredWeights())


def test_the_host_serves_while_a_quantized_weights_scale_is_nan(host: StoredAnima) -> None:
    """With a NaN scale, our output and the host's are NaN, so that the check of the first use fails. With the scale
    restored, OneDiff serves. If the scale becomes NaN after the check, the output is NaN, too."""
    host.store("INT8")
    scale = host.unet.get_submodule(BROKEN).weight._params.scale
    before = scale.clone()
    scale.mul_(torch.nan)
    host.begin()
    made, calls = calls_of(host.output)
    assert calls == {"host": 1} and made.isnan().all() and "NaN" in runtime.status()["reason"]
    scale.copy_(before)
    made, calls = calls_of(host.output)
    assert calls == {"plain": 1} and relative_error(made, host.theirs()) < largest_error("INT8")
    scale.mul_(torch.nan)
    assert host.output().isnan().all()


@pytest.mark.parametrize(("dimensions", "is_rounded"), [(3, False), (5, True)])
def test_animas_mlps_are_multiplied_in_fp8_only_if_the_hosts_release_rounds_their_inputs(
    host: StoredAnima, dimensions: int, is_rounded: bool
) -> None:
    """dimensions: the host's release rounds inputs that have at most this many dimensions. The inputs of the MLPs have
    five, those of q_proj three. is_rounded: whether an MLP's weight is multiplied in FP8."""
    mixed = host.module("backend.operations_mixed_precision").mixed_precision_ops
    host.mixed = lambda disabled: mixed(disabled, dimensions).Linear
    host.store("FP8 (e4m3, scaled)", ())
    adapter = host.start()
    reader = adapter.host_traits(host.unet).stored
    for path, expected in (("blocks.1.mlp.layer2", is_rounded), ("blocks.0.self_attn.q_proj", True)):
        stored = reader.weight(host.unet.get_submodule(path), path)
        assert (stored.format.kind is not None) is expected, path
