"""Checkpoints whose weights Forge Neo stores in few bits: our forward computes with the file's own numbers, an edit of
them counts at the next call, and what we do not know is the host's."""
from __future__ import annotations

from collections.abc import Iterator

import pytest
from builders import relative_error
from contract_hosts import Made, calls_of, running
from stored_hosts import DISABLED, FORMATS, StoredAnima, StoredUNet, sensitivity, stored_bits, tensors_of
from test_generations import OURS, same
from test_weight_functions import network

from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.binding import shares_storage

CLOSE = 1e-5


@pytest.fixture
def host(fresh_runtime: None) -> Iterator[StoredAnima]:
    with running("neo", StoredAnima) as made:
        yield made


@pytest.fixture
def unet_host(fresh_runtime: None) -> Iterator[StoredUNet]:
    with running("neo", StoredUNet) as made:
        yield made


def in_file(host: StoredAnima | StoredUNet) -> Made:
    """What the host makes of the numbers in the file: INT8 as it multiplies them, else without rounding what layers
    read."""
    with host.decoding():
        return host.generate()


def limit_of(host: StoredAnima | StoredUNet, name: str) -> float:
    """How far ours may be from that, before OneDiff has been started."""
    return max(CLOSE, 4 * sensitivity(host)) if name.startswith("INT8") else CLOSE


CASES = [
    *(("host", name, DISABLED) for name in FORMATS), ("host", "MXFP8", ()), ("host", "NVFP4", ()),
    ("unet_host", "INT8 (ConvRot)", DISABLED), ("unet_host", "FP8 (e4m3, scaled)", DISABLED),
    ("unet_host", "NVFP4", DISABLED), ("unet_host", "GGUF Q4_K", DISABLED),
]


@pytest.mark.parametrize(("of", "name", "disabled"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_every_format_is_ours_and_nothing_is_left(
    of: str, name: str, disabled: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    """disabled: the formats that this card has no units for. Where it has them, the host rounds what layers read, and
    ours is nearer to the file."""
    host = request.getfixturevalue(of)
    plain = host.generate()
    host.store(name, disabled)
    expected, exact, limit = host.generate(), in_file(host), limit_of(host, name)
    assert relative_error(expected.latent, plain.latent) > 1e-3
    before, parameters = stored_bits(host), dict(host.unet.named_parameters())
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
