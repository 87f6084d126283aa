"""Operands: weights and biases in the form in which kernels read them. At each read, a list of steps makes them from
the stored weight, which is plain or quantized: steps cast, decode, stream or replace it."""
from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streaming_builders import EarlyCopyStream, LateCopyStream
from torch import Tensor, nn

from lib_onediff.core.layer_weights import LayerWeights, LowRank, QuantizedWeight
from lib_onediff.core.leaves import FusedLinear, Linear
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.torch import operators
from lib_onediff.devices.torch.quantized import hadamard
from lib_onediff.weights import binding as binding_module
from lib_onediff.weights import main_memory
from lib_onediff.weights import streaming as streaming_module
from lib_onediff.weights.binding import Binding
from lib_onediff.weights.bound import BoundNetwork
from lib_onediff.weights.joining import shares_storage
from lib_onediff.weights.low_bit import FP8, INT8
from lib_onediff.weights.main_memory import MainMemory
from lib_onediff.weights.on_the_fly import AppliedFunctions
from lib_onediff.weights.operands import Cast, Decoded, Operands, WithLowBit, quantized, steps_of
from lib_onediff.weights.scan import HostTraits
from lib_onediff.weights.stored import Format, StoredWeight
from lib_onediff.weights.streaming import Streaming

HALF = torch.float16
WIDTH, ROWS, GROUP = 8, (4, 2), 4
NAMES = ("first", "second")
BY_ROWS = {
    "int8": Format("INT8", (), INT8, is_by_rows=True), "turned": Format("INT8 (ConvRot)", (), INT8, GROUP, True),
    "fp8": Format("FP8", (), FP8, is_by_rows=True), "decoded": Format("FP8 (e5m2)", (), is_by_rows=True),
}
TYPES = {"fp8": torch.float8_e4m3fn, "decoded": torch.float8_e5m2}
# Not stored by rows: all numbers are in one row.
FLAT = Format("GGUF", ())


class File:
    """Reads the stored weights of network()'s layers, as a host's reader does those of its own quantized layers."""

    def weight(self, layer: nn.Module, path: str = "") -> StoredWeight | None:
        return layer.__dict__.get("stored")

    def tensors(self, layers: Sequence[nn.Module]) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in layers:
            stored = self.weight(layer)
            weight: Any = layer._parameters["weight"]
            bias: Any = layer._parameters["bias"]
            found += [weight, bias] if stored is None else [stored.values, *stored.scales, bias]
        return found

    def facts(self, layers: Sequence[nn.Module]) -> list[object]:
        return [None if stored is None else stored.format for stored in map(self.weight, layers)]


def decode(values: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return (values.float().reshape(-1, WIDTH) * scales[0].reshape(-1, 1)).to(dtype)


def turned_back(values: Tensor, scales: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    weight = decode(values, scales, dtype)
    return (weight.unflatten(1, (-1, GROUP)) @ hadamard(GROUP, weight.device)).flatten(1)


def stored_weight(kind: str, rows: int, by_rows: bool = False) -> StoredWeight:
    """A quantized weight (rows, WIDTH) of random numbers.

    kind: a key of BY_ROWS, or "flat". Kernels multiply int8 and fp8 as they are; "turned" is rotated by ConvRot;
    "decoded" and "flat" must be decoded. by_rows: whether each row has a scale.
    """
    numbers = torch.randint(-50, 50, (rows, WIDTH)).float()
    values = numbers.to(TYPES.get(kind, torch.int8))
    scale = torch.rand(rows, 1) if by_rows else torch.rand(())
    if kind == "flat":
        values = values.reshape(1, -1)
    return StoredWeight(
        BY_ROWS.get(kind, FLAT), (rows, WIDTH), values, (scale,), turned_back if kind == "turned" else decode, values
    )


def network(*kinds: str | None, by_rows: bool = False) -> nn.Module:
    """Two layers with the same input, and a third one. kinds: the kinds of the weights of the first two; see
    stored_weight. None: not quantized."""
    root = nn.Module()
    for name, rows, kind in zip(NAMES, ROWS, kinds, strict=True):
        layer = nn.Linear(WIDTH, rows)
        layer.requires_grad_(False)
        root.add_module(name, layer)
        if kind is not None:
            layer.__dict__["stored"] = stored_weight(kind, rows, by_rows)
    root.add_module("plain", nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    return root


def layout() -> Any:
    """The layout of network(), in which one product computes the first two layers (fused as "both")."""
    leaves = [Linear(name, WIDTH, rows) for name, rows in zip((*NAMES, "plain"), (*ROWS, WIDTH), strict=True)]
    fused = FusedLinear("both", tuple(leaves[:2]))
    return SimpleNamespace(
        leaves=lambda: leaves, fusions=lambda: [fused], architecture="two layers", model_name="two layers"
    )


def bound_to(root: nn.Module) -> Binding:
    binding = Binding(root, layout(), File())
    binding.cast_to = torch.float32
    binding.bind()
    return binding


def operands_of(binding: Binding) -> Operands:
    stored = binding.weights()
    return Operands(stored, steps_of(binding, stored, None, (), None))


def dense(layer: Any) -> Tensor:
    stored = layer.__dict__.get("stored")
    found: Tensor = layer.weight if stored is None else stored.decode(stored.values, stored.scales, torch.float32)
    return found


ALIKE = (("int8", "int8"), ("fp8", "fp8"))
TOGETHER = (*ALIKE, ("decoded", "decoded"), ("int8", "turned"))
APART = (("flat", "flat"), ("flat", None), ("int8", "fp8"), ("int8", None), ("fp8", "decoded"), ("int8", "flat"))


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("kinds", [*TOGETHER, *APART], ids=str)
def test_layers_with_the_same_input_become_one_operand_however_each_is_stored(kinds: Any, by_rows: bool) -> None:
    """The operand must equal the decoded weights of both layers, concatenated. Kernels multiply those in ALIKE in their
    stored format. Those in APART cannot be adjacent in memory, and are joined at each read. kinds: see network.
    by_rows: whether each row has a scale."""
    root = network(*kinds, by_rows=by_rows)
    expected = torch.cat([dense(root.get_submodule(name)) for name in NAMES])
    bias = torch.cat([root.get_submodule(name).bias for name in NAMES])
    binding = bound_to(root)
    assert (list(binding.apart) == ["both"]) is (kinds in APART)
    operand = operands_of(binding)["both"]
    assert operand.weight.shape == expected.shape and torch.equal(operand.bias, bias)
    # Not decoded if the host multiplies all members in the same format.
    assert bool(operand.low_bit) is (kinds in ALIKE)
    if operand.low_bit:
        weight, = operand.low_bit
        assert weight.values.dtype == TYPES.get(kinds[0], torch.int8) and operand.weight.is_meta
        assert weight.values.data_ptr() == root.first.stored.values.data_ptr() and weight.rotation == 0
        assert torch.equal(weight.values.float() * weight.scales.t(), expected)
    else:
        assert torch.equal(operand.weight, expected)
    x = torch.randn(3, WIDTH)
    found = operators.linear(x, operand)
    assert (found - (x @ expected.t() + bias)).norm() < 0.02 * found.norm()
    # Each alone, too.
    own = operands_of(binding)["second"]
    assert (operators.linear(x, own) - found[:, ROWS[0]:]).norm() < 0.03 * found.norm()


def test_quantized_members_with_one_scale_or_one_for_each_row_are_joined() -> None:
    """Members are the layers that one product computes. quantized() joins them, or returns None if one is rotated or
    not quantized."""
    members = [stored_weight("int8", 4, by_rows=True), stored_weight("int8", 2)]
    values = torch.cat([member.values for member in members])
    joint = quantized(values, members, [member.scales for member in members])
    assert joint is not None and joint.scales.shape == (1, 6)
    expected = torch.cat([decode(member.values, member.scales, torch.float32) for member in members])
    assert torch.equal(joint.values.float() * joint.scales.t(), expected)
    alone = quantized(members[1].values, members[1:], [members[1].scales])
    assert alone is not None and alone.scales.shape == (1, 1)
    other = stored_weight("turned", 2)
    assert quantized(values, [members[0], other], [members[0].scales, other.scales]) is None
    assert quantized(values, [members[0], None], [members[0].scales, ()]) is None


@pytest.mark.parametrize("kinds", APART, ids=str)
def test_weights_that_are_not_adjacent_are_joined_when_they_are_read(kinds: Any) -> None:
    """A CUDA graph captures the joining, so that a replay has later edits, such as that of a bias here. A joined copy
    from before the capture would be freed, and would not change with the weights."""
    root = network(*kinds)
    operands = operands_of(bound_to(root))
    root.second.bias += 1
    bias = torch.cat([root.first.bias, root.second.bias])
    assert operands.stored["both"].bias is None and torch.equal(operands["both"].bias, bias)
    assert torch.equal(operands.bias("both"), bias)


def test_a_weight_is_decoded_once_for_two_reads_in_a_row_and_again_after_other_reads() -> None:
    """The stored values are edited before the reads of two other operands; after these, the decoded weight has the
    edit."""
    root = network("decoded", "decoded")
    operands = operands_of(bound_to(root))
    first = operands["both"].weight
    assert operands["both"].weight is first
    root.first.stored.values.copy_(root.first.stored.values.float() * 2)
    assert not operands["plain"].weight.is_meta and operands["second"].weight.shape == (2, WIDTH)
    assert torch.equal(operands["both"].weight[:4], 2 * first[:4])


def test_a_weight_that_a_later_step_replaces_is_not_decoded() -> None:
    """A function of the host has changed the weight (see applied_to), and its result replaces the stored weight in a
    later step of steps_of()."""
    root = network("decoded", "decoded")
    binding = bound_to(root)
    stored = binding.weights()
    step = Decoded(binding, Operands(stored, []), None, frozenset({"both"}), False)
    assert step.operand("both", stored["both"]) is stored["both"]
    changed = torch.full((6, WIDTH), 7.0)
    steps = steps_of(binding, stored, None, (), applied_to(torch.float32, weights={"both": changed}))
    assert Operands(stored, steps)["both"].weight is changed


def in_order(operands: Operands) -> list[Tensor]:
    """Copies of all weights, scales and biases that a forward reads, layer after layer."""
    found: list[Tensor] = []
    for name in ("both", "plain"):
        operand = operands[name]
        quantities = [one for weight in operand.low_bit for one in (weight.values.float(), weight.scales)]
        found += [*(quantities or [operand.weight]), operand.bias]
    return [one.clone() for one in found]


@pytest.mark.parametrize("copy_stream", [EarlyCopyStream, LateCopyStream])
@pytest.mark.parametrize("kinds", [*ALIKE, ("decoded", "decoded"), ("flat", "flat"), ("flat", None)], ids=str)
def test_weights_streamed_from_main_memory_give_the_operands_of_weights_on_the_gpu(
    kinds: Any, copy_stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lies_away() is replaced, so that every weight counts as being in main memory. copy_stream: whether it copies
    weights as early or as late as the schedule allows. The second forward must have the scales that were edited after
    the first."""
    root = network(*kinds, by_rows=True)
    expected = in_order(operands_of(bound_to(root)))
    for module in (binding_module, streaming_module):
        monkeypatch.setattr(module, "lies_away", lambda parameter, device: True)
    binding = Binding(root, layout(), File())
    binding.cast_to = torch.float32
    binding.bind(device=torch.device("cpu"))
    units = [binding.apart.get("both", ["both"]), ["plain"]]
    streaming = Streaming(binding, units, copy_stream(), MainMemory(), pinned=False)
    copied = [one for stored in map(File().weight, root.children()) if stored is not None for one in stored.scales]
    for _ in range(2):
        stored = binding.weights()
        operands = Operands(stored, steps_of(binding, stored, streaming, units, None))
        assert all(map(torch.equal, in_order(operands), expected))
        # Every forward copies them again, with their scales.
        for scale in copied:
            scale.mul_(2)
        expected = in_order(operands_of_resident(root))


def operands_of_resident(root: nn.Module) -> Operands:
    """The operands of a network whose weights are all on the GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding_module, "lies_away", lambda parameter, device: False)
        return operands_of(bound_to(root))


@pytest.mark.parametrize("kinds", [("int8", "int8"), ("flat", "int8")], ids=str)
def test_unbinding_gives_every_tensor_its_own_memory_and_equal_values_again(kinds: Any) -> None:
    """Binding puts the biases of both layers in one tensor, and their weights as well if these have the same format."""
    root = network(*kinds)
    before = [tensor.clone() for tensor in File().tensors(list(root.children()))]
    binding = bound_to(root)
    lie_together = kinds[0] == kinds[1]
    assert shares_storage(root.first.stored.values) is lie_together is shares_storage(root.second.bias)
    binding.unbind()
    now = File().tensors(list(root.children()))
    assert all(map(torch.equal, now, before)) and not any(map(shares_storage, now))


def test_layers_of_one_operand_in_two_dtypes_are_refused_unless_one_is_quantized() -> None:
    root = network("int8", None)
    root.second.weight.data = root.second.weight.data.half()
    bound_to(root)
    del root.first.__dict__["stored"]
    with pytest.raises(Refusal, match="the layers of both are stored in several types"):
        bound_to(root)


@pytest.mark.parametrize("edit", ["values", "scale", "bias"])
def test_an_edit_in_place_changes_the_digests_of_weights(edit: str) -> None:
    """identity() covers all weights: the result of a check against the host is stored under it. checkpoint() covers
    only biases and norms: measured errors of 8-bit formats are stored under it. The same numbers in another format also
    change identity()."""
    root = network("int8", "int8")
    traits = HostTraits(stored=File())
    bound = BoundNetwork(root, lambda module: layout(), traits)
    call: Any = SimpleNamespace(latent=torch.zeros(1))
    bound.refresh(call)
    before = bound.identity(), bound.checkpoint()
    assert before == (bound.identity(), bound.checkpoint())
    stored = root.second.stored
    {"values": stored.values, "scale": stored.scales[0], "bias": root.second.bias}[edit].mul_(2)
    bound.refresh(call)
    assert bound.identity() != before[0] and (bound.checkpoint() != before[1]) is (edit == "bias")
    epoch = bound.epoch
    # The same numbers in another format.
    before = bound.identity(), ""
    root.second.__dict__["stored"] = stored._replace(format=BY_ROWS["turned"])
    bound.refresh(call)
    assert bound.identity() != before[0]
    assert bound.epoch != epoch and bound.binding.layers.format_names() == ["INT8", "INT8 (ConvRot)"]


@pytest.mark.parametrize("is_scaled", [False, True])
def test_of_rows_keeps_only_the_loras_that_add_to_these_rows_and_the_output_stays_the_same(is_scaled: bool) -> None:
    """LowRank holds the LoRAs of a fused layer, each of which adds to some of its rows; of_rows() returns those of one
    range of rows. Here a LoRA of rank 1 adds to the first range, two LoRAs, of ranks 2 and 3, add to the second, and
    none to the third. is_scaled: whether each LoRA has a scale, a scalar."""
    x, down = torch.randn(2, WIDTH), torch.randn(6, WIDTH)
    ups = ((0, torch.randn(4, 1)), (4, torch.randn(2, 2)), (4, torch.randn(2, 3)))
    scales = tuple(torch.rand(3)) if is_scaled else ()
    whole = LowRank(down, ups, scales)
    weight = torch.zeros(9, WIDTH)
    expected = operators.linear(x, LayerWeights(weight, None, (), whole))
    for first, count, ranks in ((0, 4, 1), (4, 2, 5), (6, 3, 0)):
        part = whole.of_rows(first, count)
        assert (0 if part is None else len(part.down)) == ranks
        found = operators.linear(x, LayerWeights(weight[:count], None, (), part))
        assert torch.allclose(found, expected[:, first:first + count], atol=1e-5)


# --- without weights in few bits ----------------------------------------------------------------------------------

def plain(weight: Tensor) -> dict[str, LayerWeights]:
    return {"layer": LayerWeights(weight, torch.ones(2))}


def computing_in_half() -> Any:
    """A stand-in for a float16 binding, with the attributes that steps_of() reads."""
    return SimpleNamespace(dtype=HALF, layers=SimpleNamespace(formats={}))


def applied_to(dtype: torch.dtype = HALF, **found: dict[str, Tensor]) -> AppliedFunctions:
    applied = AppliedFunctions(dtype, torch.device("cpu"))
    applied.weights = found.get("weights", {})
    applied.biases = found.get("biases", {})
    down = torch.ones(1, 3, dtype=HALF)
    applied.low_rank = {"layer": LowRank(down, ((0, down.t()),))}
    return applied


def test_weights_changed_by_functions_of_the_webui_are_not_cast_again() -> None:
    """Their results are already in the model's dtype, and become the operand as they are."""
    changed, bias = torch.full((2, 3), 7, dtype=HALF), torch.zeros(2, dtype=HALF)
    before = plain(torch.ones(2, 3))
    applied = applied_to(weights={"layer": changed}, biases={"layer": bias})
    operands = Operands(before, steps_of(computing_in_half(), before, None, (), applied))
    assert operands["layer"].weight is changed and operands["layer"].bias is bias and operands.bias("layer") is bias


def test_a_copy_in_eight_bits_replaces_the_weight_and_its_loras() -> None:
    """Low-bit has quantized the weight with the LoRA merged into it. alone: layers of which only the copy in 8 bits is
    read, so that the operand has no values in float16."""
    low_bit = (QuantizedWeight(torch.ones(2, 3, dtype=torch.int8), torch.ones(1, 1)),)
    for alone in (frozenset[str](), frozenset({"layer"})):
        last = WithLowBit({"layer": low_bit}, {}, HALF, alone)
        before = plain(torch.ones(2, 3))
        operand = Operands(before, steps_of(computing_in_half(), before, None, (), applied_to(), last))["layer"]
        assert operand.low_bit is low_bit and operand.low_rank is None
        assert operand.weight.is_meta == bool(alone) and operand.weight.dtype == HALF


def test_a_weight_read_twice_in_a_row_is_cast_once_and_reading_its_bias_casts_nothing() -> None:
    """Cast does not change the dtype of vectors, such as norms and biases, unless vectors=True."""
    before = {**plain(torch.ones(2, 3)), "norm": LayerWeights(torch.ones(3), torch.ones(3))}
    operands = Operands(before, [Cast(HALF)])
    first = operands["layer"].weight
    assert operands["norm"] is before["norm"] and operands["layer"].weight is first
    assert operands.bias("layer") is before["layer"].bias
    every = Operands(before, [Cast(HALF, vectors=True)])
    assert {part.dtype for name in every for part in every[name][:2] if part is not None} == {HALF}


def test_the_reason_for_too_little_main_memory_names_the_two_amounts_that_were_compared(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of 256 MiB must leave 1 GiB free."""
    monkeypatch.setattr(main_memory, "free_main_memory", lambda: 1000 << 20)
    with pytest.raises(Refusal, match="1280 MiB must be free, and 1000 MiB are"):
        MainMemory().empty(8, HALF, pinned=False)
