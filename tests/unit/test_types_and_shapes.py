"""Inputs of other dtypes and shapes, after OneDiff has served a usual call: the output is close to the host's, or the
same exception is raised."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from builders import SMALL, SMALL_XL, a_call, diffusers_arguments, diffusers_unet, relative_error
from graph_builders import PretendedGraphs
from ladder_builders import NATIVE
from torch import Tensor

import lib_onediff

CLOSE = 1e-5
Arguments = dict[str, Any]
LCM = {**SMALL, "time_cond_proj_dim": 24}
TYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
TENSORS = ("sample", "timestep", "encoder_hidden_states", "timestep_cond", "text_embeds", "time_ids")
RESIDUALS = "down_block_additional_residuals", "mid_block_additional_residual"


def arguments_of(unet: Any) -> Arguments:
    """The arguments of a usual call, with a ControlNet's residuals, and SDXL's time_ids if the UNet takes them."""
    given = diffusers_arguments(a_call(unet))
    if given["added_cond_kwargs"] is not None:
        label = given["added_cond_kwargs"]["text_embeds"]
        numbers = unet.config.addition_time_embed_dim
        given["added_cond_kwargs"] = {
            "text_embeds": label[:, :label.shape[1] - 6 * numbers],
            "time_ids": torch.tensor([[512.0, 512.0, 0.0, 0.0, 512.0, 512.0]] * 2),
        }
    shapes = [(2, 16, 8, 8), (2, 16, 8, 8), (2, 16, 4, 4), (2, 32, 4, 4)]
    generator = torch.Generator().manual_seed(5)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {**given, RESIDUALS[0]: [random(*shape) for shape in shapes], RESIDUALS[1]: random(2, 32, 4, 4)}


def other_shapes(tensor: Tensor) -> Iterator[Tensor | None]:
    """Variants of a tensor in other shapes; None stands for a missing one."""
    yield from (tensor[:1], tensor[..., :1], tensor[..., :-1], torch.cat([tensor, tensor[:1]]), tensor[None])
    yield from (tensor[..., None], tensor.flatten(), tensor[:0], tensor[0], None)
    yield torch.cat([tensor, tensor[..., :1]], dim=-1)


def changed(given: Arguments, name: str, of: Callable[[Tensor], Any]) -> Arguments:
    """These arguments with another value for this name."""
    if name in ("text_embeds", "time_ids"):
        added = given["added_cond_kwargs"]
        return {**given, "added_cond_kwargs": {**added, name: of(added[name])}}
    if name == RESIDUALS[0]:
        first, *others = given[name]
        return {**given, name: [of(first), *others]}
    return {**given, name: of(given[name])}


def others_like(given: Arguments) -> Iterator[tuple[str, Arguments]]:
    """(description, arguments) of each variant of a usual call."""
    added = given["added_cond_kwargs"] or {}
    for name in (*TENSORS, *RESIDUALS):
        tensor = added.get(name, given.get(name))
        if tensor is None:
            continue
        for dtype in TYPES:
            yield f"{name} in {dtype}", changed(given, name, lambda one, dtype=dtype: one.to(dtype))
        first = tensor[0] if isinstance(tensor, list) else tensor
        for shape in other_shapes(first):
            variant = None if shape is None else tuple(shape.shape)
            yield f"{name} of {variant}", changed(given, name, lambda one, shape=shape: shape)
    numbers = 417, 417.3, True, numpy.float32(417.3), numpy.float64(417.3), numpy.int64(417), "417", None
    tensors = torch.tensor(417.3), torch.tensor(417), torch.tensor([417.3]), torch.tensor([[1.0], [2.0]])
    for number in (*numbers, *tensors):
        yield f"timestep {number!r}", {**given, "timestep": number}
    for name in TENSORS[2:4]:
        yield f"{name} is a number", {**given, name: 3.5}
    for dtype in (torch.float16, torch.float64):
        yield f"everything in {dtype}", {
            name: value.to(dtype) if isinstance(value, Tensor) and name != "timestep" else value
            for name, value in given.items() if name not in RESIDUALS
        }


def outcome(forward: Callable[..., Any], given: Arguments) -> Tensor | type[Exception]:
    """The output of a forward, or the class of the exception that it raises."""
    # The host removes the members of some lists.
    given = {name: list(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        with torch.no_grad():
            return forward(**given, return_dict=False)[0]
    except Exception as error:
        return type(error)


def same_outcome(ours: Tensor | type[Exception], hosts: Tensor | type[Exception]) -> bool:
    """Whether both outputs are close, with one dtype and shape, or both exceptions have one class."""
    if isinstance(ours, Tensor) and isinstance(hosts, Tensor):
        same = ours.dtype == hosts.dtype and ours.shape == hosts.shape
        return same and (torch.equal(ours, hosts) or relative_error(ours, hosts) < CLOSE)
    return ours is hosts


def differing(unet: Any, given: Arguments) -> list[str]:
    """Sentences on the variants of this call for which our output or exception differs from the host's."""
    found = []
    for variant, other in others_like(given):
        ours = outcome(unet, other)
        hosts = outcome(lambda **more: type(unet).forward(unet, **more), other)
        if not same_outcome(ours, hosts):
            shape_or_exception = lambda one: tuple(one.shape) if isinstance(one, Tensor) else one  # noqa: E731
            error = relative_error(ours, hosts) if isinstance(ours, Tensor) and isinstance(hosts, Tensor) else ""
            found.append(f"{variant}: {shape_or_exception(ours)}, not {shape_or_exception(hosts)} {error}")
    return found


@pytest.mark.parametrize("config", [SMALL, SMALL_XL, LCM], ids=["SD", "SDXL", "LCM"])
@pytest.mark.parametrize("residuals", [False, True], ids=["", "residuals"])
def test_inputs_of_any_dtype_and_shape_give_the_output_or_exception_of_the_host(
    config: Arguments, residuals: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The inputs are variants of a usual call, which was served and checked before. Outputs are close to the host's,
    exceptions have the same class. residuals: with a ControlNet's residuals. Afterwards, OneDiff still serves the usual
    call."""
    unet = lib_onediff.compile_unet(diffusers_unet(**config))
    given = {name: one for name, one in arguments_of(unet).items() if residuals or name not in RESIDUALS}
    for _ in range(2):
        assert isinstance(outcome(unet, given), Tensor) and lib_onediff.status()["route"] == "plain"
    found = differing(unet, given)
    assert not found, "\n".join(found)
    assert "a fault of OneDiff" not in caplog.text
    # None of them has changed the state of the usual call's shape.
    outcome(unet, given)
    assert lib_onediff.status()["route"] == "plain", lib_onediff.status()["reason"]


def test_with_a_graph_inputs_of_any_dtype_and_shape_give_the_output_or_exception_of_the_host(
    pretended: PretendedGraphs
) -> None:
    """The inputs are variants of a usual call, which a graph serves before and after them. Outputs are close to the
    host's, exceptions have the same class."""
    unet = lib_onediff.compile_unet(diffusers_unet(**SMALL_XL), backend=NATIVE)
    given = {name: one for name, one in arguments_of(unet).items() if name not in RESIDUALS}
    for _ in range(4):
        assert isinstance(outcome(unet, given), Tensor)
    assert lib_onediff.status()["route"] == "graph", lib_onediff.status()["reason"]
    found = differing(unet, given)
    assert not found, "\n".join(found)
    for _ in range(3):
        outcome(unet, given)
    assert lib_onediff.status()["route"] == "graph", lib_onediff.status()["reason"]
