"""The test extension onediff-graphs (in tests/webui/extensions), which emulates CUDA graphs in real WebUIs without a
GPU, works with OneDiff's present classes."""
from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from builders import SMALL, a_call, diffusers_output, diffusers_unet, relative_error, served
from test_segments import Louder

from lib_onediff import compile_unet, status

SCRIPT = Path(__file__).parents[1] / "webui" / "extensions" / "onediff-graphs" / "scripts" / "onediff_graphs.py"


def louder(unet: Any) -> list[Louder]:
    """The UNet's processors of class Louder."""
    return [processor for processor in unet.attn_processors.values() if isinstance(processor, Louder)]


@torch.no_grad()
def test_the_emulated_cuda_graphs_replay_whole_unets_and_segments_between_processors(
    fresh_runtime: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First OneDiff captures the whole UNet. Then the self-attentions have an extension's processors (Louder), and
    OneDiff captures the segments between them, so that a replay calls each processor once. Both times the route is
    "graph", and the outputs are close to those of diffusers' own forward."""
    monkeypatch.setitem(sys.modules, "modules", mock.Mock())
    spec = importlib.util.spec_from_file_location("onediff_graphs", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    switch = script.Switch()
    switch.turn(True)
    try:
        unet = compile_unet(diffusers_unet(**SMALL))
        for foreign in (False, True):
            unet.set_attn_processor({
                name: Louder() if foreign and ".attn1." in name else own
                for name, own in unet.attn_processors.items()
            })
            for seed in range(4):
                call = a_call(unet, seed=seed)
                assert relative_error(served(unet, call), diffusers_output(unet, call)) < 1e-5
            before = [processor.calls for processor in louder(unet)]
            served(unet, call)
            assert status()["route"] == "graph", status()["reason"]
            assert bool(before) is foreign
            assert [processor.calls for processor in louder(unet)] == [calls + 1 for calls in before]
    finally:
        switch.turn(False)
