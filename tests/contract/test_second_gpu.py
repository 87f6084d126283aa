"""A second GPU in every WebUI, which here is this CPU once more: images are the host's, and LoRAs reach both."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from builders import relative_error
from contract_hosts import Host
from two_cpus import SECOND, TwoCpus

from lib_onediff.core.settings import Settings
from lib_onediff.runtime.runtime import runtime


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoCpus]:
    found = TwoCpus()
    monkeypatch.setattr(runtime.two_gpus, "cards", found)
    yield found
    runtime.two_gpus.forget_all()


def second() -> dict[str, Any]:
    found: dict[str, Any] = runtime.status()["second_gpu"]
    return found


def test_images_are_the_hosts_with_every_lora_and_both_cards_compute_them(host: Host, cards: TwoCpus) -> None:
    expected = []
    for strength in (0.0, 0.5, 1.0, 0.0):
        host.set_lora(strength)
        expected.append(host.generate().latent)
    host.start()
    runtime.configure(Settings(second_gpu="auto"))
    for place, strength in enumerate((0.0, 0.5, 1.0, 0.0)):
        host.set_lora(strength)
        before = second()["calls"]
        latent = host.generate().latent
        assert relative_error(latent, expected[place]) < 1e-5, (place, second())
        assert second()["calls"] - before == 2, second()["reason"]
    assert SECOND in cards.launched and second()["split"] == "cpu + cpu:1, 1+1 rows"
    assert runtime.guard.faults == [] and relative_error(expected[1], expected[0]) > 1e-3
