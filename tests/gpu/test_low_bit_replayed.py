"""Low-bit on a real GPU: a UNet whose CUDA graphs multiply in 8 bits."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from exact_operators import relative_error
from torch import Tensor, nn

pytest.importorskip("diffusers")

from gpu_calls import arguments, called, host, last_call

from lib_onediff.public import compile_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import low_bit

pytestmark = pytest.mark.gpu
# The largest relative error, by option.
NEAR = {"fp8": 0.12, "int8": 5e-2, "auto": 0.12}


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    runtime.purge()
    yield
    runtime.release_all()
    runtime.purge()


@pytest.fixture
def every_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All products are computed in eight bits, although the networks are small."""
    monkeypatch.setattr(low_bit, "FEWEST_WEIGHTS", 0)
    ours = runtime.devices.lossy.low_bit
    ours.forget()
    # In turn, if there are several formats.
    monkeypatch.setattr(ours, "_best", lambda product, dtype, kinds: kinds[product.out // 32 % len(kinds)])
    monkeypatch.setattr(ours, "gains", lambda product, dtype, kind: 1.0)
    yield
    ours.forget()


def replayed(unet: nn.Module, given: dict[str, Any], lossy: str, calls: int = 3) -> Tensor:
    output = [called(unet, given) for _ in range(calls)][-1]
    assert (last_call()["lossy"], last_call()["route"]) == (lossy, "graph"), last_call()["reason"]
    return output


@pytest.mark.parametrize("size", [(128, 128), (120, 72)], ids=str)
@pytest.mark.usefixtures("every_product")
def test_a_replay_in_eight_bits_is_close_to_the_host_and_low_bit_can_be_switched_off_and_on(
    tiny: nn.Module, option: str, size: tuple[int, int]
) -> None:
    """The error relative to the host's output is below 5 % (int8) or 12 %, and above 1e-4, which shows that products
    ran in 8 bits. While low-bit is off, its weights are freed and the error is below 1 %. option: the value of
    Settings.low_bit. size: the size of the image in pixels."""
    compile_unet(tiny, low_bit=option)
    given = arguments(tiny, *size)
    expected = host(tiny, given)
    error = relative_error(replayed(tiny, given, "8-bit"), expected)
    assert 1e-4 < error < NEAR[option]
    assert runtime.totals().low_bit > 0
    compile_unet(tiny)
    exact = replayed(tiny, given, "")
    assert runtime.totals().low_bit == 0
    compile_unet(tiny, low_bit=option)
    assert relative_error(exact, expected) < 1e-2
    assert relative_error(replayed(tiny, given, "8-bit"), expected) < NEAR[option]
