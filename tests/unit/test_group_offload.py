"""UNets with diffusers' group offloading: our forward is called before the hooks move weights."""
from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_unet, relative_error, served
from graph_builders import PretendedGraphs
from own_forward import own_forward
from torch import nn

import lib_onediff
from lib_onediff.hosts.diffusers import module_forward
from lib_onediff.hosts.diffusers.module_forward import attached
from lib_onediff.runtime.runtime import runtime

hooks = pytest.importorskip("diffusers.hooks", reason="needs diffusers 0.33")
ROUNDING = 1e-5


def offload(unet: Any, kind: str) -> None:
    hooks.apply_group_offloading(unet, torch.device("cpu"), offload_type=kind, num_blocks_per_group=1)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("is_first", [True, False])
def test_offloading_hooks_run_only_if_the_host_computes(pretended: PretendedGraphs, kind: str, is_first: bool) -> None:
    """The hooks move weights; the first call runs them, because it is compared with the host. OneDiff computes calls
    also after the hooks were removed and added again, as by loading a LoRA. Uncompiling restores the UNet. kind: the
    kind of offloading. is_first: whether it is set before compile_unet, or after it."""
    unet = diffusers_unet(**SMALL_XL)
    moved = list[Any]()
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
    assert moved, "the first call is compared with the host's output"
    served(unet, call)
    moved.clear()
    assert relative_error(served(unet, call), expected) < ROUNDING
    assert lib_onediff.status()["backend"] == "native" and not moved
    # Loading a LoRA removes the hooks, and adds them again.
    hooks.HookRegistry.check_if_exists_or_initialize(unet).remove_hook("group_offloading", recurse=True)
    for _ in range(2):
        assert relative_error(served(unet, call), expected) < ROUNDING and lib_onediff.status()["backend"] == "native"
    offload(unet, kind)
    for _ in range(3):
        assert relative_error(served(unet, call), expected) < ROUNDING and lib_onediff.status()["backend"] == "native"
    lib_onediff.uncompile_unet(unet)
    assert attached(unet) is None
    assert relative_error(served(unet, call), expected) < ROUNDING


def test_compile_refuses_a_unet_whose_hooks_call_a_forward_of_other_code() -> None:
    """The forward was replaced before offloading was set, so that the hooks are around it."""
    unet = diffusers_unet(**SMALL_XL)
    unet.forward = lambda *given, **named: None
    offload(unet, "block_level")
    with pytest.raises(ValueError, match="other code has replaced"):
        lib_onediff.compile_unet(unet)


@pytest.mark.parametrize("place", ["on top", "between"])
def test_compile_refuses_a_unet_whose_hooks_are_wrapped_by_other_code(place: str) -> None:
    """OneDiff would bypass the wrapper. place: the wrapper calls the outermost hook ("on top"), or is called by the
    outer one of two hooks ("between")."""
    unet = diffusers_unet(**SMALL_XL)
    offload(unet, "block_level")
    if place == "on top":
        inner = unet.forward
        unet.forward = lambda *given, **named: inner(*given, **named)
    else:
        registry = hooks.HookRegistry.check_if_exists_or_initialize(unet)
        registry.register_hook(Noting([]), "layer_execution_tracker")
        outer = registry._fn_refs[-1]
        inner = outer.forward
        outer.forward = lambda *given, **named: inner(*given, **named)
    with pytest.raises(ValueError, match="other code has replaced"):
        lib_onediff.compile_unet(unet)


def test_the_host_computes_if_weights_are_offloaded_to_disk(pretended: PretendedGraphs, tmp_path: Path) -> None:
    """Between calls, such parameters have no values in main memory. The reason names diffusers."""
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


class Noting(hooks.ModelHook):
    """A hook that records when it runs. Tests register it under the name of a diffusers hook that only moves
    weights."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self.noted = noted

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.noted.append("later")
        return args, kwargs


def test_hooks_registered_before_and_after_compiling_all_run_once_around_the_hosts_forward() -> None:
    """OneDiff is compiled in, but switched off. Each hook keeps the forward that it finds, which may be ours. Removing
    the second hook, and uncompiling, restore the forward of before."""
    unet = diffusers_unet(**SMALL_XL)
    noted = list[str]()
    call = a_call(unet)
    expected = served(unet, call)
    offload(unet, "block_level")
    registry = hooks.HookRegistry.check_if_exists_or_initialize(unet)
    first = registry._fn_refs[0]
    own = first.pre_forward
    first.pre_forward = lambda *given, **named: noted.append("first") or own(*given, **named)
    before = vars(unet)["forward"]
    lib_onediff.compile_unet(unet, enabled=False)

    def run(network: Any = unet) -> list[str]:
        noted.clear()
        assert relative_error(served(network, call), expected) < ROUNDING and runtime.guard.faults == []
        return list(noted)

    assert run() == run() == ["first"]
    registry.register_hook(Noting(noted), "layer_execution_tracker")
    assert run() == run() == ["later", "first"]
    assert "onediff" not in repr(vars(unet)["forward"]) and lib_onediff.status()["route"] == "host"
    # The hooks of a copy call the original's forward, as without OneDiff.
    assert run(copy.copy(unet)) == ["later", "first"]
    registry.remove_hook("layer_execution_tracker", recurse=False)
    assert run() == run() == ["first"]
    lib_onediff.uncompile_unet(unet)
    assert vars(unet)["forward"] is before and run() == ["first"]
    assert first.forward == own_forward(unet)


def test_a_fault_while_hooks_are_read_leaves_the_call_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDiff's function that reads the hooks raises. The output is the host's, to the bit, and the reason names the
    error."""
    unet = diffusers_unet(**SMALL_XL)
    call = a_call(unet)
    expected = served(unet, call)
    lib_onediff.compile_unet(unet)
    offload(unet, "block_level")

    def broken(module: nn.Module) -> bool:
        raise IndexError("broken by a test")

    monkeypatch.setattr(module_forward, "only_moves", broken)
    assert torch.equal(served(unet, call), expected)
    assert "broken by a test" in lib_onediff.status()["reason"] and lib_onediff.status()["route"] == "host"
    runtime.guard.forget()
