"""What is compiled when a model is loaded is all that its calls need: any other region would come in a picture."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lib_onediff.bench.models import random_unet
from lib_onediff.engines.inductor.plan import regions_of, weights_without_numbers
from lib_onediff.model.call import DeepCachePass, DeepFeature, UNetCall
from lib_onediff.model.forward import condition, forward
from lib_onediff.model.layout import LayerNorm, UNetLayout
from lib_onediff.model.operators import Stream
from lib_onediff.model.read import read_layout
from lib_onediff.model.weights import Affine, Weights
from lib_onediff.ops.inductor.operators import Recorder

CPU, META = torch.device("cpu"), torch.device("meta")
# Height, width, batch and tokens: what the plan does not think of, and with halves that are odd.
CALLS = [(90, 120, 5, 231), (45, 23, 2, 77), (45, 23, 1, 154)]


def of(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=META)


def needed(layout: UNetLayout, absent: Weights, call: UNetCall) -> set:
    recorder = Recorder(CPU)
    with torch.no_grad():
        forward(layout, absent, recorder, call, condition(layout, absent, recorder, call.context, call.y))
    return set(recorder.needed)


def a_call(layout: UNetLayout, shape: tuple[int, ...], deepcache: DeepCachePass | None = None) -> UNetCall:
    *size, batch, tokens = shape
    y = None if layout.y_width is None else of(batch, layout.y_width)
    context = of(batch, tokens, layout.context_width)
    return UNetCall(of(batch, layout.in_channels, *size), of(batch), context, y, deepcache=deepcache)


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_no_call_needs_a_region_that_is_not_planned(name: str) -> None:
    unet = random_unet(name, META)
    layout = read_layout(unet)
    absent = weights_without_numbers(unet, layout, torch.float16)
    planned = {single: set(regions_of(layout, absent, CPU, single)) for single in (False, True)}
    assert planned[False] and planned[True]
    for shape in CALLS:
        assert needed(layout, absent, a_call(layout, shape)) <= planned[shape[2] == 1], shape
    feature = DeepFeature()
    for cached in (False, True):
        assert needed(layout, absent, a_call(layout, CALLS[1], DeepCachePass(1, cached, feature))) <= planned[False]


def test_a_layer_norm_without_a_bias_is_computed_by_the_same_region() -> None:
    recorder, weight, norm = Recorder(CPU), of(320), LayerNorm("norm", 320, 1e-5)
    for bias in (of(320), None):
        recorder.layer_norm(Stream(of(2, 64, 320)), Affine(weight, bias), norm, Affine(weight, None))
    assert len(recorder.needed) == 1
