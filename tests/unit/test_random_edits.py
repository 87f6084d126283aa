"""Whatever is edited under a compiled UNet counts at the next call: by graph or not, with the same prompt or not."""
from __future__ import annotations

import contextlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_arguments, diffusers_unet, relative_error
from graph_builders import PretendedGraphs
from grid import WHOLE
from ladder_builders import NATIVE
from random_edits import EDITS, edited

import lib_onediff
from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
EDITS_OF_A_UNET = len(EDITS) + 11


def must_be_right(unet: Any, call: Any, what: str) -> None:
    given = diffusers_arguments(call)
    with torch.no_grad():
        output, expected = unet(**given).sample, type(unet).forward(unet, **given).sample
    error = relative_error(output, expected)
    assert error < CLOSE, f"{what}: {error:.1e} by {runtime.status()['route']}, {runtime.status()['reason']}"


@pytest.mark.parametrize("seed", range(25 if WHOLE else 1))
def test_an_edit_counts_at_the_next_call(pretended: PretendedGraphs, seed: int) -> None:
    chance = random.Random(seed)
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), backend=NATIVE)
    call = a_call(unet)
    for _ in range(4):
        must_be_right(unet, call, "unedited")
    graphs = runtime.status()["calls"]["graph"]
    assert graphs, runtime.status()["reason"]
    for what in edited(unet, chance, EDITS_OF_A_UNET):
        if chance.random() < 0.5:
            call = replace(call, context=call.context.clone() + 0.1, y=call.y.clone())
        loop = lib_onediff.sampling(unet) if chance.random() < 0.5 else contextlib.nullcontext()
        with loop:
            for _ in range(chance.choice([1, 1, 4])):
                must_be_right(unet, call, what)
    assert runtime.status()["calls"]["graph"] > graphs
