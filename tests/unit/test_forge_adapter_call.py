"""Conversion of calls of Forge's UNet: which transformer_options and arguments are refused, and how the reason names
them."""
from __future__ import annotations

import contextlib
import importlib
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lib_onediff.core.refusal import Refusal
from lib_onediff.hosts.forge.call import HostCall, names_read_by, unet_call, unknown_options


def function_of(module: Any) -> Any:
    """A function whose Python module has this name."""
    return eval("lambda *arguments: None", {"__name__": module})


HARMLESS: dict[str, Any] = {
    "cond_or_uncond": [1, 0], "sigmas": torch.ones(1), "cond_mark": torch.ones(2), "cond_indices": [1],
    "uncond_indices": [0], "original_shape": [2, 4, 8, 8], "transformer_index": 3, "block": ("last", 0),
    "block_index": 0, "controlnet_conditioning_modifiers": [len], "controlnet_model_function_wrapper": len,
}
# The names that the forward of Forge's UNet reads from its options and arguments.
READ = {"patches", "patches_replace", "block_modifiers", "block_inner_modifiers", "group_norm_wrapper", "num_frames"}


@pytest.mark.parametrize("runs_functions", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"patches": {}}, {"patches": {"attn1_patch": []}}, {"patches_replace": {"attn1": {}}}, {"block_modifiers": []},
    {"group_norm_wrapper": None}, {"sampling_sigmas": torch.ones(20)}, {"later": {"start": [0.5, None]}},
    {"later": uuid.uuid4()},
])
def test_empty_options_and_data_that_the_unet_never_reads_are_ignored(
    options: dict[str, Any], runs_functions: bool
) -> None:
    """unknown_options lists the options for which OneDiff refuses a call. READ: the names that the network's code
    reads. runs_functions: whether functions of extensions run in the call, which could read more."""
    assert unknown_options({**HARMLESS, **options}, READ, runs_functions) == []


def test_functions_that_the_network_never_reads_are_refused_only_if_other_functions_run() -> None:
    """Here the network's code reads only "block" and "skip_reshape" of the options, and the function is in "patches".
    Another function that runs in the call could read "patches"."""
    tome = {"patches": {"attn1_patch": [function_of("tome.py")]}}
    assert unknown_options(tome, {"block", "skip_reshape"}, False) == []
    assert unknown_options(tome, {"block", "skip_reshape"}, True) == ["patches[attn1_patch] by tome.py"]


@pytest.mark.parametrize(("options", "names"), [
    ({"patches": {"attn1_patch": [function_of("tome.py")]}}, ["patches[attn1_patch] by tome.py"]),
    ({"patches": {"attn1_patch": [], "output_block_patch": [function_of("freeu.py")]}},
     ["patches[output_block_patch] by freeu.py"]),
    ({"patches_replace": {"attn1": {("middle", 0): function_of("pag.py")}}}, ["patches_replace[attn1] by pag.py"]),
    ({"block_modifiers": [function_of("hrfix.py")]}, ["block_modifiers by hrfix.py"]),
    ({"block_inner_modifiers": [function_of("x.py")]}, ["block_inner_modifiers by x.py"]),
    ({"group_norm_wrapper": function_of("iclight.py")}, ["group_norm_wrapper by iclight.py"]),
    ({"of_tomorrow": [function_of("new.py")]}, ["of_tomorrow by new.py"]),
    ({"of_tomorrow": [(0.5, function_of("new.py"))]}, ["of_tomorrow by new.py"]),
    ({"num_frames": 2}, ["num_frames"]),
    ({"patches": {"attn2_patch": [len]}, "of_tomorrow": {"strength": len}},
     ["patches[attn2_patch] by builtins", "of_tomorrow[strength] by builtins"]),
])
def test_options_that_may_change_the_unet_are_named_with_the_module_of_their_function(
    options: dict[str, Any], names: list[str]
) -> None:
    """names: what a refusal calls these options, in which there are functions of extensions, or data that the UNet
    reads."""
    named = unknown_options({**HARMLESS, **options}, READ, True)
    assert [name.replace("builtin_function_or_method", "builtins") for name in named] == names


@pytest.mark.parametrize(("given", "reason"), [
    ({"options": {"of_tomorrow": [function_of("new.py")]}}, None),
    ({"options": {"of_tomorrow": [function_of("new.py")], "block_modifiers": [function_of("hrfix.py")]}},
     "another extension changes the UNet in this step: of_tomorrow by new.py"),
    ({"options": {"patches": {"attn7_patch": [len]}}}, "another extension changes the UNet in this step: patches"),
    ({"others": {"num_frames": 2}}, "unknown arguments (num_frames)"),
    ({"control": {"input": [], "middle": [0.5], "output": []}},
     "a ControlNet passes a float instead of a tensor"),
    ({"others": {"control_model": object(), "num_frames": None}}, None),
])
def test_calls_that_our_forward_cannot_compute_are_refused(given: dict[str, Any], reason: str | None) -> None:
    """given: the fields in which HostCall differs from a plain call. reason None: the call is accepted, because the
    forward never reads these names."""
    one = torch.zeros(1)
    call = HostCall(one, one, one, None, **{"control": None, "options": {}, "others": {}, **given})
    refused = contextlib.nullcontext() if reason is None else pytest.raises(Refusal, match=re.escape(reason))
    with refused:
        assert unet_call(nn.Identity(), call, False, READ).latent is one


def test_names_read_by_a_module_include_those_of_modules_to_which_it_passes_its_options(tmp_path: Path) -> None:
    (tmp_path / "wrappers_of_options.py").write_text("def wrappers(options): return options.get('wrappers')\n")
    (tmp_path / "reader_of_options.py").write_text(
        "import wrappers_of_options\n"
        "def forward(x, transformer_options, **others):\n"
        "    return wrappers_of_options.wrappers(transformer_options), others.get('frames')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        read = names_read_by(importlib.import_module("reader_of_options"))
    assert {"wrappers", "frames"} <= read and "patches" not in read
