"""Decodes on a machine with native kernels: who serves when they fail, and the kernels themselves, interpreted."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backend_names import NATIVE
from builders import relative_error
from ladder_builders import seem_to_have_a_gpu
from vae_builders import a_latent, decodes, diffusers_vae, host_picture, last, our_picture

from lib_onediff.engines.device import NotYet
from lib_onediff.engines.native import COMPILING
from lib_onediff.ops import torch_ops
from lib_onediff.runtime.runtime import runtime

pytestmark = pytest.mark.usefixtures("fresh_route", "exact_products")


class Stand:
    """torch's operators in the place of our kernels, whose resize may be made to fail or to be wrong."""

    def __init__(self) -> None:
        self.resize: Any = torch_ops.resize
        self.ready: Any = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_ops, name)

    def breaks(self, *given: Any) -> Any:
        raise RuntimeError("no such kernel")


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    stand = Stand()
    seem_to_have_a_gpu(monkeypatch, stand)
    monkeypatch.setattr(runtime.devices.named(NATIVE), "prepare", lambda *args, **more: stand.ready())
    return stand


def not_yet() -> None:
    raise NotYet(COMPILING)


def entries() -> dict[str, str]:
    return {entry.key.backend: entry.state.value for entry in runtime.table.entries()}


def test_a_kernel_that_fails_is_served_by_torchs_operators(native: Stand) -> None:
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    native.resize = native.breaks
    reason = "our forward failed: no such kernel (backend native)"
    for _ in range(2):
        assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
        assert last() == ("ours", reason)
    assert entries() == {"native": "failed", "eager": "proved"}
    native.resize = torch_ops.resize
    our_picture(decoder, a_latent(decoder, 3, 3))
    assert last() == ("ours", "")


def test_a_kernel_that_computes_something_else(native: Stand) -> None:
    """The host's own image is at hand then; the next one is torch's operators'."""
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    native.resize = lambda *given: 1.01 * torch_ops.resize(*given)
    assert torch.equal(our_picture(decoder, latent), host_picture(decoder, latent))
    route, reason = last()
    assert route == "host" and reason.endswith("(backend native)")
    assert relative_error(our_picture(decoder, latent), host_picture(decoder, latent)) < 1e-5
    assert last() == ("ours", reason)


def test_kernels_that_are_still_being_compiled(native: Stand) -> None:
    decoder = diffusers_vae().decoder
    latent = a_latent(decoder)
    native.ready = not_yet
    assert torch.equal(our_picture(decoder, latent), host_picture(decoder, latent))
    assert last() == ("host", COMPILING)
    native.ready = lambda: None
    our_picture(decoder, latent)
    assert last() == ("ours", "") and decodes() == {"ours": 1, "host": 1}
