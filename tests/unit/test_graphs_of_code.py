"""A graph contains the results of torch's functions at its capture, so it is valid for that code alone."""
from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders import SMALL_XL, a_call, diffusers_unet, served
from ladder_builders import StandInOperators, error

import lib_onediff
from lib_onediff.families.registry import FAMILIES
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.bound import BoundNetwork
from lib_onediff.weights.mirror import MirrorNetwork, empty_copy

CLOSE = 1e-5


def test_a_graph_is_not_replayed_after_a_function_of_torch_was_replaced(native_operators: StandInOperators) -> None:
    """Both the host and our operators call torch.nn.functional.silu by its name, so a replacement affects both.
    bound.epoch.addresses is the number of the epoch in which graphs are valid: it changes at the first call after each
    replacement, and at no other."""
    unet = diffusers_unet(**SMALL_XL)
    lib_onediff.compile_unet(unet, backend="cudagraph")
    bound: Any = None
    silu = F.silu
    with torch.no_grad():
        for name in ("own", "replaced", "own", "replaced"):
            with pytest.MonkeyPatch.context() as patch:
                if name == "replaced":
                    patch.setattr(F, "silu", lambda given, inplace=False: 0.9 * silu(given))
                for seed in range(4):
                    before = None if bound is None else bound.epoch.addresses
                    assert error(unet, a_call(unet, seed=seed)) < CLOSE, (name, seed)
                    bound = runtime.services.networks.get(unet).bound
                    assert before is None or (bound.epoch.addresses != before) == (seed == 0), (name, seed)
    assert served(unet, a_call(unet)).isfinite().all()


def test_graphs_on_a_second_gpu_are_not_replayed_after_a_function_of_torch_was_replaced(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """MirrorNetwork is the copy of the network on the second GPU, here of the CPU."""
    unet = diffusers_unet(**SMALL_XL)
    call = a_call(unet)
    source = BoundNetwork(unet, FAMILIES.read)
    source.refresh(call)
    copy = empty_copy(source.binding, torch.device("cpu"))
    mirror = MirrorNetwork(source, copy)

    def generation() -> int:
        source.refresh(call)
        mirror.refresh(call)
        return mirror.epoch.addresses

    before = generation()
    assert generation() == before
    silu = F.silu
    monkeypatch.setattr(F, "silu", lambda given, inplace=False: 0.9 * silu(given))
    replaced = generation()
    assert replaced != before and generation() == replaced
    monkeypatch.undo()
    assert generation() not in (before, replaced)


def test_a_graph_outlives_changes_of_the_hosts_own_code(
    native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1111 changes variables of its LoRA code with each prompt: that needs another check, but not another graph.
    bound.sources() is the digest of the host's code."""
    unet = diffusers_unet(**SMALL_XL)
    lib_onediff.compile_unet(unet, backend="cudagraph")
    embeddings: Any = importlib.import_module("diffusers.models.embeddings")
    real = embeddings.get_timestep_embedding
    with torch.no_grad():
        for _ in range(4):
            assert error(unet, a_call(unet)) < CLOSE
        bound = runtime.services.networks.get(unet).bound
        before = bound.epoch.addresses
        digest = bound.sources()
        for number in range(3):
            monkeypatch.setattr(
                embeddings, "get_timestep_embedding", lambda *given, of=number, **named: real(*given, **named))
            assert error(unet, a_call(unet)) < CLOSE
            assert bound.sources() != digest and bound.epoch.addresses == before
