"""What is compiled in regions: which ones, what they compute, guards read from the disk, processes that help."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from builders import diffusers_structure, relative_error
from torch import Tensor

from lib_onediff.bench.models import CONFIGURATIONS
from lib_onediff.engines.inductor.helper import CannotCompile
from lib_onediff.engines.inductor.plan import regions_of, weights_without_numbers
from lib_onediff.model.call import DeepCachePass, DeepFeature, UNetCall
from lib_onediff.model.forward import forward
from lib_onediff.model.layout import LayerNorm, UNetLayout
from lib_onediff.model.operators import Stream
from lib_onediff.model.read import read_layout
from lib_onediff.model.weights import Affine, Weights
from lib_onediff.ops.inductor.artifact import Artifact, Order
from lib_onediff.ops.inductor.operators import InductorOperators, Recorder, channels_last, image_of, pixels
from lib_onediff.ops.inductor.regions import NeedsAnotherGraph, group_norm, layer_norm
from lib_onediff.ops.inductor.size_guard import LONGEST, SizeGuard

CPU, META = torch.device("cpu"), torch.device("meta")
# Height, width, batch and tokens: what the plan does not think of, and with halves that are odd.
CALLS = [(90, 120, 5, 231), (45, 23, 2, 77), (45, 23, 1, 154)]


# As wide as the real ones. Of SDXL's ten transformer blocks one behind another, all need the same.
ONE_BLOCK = {"sdxl": {"transformer_layers_per_block": 1}}


def of(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device=META)


def needed(layout: UNetLayout, absent: Weights, call: UNetCall) -> set:
    recorder = Recorder(CPU)
    with torch.no_grad():
        forward(layout, absent, recorder, call)
    return set(recorder.needed)


def a_call(layout: UNetLayout, shape: tuple[int, ...], deepcache: DeepCachePass | None = None) -> UNetCall:
    *size, batch, tokens = shape
    y = None if layout.y_width is None else of(batch, layout.y_width)
    context = of(batch, tokens, layout.context_width)
    return UNetCall(of(batch, layout.in_channels, *size), of(batch), context, y, deepcache=deepcache)


@pytest.mark.parametrize("name", ["sd15", "sd21", "sdxl"])
def test_no_call_needs_a_region_that_is_not_planned(name: str) -> None:
    with META:
        unet = diffusers_structure({**CONFIGURATIONS[name], **ONE_BLOCK.get(name, {})})
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


@pytest.mark.parametrize("shape", [(2, 16, 9, 5), (1, 16, 9, 5), (1, 16, 1, 1), (3, 16, 1, 4)])
def test_pixels_lie_as_compiled_code_was_told(shape: tuple[int, ...]) -> None:
    image = torch.randn(shape)
    batch, channels, height, width = shape
    again = pixels(channels_last(image))
    assert again.stride() == (channels * height * width, channels, 1)
    assert torch.equal(image_of(again, image), image)


@pytest.mark.parametrize("width", [320, 1031])
def test_a_layer_norm_with_what_is_owed(width: int) -> None:
    tokens = torch.randn(7, width)
    deferred_bias, weight, bias = (torch.randn(width) for _ in range(3))
    settled, normed = layer_norm(tokens, deferred_bias, weight, bias, 1e-5)
    expected = functional.layer_norm((tokens + deferred_bias).double(), (width,), weight.double(), bias.double(), 1e-5)
    assert torch.equal(settled, tokens + deferred_bias)
    assert relative_error(normed, expected.float()) < 1e-6


@pytest.mark.parametrize("shifted", [False, True])
def test_a_group_norm_by_channels_keeps_its_digits_far_from_zero(shifted: bool) -> None:
    pixel, weight, bias = torch.randn(2, 35, 64) + 1000, torch.randn(64), torch.randn(64)
    shift = torch.randn(2, 64) * 10 * shifted
    image = pixel.double() + shift.double()[:, None]
    expected = functional.group_norm(image.transpose(1, 2), 32, weight.double(), bias.double(), 1e-5).transpose(1, 2)
    normed = group_norm(pixel, shift, weight, bias, 32, 1e-5, False)
    assert relative_error(normed, expected.float()) < 1e-3


@pytest.mark.parametrize(("size", "wanted"), [((3, 5), (6, 10)), ((3, 5), (5, 9)), ((3, 5), (6, 9)), ((1, 4), (2, 8))])
def test_resize(size: tuple[int, int], wanted: tuple[int, int]) -> None:
    image = torch.randn(2, 7, *size)
    assert torch.equal(InductorOperators().resize(image, *wanted), functional.interpolate(image, wanted))


@pytest.mark.parametrize("text, sizes, passes", [
    ("2 <= L['t0']", (2,), True),
    ("2 <= L['t0']", (1,), False),
    ("2 <= L['t0'] and 2 <= L['t1']", (2, 1), False),
    ("2 <= L['t0'] and L['t1'] <= 4096 and L['t0'] != L['t1']", (2, 4096), True),
    ("2 <= L['t0'] < 9 < L[\"t1\"]", (8, 10), True),
    ("2 <= L['t0'] < 9 < L[\"t1\"]", (8, 9), False),
    ("L['t0'] % 8 == 0 or L['t0'] * 2 - -1 == L['t1'] // 3 + 5", (16, 0), True),
    ("L['t0'] % 8 == 0 or L['t0'] * 2 - -1 == L['t1'] // 3 + 5", (3, 6), True),
    ("L['t0'] % 8 == 0 or L['t0'] * 2 - -1 == L['t1'] // 3 + 5", (3, 9), False),
])
def test_what_torch_writes_is_read(text: str, sizes: tuple[int, ...], passes: bool) -> None:
    assert SizeGuard(text, len(sizes)).passes(sizes) is passes


@pytest.mark.parametrize("text", [
    "__import__('os').system('true') == 0", "print(1) == 1", "2 <= L['t0'] or __import__('os')",
    "False and __import__('os').abort() == 0", "1 == 2 == __import__('os').getpid()", "(lambda: 1)() == 1",
    "L.__class__ == 1", "L['t0'].__class__ == 1", "L['t1'] == 1", "L['t0'", "L[0] == 1", "t0 == 1",
    "torch.ones(1) == 1", "[1 for _ in 'a'] == 1", "'a' * 9 == 1", "2 ** 9 ** 9 == 1", "1 << 9 == 1", "9 is 9",
    "1.5 < L['t0']", "True == 1", "1", "not 1", "", "L['t0'] == 1\nimport os", "L['t0'] == 1 if 1 else 2",
    f"L['t0'] == {'(' * 500}1{')' * 500}", "1" * (LONGEST + 1), "1 // (L['t0'] - 1) == 1", f"{1 << 62} == 1", None, 7,
])
def test_nothing_else_is(text: str) -> None:
    with pytest.raises(ValueError, match="guard"):
        SizeGuard(text, 1)


def test_code_is_not_called_with_sizes_that_its_guard_forbids() -> None:
    import torch

    calls = []
    code = Artifact(lambda *given: calls.append(given) or [1], Order([[0, 0], [0, None]], 0, "2 <= L['t0']"))
    with pytest.raises(NeedsAnotherGraph, match="2 <= "):
        code(torch.zeros(1, 3))
    assert not calls and code(torch.zeros(2, 3)) == 1
    with pytest.raises(ValueError, match="guard"):
        Artifact(lambda: None, Order([[0, 0]], 0, "__import__('os').abort()"))


ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 120
# It is gone long before its helper has imported torch.
PARENT = """
import os, signal
from lib_onediff.engines.inductor.helper import start
from test_inductor_plan import Endless
print(start([Endless()] * {count}).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Endless:
    """Regions that take for ever."""

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        while True:
            time.sleep(0.1)
            yield Uncompilable(), ()


class Uncompilable:
    def __getattr__(self, name: str) -> Any:
        raise CannotCompile(name)


def is_alive(process: int) -> bool:
    try:
        # A zombie does nothing any more.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children_of(process: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("count", [1, 2])
def test_helpers_end_with_a_parent_that_dies_during_their_import(count: int) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    parent = subprocess.run(
        [sys.executable, "-c", PARENT.format(count=count)], env=environment, capture_output=True, text=True
    )
    helper = int(parent.stdout)
    assert parent.returncode == -signal.SIGKILL
    family = {helper}
    try:
        deadline = time.monotonic() + SECONDS_TO_END
        while any(map(is_alive, family)):
            assert time.monotonic() < deadline, "a helper has outlived its parent"
            family.update(*map(children_of, list(family)))
            time.sleep(0.1)
    finally:
        for process in filter(is_alive, family):
            os.kill(process, signal.SIGKILL)
