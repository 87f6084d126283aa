"""Calls on two cards: how rows are split, computed and joined."""
from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL, SMALL_XL, diffusers_output, diffusers_unet, our_output
from deepcache_builders import EVERY_THIRD, STEPS, WEBUI, equal_distances, few_steps_suffice  # noqa: F401
from torch import Tensor
from two_cpus import (
    SECOND,
    Image,
    exact,
    near,
)

from lib_onediff.core.call import Control, UNetCall
from lib_onediff.weights.scan import HostTraits


@pytest.mark.parametrize("config", [SMALL, SMALL_XL], ids=["SD1", "SDXL"])
@pytest.mark.parametrize("traits", [WEBUI, HostTraits()], ids=["new tensors at every call", "the same prompt"])
@pytest.mark.parametrize(("names", "rows"), [
    (("cat", "ugly"), "1+1"), (("cat", "dog", "ugly"), "2+1"), (("a", "b", "c", "d", "e", "f"), "3+3"),
])
def test_each_card_computes_its_rows_and_they_come_back_in_their_places(
    config: dict[str, Any], traits: HostTraits, names: Any, rows: str
) -> None:
    image = Image.of(config, traits)
    image.begin()
    first = image.call(names=names)
    for time in (901.0, 501.0, 101.0):
        call = replace(image.call(time, names), context=first.context, y=first.y)
        output = image.run(call)
        assert output.shape == call.latent.shape and near(output, exact(image, call))
        assert image.second["split"] == f"cpu + cpu:1, {rows} rows"
    assert image.second["calls"] == 3 and image.second["reason"] == ""
    assert SECOND in image.cards.launched and len(image.copies) == 1
    assert image.runtime.call_stats.total == 3 and image.runtime.guard.faults == []


def control_of(unet: Any, call: UNetCall, rows: int) -> Control:
    shapes: list[torch.Size] = []
    hooks = [unet.conv_in.register_forward_hook(lambda module, args, out: shapes.append(out.shape))]
    for block in unet.down_blocks:
        hooks.append(block.register_forward_hook(lambda module, args, out: shapes.extend(o.shape for o in out[1])))
    hooks.append(unet.mid_block.register_forward_hook(lambda module, args, out: shapes.append(out.shape)))
    with torch.no_grad():
        diffusers_output(unet, call)
    for hook in hooks:
        hook.remove()
    residuals = [torch.randn(rows, *shape[1:]) for shape in shapes]
    return Control(middle=(residuals[-1],), output=tuple(reversed(residuals[:-1])))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.usefixtures("unchecked")
def test_residuals_of_a_controlnet_are_cut(rows: int) -> None:
    one, two = Image.of(second_gpu="off"), Image.of()
    call = two.call()
    controlled = replace(call, control=control_of(two.unet, call, rows))
    for image in (one, two):
        image.begin()
    def host() -> Tensor:
        return our_output(diffusers_unet(**SMALL), controlled)

    output = two.run(controlled, host)
    assert two.second["split"] and near(output, one.run(controlled, host))
    assert not near(output, exact(two, call))


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_first_use_is_checked_in_every_row(row: int) -> None:
    """A host that answers otherwise in one row is what an error of ours there looks like."""
    image = Image.of()
    image.begin()
    call = image.call(names=("cat", "dog", "ugly"))
    wrong = exact(image, call)
    wrong[row] += 1
    image.run(call, lambda: wrong)
    assert "differs from the model's own forward" in image.second["reason"] and image.second["calls"] == 0


def test_two_threads_get_their_own_rows() -> None:
    image = Image.of()
    image.begin()
    calls = [image.call(time) for time in STEPS]
    expected = [exact(image, call) for call in calls]
    found: list[Tensor | None] = [None] * len(calls)

    def work(start: int) -> None:
        for place in range(start, len(calls), 2):
            found[place] = image.run(calls[place])

    threads = [threading.Thread(target=work, args=(start,)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(output is not None and near(output, one) for output, one in zip(found, expected, strict=True))
    assert image.second["calls"] == len(calls) and image.runtime.guard.faults == []
