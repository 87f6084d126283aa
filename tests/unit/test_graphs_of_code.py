"""A CUDA graph repeats what torch's functions did at its capture. After one of them was replaced, it is invalid; after
changes of the host's own code, which graphs do not contain, it stays valid."""
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
    """Both the host and our operators call torch.nn.functional.silu by its name, so a replacement affects both, and our
    output stays close to the host's. silu is replaced and put back in turn. bound.epoch.addresses, a number, changes
    whenever graphs become invalid: at the first call after each replacement, also after silu is put back, and at no
    other call."""
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
    """MirrorNetwork is the copy of the network on the second GPU, here on the CPU. The epoch in which its graphs are
    valid ends with the replacement, and that of the replacement with its removal."""
    unet = diffusers_unet(**SMALL_XL)
    call = a_call(unet)
    source = BoundNetwork(unet, FAMILIES.read)
    source.refresh(call)
    copy = empty_copy(source.binding, torch.device("cpu"))
    mirror = MirrorNetwork(source, copy)

    def epoch() -> int:
        source.refresh(call)
        mirror.refresh(call)
        return mirror.epoch.addresses

    before = epoch()
    assert epoch() == before
    silu = F.silu
    monkeypatch.setattr(F, "silu", lambda given, inplace=False: 0.9 * silu(given))
    replaced = epoch()
    assert replaced != before and epoch() == replaced
    monkeypatch.undo()
    assert epoch() not in (before, replaced)


def test_a_graph_stays_valid_when_the_code_of_the_host_changes(
    native_operators: StandInOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1111 changes variables of its LoRA code with each prompt. Then our output must be checked against the host's
    again, but the graph stays. bound.sources() is the digest of the host's code, which changes; the epoch of graphs
    (epoch.addresses) does not."""
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
