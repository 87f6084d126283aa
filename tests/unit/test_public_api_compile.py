"""compile_unet and compile_pipe: which arguments and calls they accept, copies of compiled UNets, and that uncompiling
restores a UNet."""
from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import a_call, diffusers_arguments, diffusers_output, diffusers_unet, relative_error, served
from ladder_builders import error
from torch import nn

import lib_onediff
from lib_onediff.core.settings import Settings


def route() -> str:
    return lib_onediff.status()["route"]


def must_be_ours(unet: Any) -> None:
    """Assert that our forward serves a call, with an output close to diffusers'."""
    assert error(unet, a_call(unet)) < 1e-5
    assert route() == "plain", lib_onediff.status()["reason"]


def must_be_the_hosts(unet: Any) -> None:
    """Assert that diffusers' own forward computes a call, and that OneDiff does not even count it."""
    before = lib_onediff.status()["calls"]
    call = a_call(unet)
    assert torch.equal(served(unet, call), diffusers_output(unet, call))
    assert lib_onediff.status()["calls"] == before


def test_compiling_returns_the_module_and_uncompiling_restores_its_attributes() -> None:
    """Both also if called twice. A compiled UNet is served by the backend eager on a CPU."""
    unet = lib_onediff.uncompile_unet(diffusers_unet())
    attributes = dict(unet.__dict__)
    assert lib_onediff.compile_unet(lib_onediff.compile_unet(unet)) is unet
    must_be_ours(unet)
    assert lib_onediff.status()["backend"] == "eager"
    assert lib_onediff.uncompile_unet(lib_onediff.uncompile_unet(unet)) is unet
    assert unet.__dict__ == attributes
    must_be_the_hosts(unet)


def test_the_options_of_the_last_compilation_apply() -> None:
    """Keyword arguments take precedence over a Settings object."""
    unet = lib_onediff.compile_unet(diffusers_unet(), enabled=False)
    served(unet, a_call(unet))
    assert (route(), lib_onediff.status()["reason"]) == ("host", "OneDiff is switched off")
    lib_onediff.compile_unet(unet, settings=Settings(enabled=False), enabled=True)
    must_be_ours(unet)


NO_PIPE = SimpleNamespace(unet=nn.Linear(1, 1))


@pytest.mark.parametrize(("function", "given", "options", "said"), [
    ("compile_unet", None, {"backend": "nonsense"}, "backend must be one of auto, native, cudagraph, oneflow, eager"),
    ("compile_pipe", None, {"low_bit_only": "yes"}, "low_bit_only takes True or False, not 'yes'"),
    ("compile_unet", None, {"memory_budget": 0.5}, "memory_budget takes a whole number"),
    ("compile_pipe", None, {"speed": 11}, "OneDiff has no option 'speed'. Choose from "),
    ("compile_unet", None, {"settings": {"tf32": "on"}}, "settings must be a lib_onediff.Settings, not a dict"),
    ("compile_pipe", None, {"ignores": "vae"}, """ignores must be a collection of names, such as ("vae",)"""),
    ("compile_pipe", None, {"ignores": ["uent"]}, "'unet' or 'vae', not 'uent'"),
    ("compile_unet", NO_PIPE, {}, "for a whole pipeline there is compile_pipe."),
    ("uncompile_unet", NO_PIPE, {}, "takes a UNet, such as pipe.unet, not a SimpleNamespace"),
    ("compile_pipe", "path/to/sdxl", {}, "takes a pipeline of diffusers"),
    ("uncompile_pipe", nn.Linear(1, 1), {}, "not a Linear; for a UNet there is uncompile_unet."),
], ids=str)
def test_wrong_arguments_raise_an_exception_that_names_them_and_nothing_is_compiled(
    function: str, given: Any, options: dict[str, Any], said: str
) -> None:
    """given: the first argument; None for a valid one. said: a part of the message."""
    unet = diffusers_unet()
    attributes = dict(unet.__dict__)
    right = {"compile_unet": unet, "compile_pipe": SimpleNamespace(unet=unet)}
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        getattr(lib_onediff, function)(right[function] if given is None else given, **options)
    assert unet.__dict__ == attributes


def test_ignores_leaves_a_unet_to_diffusers_and_accepts_parts_that_are_never_compiled() -> None:
    """As in OneDiff's earlier compile_pipe. Here such a part is the text encoder."""
    pipe = SimpleNamespace(unet=diffusers_unet(), text_encoder=nn.Linear(1, 1))
    assert lib_onediff.compile_pipe(pipe, ignores={"unet"}) is pipe
    must_be_the_hosts(pipe.unet)
    lib_onediff.compile_pipe(pipe, ignores=["text_encoder"])
    must_be_ours(pipe.unet)


def test_our_output_has_the_type_that_diffusers_returns() -> None:
    """The arguments are given by name or by position, with return_dict or without, the timestep as a tensor or as a
    number. Later calls do not overwrite an output."""
    unet = diffusers_unet()
    call = a_call(unet)
    with torch.no_grad():
        expected = unet(**diffusers_arguments(call))
        lib_onediff.compile_unet(unet)
        named = unet(**diffusers_arguments(call))
        before = named.sample.clone()
        by_position = unet(call.latent, call.timestep, call.context, return_dict=False)
        one_number = unet(call.latent, 7, call.context).sample
        one_tensor = unet(call.latent, torch.tensor(7), call.context)[0]
    assert type(named) is type(expected)
    assert type(by_position) is tuple and len(by_position) == 1
    assert torch.equal(named.sample, by_position[0])
    assert torch.equal(one_number, one_tensor)
    assert torch.equal(named.sample, before), "later calls do not overwrite an output"
    assert route() == "plain"


@pytest.mark.parametrize("extra", [
    {"encoder_attention_mask": torch.arange(2 * 77).reshape(2, 77) % 3 > 0},
    {"cross_attention_kwargs": {"of_somebody": 0.5}}, {"class_labels": torch.tensor([1, 2])},
], ids=lambda extra: next(iter(extra)))
@pytest.mark.filterwarnings("ignore")
def test_calls_with_arguments_that_our_forward_does_not_take_are_left_to_diffusers(extra: dict[str, Any]) -> None:
    """The output equals diffusers' to the bit, and the reason names the argument. A call without it is served."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    assert torch.equal(served(unet, call, **extra), diffusers_output(unet, call, **extra))
    assert route() == "host" and next(iter(extra)) in lib_onediff.status()["reason"]
    must_be_ours(unet)


def copies() -> dict[str, Callable[[Any], Any]]:
    def saved(unet: Any) -> Any:
        buffer = io.BytesIO()
        torch.save(unet, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    return {"deepcopy": copy.deepcopy, "pickle": lambda unet: pickle.loads(pickle.dumps(unet)), "torch.save": saved}


@pytest.mark.parametrize("duplicate", copies().values(), ids=copies())
def test_a_copy_runs_diffusers_forward_with_its_own_weights_until_it_is_compiled(
    duplicate: Callable[[Any], Any]
) -> None:
    """duplicate: makes the copy of a compiled UNet. An edit of the copy does not change the original's output. The
    original is still served after the copy was compiled, and after it was deleted."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    must_be_ours(unet)
    twin = duplicate(unet)
    with torch.no_grad():
        twin.conv_out.bias.add_(1.0)
    must_be_the_hosts(twin)
    assert relative_error(served(twin, a_call(twin)), served(unet, a_call(unet))) > 1e-2
    must_be_ours(lib_onediff.compile_unet(twin))
    must_be_ours(unet)
    del twin
    must_be_ours(unet)
