"""The number of lib_onediff's Python functions (stack frames) that a UNet call runs: each of them makes the replay of a
CUDA graph slower."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, compute, diffusers_arguments, diffusers_unet
from frames import Frames, frames_of
from graph_builders import PretendedGraph, PretendedGraphs
from ladder_builders import NATIVE

import lib_onediff
from lib_onediff.families.registry import Families
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.module_tree import Tree

# Functions that count as one frame with all that they call: forward, replay, and the comparison of a module tree.
CLOSED = tuple(one.__code__ for one in (compute, Families.output, PretendedGraph.run, Tree.is_unchanged))
REPLAY_FILES = 9
REPLAY_FRAMES = 25
FIRST_CALL_FILES = 42


@pytest.fixture
def unet(pretended: PretendedGraphs, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A diffusers UNet whose calls at 64x64 pixels are replayed."""
    # Another test may have chosen a second GPU in this process.
    monkeypatch.setattr(runtime.two_gpus, "is_used", False)
    compiled = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), backend=NATIVE)
    for _ in range(3):
        frames_of_call(compiled)
    return compiled


def frames_of_call(unet: Any, size: int = 8) -> Frames:
    """The frames of one call. size: the width and height of the latent."""
    arguments = diffusers_arguments(a_call(unet, size, size))
    with torch.no_grad():
        return frames_of(lambda: unet(**arguments), CLOSED)


def test_a_replay_runs_no_more_python_functions_and_files_than_today(unet: Any) -> None:
    """The bounds are today's numbers. More Python makes every step slower: do such work once, at the first call,
    instead of raising the bounds."""
    frames = frames_of_call(unet)
    assert lib_onediff.status()["route"] == "graph"
    assert len(frames.files) <= REPLAY_FILES and len(frames.calls) <= REPLAY_FRAMES, str(frames)


def test_the_first_call_at_a_new_size_runs_python_in_no_more_files_than_today(unet: Any) -> None:
    """The first call has no graph; it is checked against the host. The bound is today's number."""
    frames = frames_of_call(unet, size=16)
    assert lib_onediff.status()["route"] == "plain"
    assert len(frames.files) <= FIRST_CALL_FILES, str(frames)
