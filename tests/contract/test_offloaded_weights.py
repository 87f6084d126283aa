"""Low-bit only inside the hosts: weights that wait in the computer's memory are where the host merges and computes."""
from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import relative_error
from contract_hosts import FAMILY, A1111Host, Host, calls_of, running
from graph_builders import PretendedGraphs
from ladder_builders import Weather, pretend_a_gpu
from test_blocks import controlled_forward
from test_generations import same

pytest.importorskip("triton", reason="needs Triton")

from low_bit_builders import use_low_bit, watch_offloaded

from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights import offload
from lib_onediff.weights.offload import OffloadedWeights

ONLY = "8-bit only"
ALONE = Settings(low_bit="int8", low_bit_only=True)


@pytest.fixture
def int8(fresh_runtime: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has INT8, for models in float32 too."""
    pretend_a_gpu(monkeypatch, Weather())
    use_low_bit(monkeypatch)
    watch_offloaded(monkeypatch)
    monkeypatch.setattr(runtime.devices.lossy.low_bit, "_lack", lambda kind, device, dtype: None)
    graphs = PretendedGraphs()
    monkeypatch.setattr(runtime.services.holdings, "made", graphs)
    monkeypatch.setattr(runtime.services.holdings, "card", graphs.card)


@pytest.fixture
def a1111(int8: None) -> Iterator[A1111Host]:
    with running("a1111") as made:
        yield made


def begin(host: Host) -> None:
    host.start()
    runtime.configure(ALONE)


def offloaded(host: Host) -> OffloadedWeights:
    managed = runtime.managed_unet(host.unet)
    assert managed is not None
    return managed.bound.offloaded


def near(made: Any, expected: Any) -> bool:
    return relative_error(made.latent, expected.latent) < 0.05


def generated(host: Host) -> Any:
    """The second of two generations: the first checks its shape, with the host's weights."""
    host.generate()
    return host.generate()


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_keeps_its_weights(name: str, int8: None) -> None:
    with running(name) as host:
        expected = host.generate()
        begin(host)
        assert near(generated(host), expected)
        status = runtime.status()
        assert status["lossy"] == "8-bit" and "Low-bit only is not for" in status["reason"]
        assert not offloaded(host) and runtime.totals().low_bit > 0


def test_loras_are_merged_where_the_host_merges_them(a1111: A1111Host, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each LoRA brings the weights back, and so does its check: no image is made as fast as these.
    monkeypatch.setattr(offload, "SECONDS_OF_MANY", 0.0)
    strengths, expected = (0.0, 0.5, 0.25, 0.0, 0.5), []
    for strength in strengths:
        a1111.set_lora(strength)
        expected.append(a1111.generate())
    a1111.set_lora(0.0)
    a1111.generate()
    begin(a1111)
    networks = a1111.module("networks")
    merge, merged = networks.network_apply_weights, []

    def watched(layer: Any) -> None:
        merged.append(bool(layer._forward_pre_hooks))
        merge(layer)

    monkeypatch.setattr(networks, "network_apply_weights", watched)
    first = {}
    for strength, hosts in zip(strengths, expected, strict=True):
        a1111.set_lora(strength)
        made = generated(a1111)
        assert runtime.status()["lossy"] == ONLY and offloaded(a1111), runtime.status()["reason"]
        assert near(made, hosts)
        assert same(made, first.setdefault(strength, made)), "rounded from the originals again"
    assert relative_error(first[0.5].latent, first[0.0].latent) > 1e-2
    assert merged and not any(merged), "not in the computer's memory, where they would be rounded in another way"
    a1111.switch(False)
    assert same(a1111.generate(), expected[-1])


def controlled(host: A1111Host) -> None:
    host.unet.forward = types.MethodType(controlled_forward, host.unet)


def hypernetwork(host: A1111Host) -> None:
    host.module("modules.shared").loaded_hypernetworks.append(object())


@pytest.mark.parametrize("change", [controlled, hypernetwork])
def test_who_else_computes_has_the_weights(a1111: A1111Host, change: Callable[[A1111Host], None]) -> None:
    plain = a1111.generate()
    before = {name: value.clone() for name, value in a1111.unet.state_dict().items()}
    begin(a1111)
    generated(a1111)
    assert offloaded(a1111)
    change(a1111)
    made, calls = calls_of(a1111.generate)
    assert not offloaded(a1111) and runtime.totals().low_bit == 0
    assert all(torch.equal(value, before[name]) for name, value in a1111.unet.state_dict().items())
    assert bool(torch.isfinite(made.latent).all())
    assert near(made, plain)
    assert calls == ({"blocks": 2} if change is controlled else {"host": 2})
    assert change is not hypernetwork or torch.equal(made.latent, plain.latent)
