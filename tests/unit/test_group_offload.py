"""A UNet whose weights diffusers' group offloading moves: ours is called before it moves any."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_unet, relative_error, served
from graph_builders import PretendedGraphs

import lib_onediff
from lib_onediff.hosts.diffusers.module_forward import attached

hooks = pytest.importorskip("diffusers.hooks", reason="needs diffusers 0.33")
ROUNDING = 1e-5


def offload(unet: Any, kind: str) -> None:
    hooks.apply_group_offloading(unet, torch.device("cpu"), offload_type=kind, num_blocks_per_group=1)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("is_first", [True, False])
def test_the_hooks_run_for_the_host_alone(pretended: PretendedGraphs, kind: str, is_first: bool) -> None:
    unet, moved = diffusers_unet(**SMALL_XL), list[Any]()
    call = a_call(unet)
    expected = served(unet, call)
    for step in (lambda: offload(unet, kind), lambda: lib_onediff.compile_unet(unet))[::1 if is_first else -1]:
        step()
    for module in unet.modules():
        if hasattr(module, "_diffusers_hook"):
            for reference in module._diffusers_hook._fn_refs:
                own = reference.pre_forward
                reference.pre_forward = lambda *given, own=own, **named: moved.append(given[0]) or own(*given, **named)
    served(unet, call)
    assert moved, "the first call is compared with the host's"
    served(unet, call)
    moved.clear()
    assert relative_error(served(unet, call), expected) < ROUNDING
    assert lib_onediff.status()["backend"] == "native" and not moved
    # As loading a LoRA does.
    hooks.HookRegistry.check_if_exists_or_initialize(unet).remove_hook("group_offloading", recurse=True)
    for _ in range(2):
        assert relative_error(served(unet, call), expected) < ROUNDING and lib_onediff.status()["backend"] == "native"
    offload(unet, kind)
    for _ in range(3):
        assert relative_error(served(unet, call), expected) < ROUNDING and lib_onediff.status()["backend"] == "native"
    lib_onediff.uncompile_unet(unet)
    assert attached(unet) is None
    assert relative_error(served(unet, call), expected) < ROUNDING


def test_weights_that_wait_on_the_disk_are_the_hosts(pretended: PretendedGraphs, tmp_path: Path) -> None:
    """What lies in main memory meanwhile has no values."""
    unet = diffusers_unet(**SMALL_XL)
    call = a_call(unet)
    expected = served(unet, call)
    lib_onediff.compile_unet(unet)
    try:
        hooks.apply_group_offloading(
            unet, torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=str(tmp_path)
        )
    except TypeError:
        pytest.skip("this diffusers has no offloading to the disk")
    for _ in range(3):
        assert torch.equal(served(unet, call), expected)
    assert lib_onediff.status()["route"] == "host" and "diffusers" in lib_onediff.status()["reason"]
