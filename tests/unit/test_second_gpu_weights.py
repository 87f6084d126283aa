"""Calls on two cards: what the second card's copy of the weights follows, and when it goes."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from builders import diffusers_unet, randomise
from deepcache_builders import WEBUI, equal_distances, few_steps_suffice  # noqa: F401
from torch import nn
from two_cpus import (
    Image,
    change_by_data,
    change_in_place,
    change_one_layer,
    exact,
    near,
)

from lib_onediff.options.settings import Settings
from lib_onediff.weights.scan import HostTraits


def change_by_loading(unet: nn.Module) -> None:
    unet.load_state_dict(randomise(diffusers_unet(), 7).state_dict())


def test_the_copy_of_the_weights_is_made_once_and_counted() -> None:
    image = Image.of()
    weights = sum(parameter.nbytes for parameter in image.unet.parameters())
    for _ in range(3):
        image.begin()
        image.run(image.call())
    (copy,) = image.copies
    assert image.second["bytes"] == weights
    assert {parameter._version for parameter in copy.parameters()} == {1}
    theirs = {tensor.untyped_storage().data_ptr() for tensor in image.unet.parameters()}
    assert all(tensor.untyped_storage().data_ptr() not in theirs for tensor in copy.parameters())


@pytest.mark.parametrize("traits", [WEBUI, HostTraits()], ids=["new tensors at every call", "the same prompt"])
@pytest.mark.parametrize("change", [change_in_place, change_one_layer, change_by_data, change_by_loading])
@pytest.mark.parametrize("begins", [True, False], ids=["between samplings", "within a sampling"])
def test_the_copy_follows_every_change_of_the_weights(
    change: Callable[[nn.Module], None], traits: HostTraits, begins: bool
) -> None:
    image = Image.of(traits=traits)
    image.begin()
    call = image.call()
    before = image.run(call)
    with torch.no_grad():
        change(image.unet)
    if begins:
        image.begin()
        call = replace(call, context=call.context.clone())
    output = image.run(call)
    assert image.second["split"] and near(output, exact(image, call))
    assert not near(output[1:], before[1:])


def test_another_checkpoint_has_a_copy_of_its_own_and_a_gone_one_leaves_none() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    other = diffusers_unet(seed=3)
    image.runtime.adopt(other, host_traits=WEBUI)
    second = replace(image, unet=other)
    second.begin()
    assert near(second.run(call := second.call()), exact(second, call))
    assert image.second["bytes"] == 2 * sum(parameter.nbytes for parameter in other.parameters())
    del image
    second.runtime.release(other)
    assert second.second["bytes"] == 0 or len(second.runtime.two_gpus._pairs) == 0


def test_out_of_memory_on_the_second_card_leaves_one_until_something_changes() -> None:
    image = Image.of()
    image.cards.full = True
    image.begin()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert "out of memory on cpu:1" in image.second["reason"] and image.second["split"] == ""
    assert image.second["bytes"] == 0 and not image.copies
    image.cards.full = False
    for _ in range(2):
        image.begin()
        image.run(call)
        assert "out of memory on cpu:1" in image.second["reason"]
    with torch.no_grad():
        change_in_place(image.unet)
    image.begin()
    image.run(call)
    # The call that finds the change out is computed by one.
    image.run(call)
    assert image.second["split"] == "cpu + cpu:1, 1+1 rows"


def test_switched_off_between_two_calls_the_second_card_is_given_back() -> None:
    image = Image.of()
    image.begin()
    image.run(image.call())
    image.runtime.configure(Settings())
    assert not image.copies and image.second == {"calls": 1, "split": "", "reason": "", "bytes": 0}
    image.cards.launched.clear()
    call = image.call()
    assert near(image.run(call), exact(image, call))
    assert image.cards.launched == [] and image.second["calls"] == 1
    image.runtime.configure(Settings(second_gpu="auto"))
    assert near(image.run(call), exact(image, call)) and image.second["calls"] == 2


def test_weights_whose_edits_nobody_counts_are_copied_at_every_sampling() -> None:
    image = Image.of()
    with torch.inference_mode():
        unet = diffusers_unet(seed=5)
    image.runtime.adopt(unet, host_traits=WEBUI)
    image = replace(image, unet=unet)
    for _ in range(3):
        image.begin()
        for time in (901.0, 501.0):
            call = image.call(time)
            assert near(image.run(call), exact(image, call)) and image.second["split"]
        with torch.inference_mode():
            change_in_place(unet)
    (copy,) = image.copies
    assert {parameter._version for parameter in copy.parameters()} == {3}


def test_tiling_goes_to_both_cards_and_back() -> None:
    image = Image.of()
    call, outputs = image.call(), []
    for mode in ("zeros", "circular", "zeros"):
        for module in image.unet.modules():
            if isinstance(module, nn.Conv2d):
                module.padding_mode = mode
        image.begin()
        outputs.append(image.run(call))
        assert image.second["split"] and near(outputs[-1], exact(image, call)) and len(image.copies) == 1
    assert not near(outputs[0], outputs[1]) and near(outputs[0], outputs[2])
