"""A toy transformer as a family: the files that "Add a transformer" in .readme/developing.md lists are enough."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from toy_transformer.call import ToyTransformerCall
from toy_transformer.family import ToyTransformers
from toy_transformer.network import ToyTransformer

from lib_onediff.core.inputs import take_rows
from lib_onediff.core.key import ShapeKey
from lib_onediff.core.refusal import Refusal
from lib_onediff.devices.torch.device import Eager
from lib_onediff.runtime.runtime import Runtime

FAMILY = ToyTransformers()


class Served:
    """A toy transformer, and a runtime with no other family."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = ToyTransformer()
        self.runtime = Runtime(policies=(), devices=(Eager(),), families=(FAMILY,))
        self.runtime.adopt(self.network)
        self.layout = self.runtime.services.families.read(self.network)

    def call(self, height: int = 8, width: int = 8, batch: int = 2, tokens: int = 5) -> ToyTransformerCall:
        return FAMILY.example(self.layout, (height, width), batch, tokens, torch.randn)

    def host(self, call: ToyTransformerCall) -> torch.Tensor:
        return self.network(call.latent, call.timestep, call.context, call.mask)

    def check(self, call: ToyTransformerCall) -> None:
        with torch.no_grad():
            expected = self.host(call)
            output = self.runtime.run(self.network, call, lambda: self.host(call))
        status = self.runtime.status()
        assert (status["route"], status["model"]) == ("plain", "Toy transformer"), status["reason"]
        assert torch.allclose(output, expected, atol=1e-5)


def some_of(mask: Any) -> torch.Tensor:
    """The mask without the last tokens of the first prompt."""
    mask = mask.clone()
    mask[0, 2:] = False
    return mask


def test_onediff_computes_a_toy_transformer_and_an_edit_takes_effect_at_the_next_call() -> None:
    """The outputs at two sizes, without a mask and with masks, are close to those of the network's own forward."""
    served = Served()
    for size in ((8, 8), (4, 12)):
        call = served.call(*size)
        for mask in (None, call.mask, some_of(call.mask)):
            served.check(replace(call, mask=mask))
    with torch.no_grad():
        served.network.blocks[1].cross_k.weight.mul_(2)
    served.check(served.call())


def test_a_field_that_a_family_adds_to_its_calls_is_split_by_rows_and_is_part_of_the_key() -> None:
    """The field is the mask. Calls with and without a mask have different keys (ShapeKey); the values of the mask make
    no difference."""
    served = Served()
    call = served.call()
    masked = replace(call, mask=some_of(call.mask))
    taken = take_rows(masked, slice(0, 1))
    assert taken.mask is not None and torch.equal(taken.mask, masked.mask[:1])
    without = replace(call, mask=None)
    assert masked.signature == call.signature != without.signature
    keys = [ShapeKey.of("toy", torch.float32, one) for one in (call, masked, without)]
    assert keys[0] == keys[1] != keys[2]


def test_units_name_every_layer_of_the_layout_once() -> None:
    """Units are the groups of layers that are streamed together. A fused layer is named in place of its members."""
    served = Served()
    layout = served.layout
    named = [name for unit in FAMILY.units(layout, served.call()) for name in unit]
    members = {member.path for fused in layout.fusions() for member in fused.members}
    expected = {fused.name for fused in layout.fusions()} | {leaf.path for leaf in layout.leaves()} - members
    assert set(named) == expected and len(named) == len(expected)


@pytest.mark.parametrize("changes", [
    {"latent": torch.ones(2, 3, 8, 8)}, {"latent": torch.ones(2, 4, 8, 7)}, {"context": torch.ones(2, 5, 8)},
    {"mask": torch.ones(2, 4, dtype=torch.bool)},
], ids=["channels", "size", "prompt", "mask"])
def test_a_call_whose_inputs_do_not_fit_the_network_is_refused(changes: dict[str, torch.Tensor]) -> None:
    served = Served()
    with pytest.raises(Refusal):
        FAMILY.refuse_call(served.layout, replace(served.call(), **changes))
