"""UNet calls with inputs of unusual dtypes and shapes: OneDiff returns what the host returns, or raises what the host
raises."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from builders import CONTEXT_WIDTH, relative_error
from contract_hosts import A1111Host, Host, random
from torch import Tensor

from lib_onediff.runtime.runtime import runtime

CLOSE = 1e-5
TYPES = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool)
Inputs = dict[str, Any]


def usual_inputs() -> Inputs:
    return {
        "x": random(2, 4, 8, 8, seed=1), "timesteps": torch.tensor([900.25, 150.5]),
        "context": random(2, 77, CONTEXT_WIDTH, seed=2),
    }


def unusual_inputs() -> Iterator[tuple[str, Inputs]]:
    """Inputs of unusual calls, each with its name."""
    given = usual_inputs()
    for name, tensor in given.items():
        for dtype in TYPES:
            yield f"{name} in {dtype}", {**given, name: tensor.to(dtype)}
        for other in (
            tensor[:1], tensor[..., :1], tensor[..., :-1], tensor[None], tensor[..., None], tensor.flatten(),
            torch.cat([tensor, tensor[:1]]), torch.cat([tensor, tensor], dim=-1), None, 3.5,
        ):
            yield f"{name} {tuple(other.shape) if isinstance(other, Tensor) else other}", {**given, name: other}
    yield "y", {**given, "y": random(2, 5)}
    yield "y 3.5", {**given, "y": 3.5}
    yield "all in float16", {name: tensor.half() for name, tensor in given.items()}


def outcome(host: Host, given: Inputs) -> Tensor | type[Exception]:
    """The output of the UNet for these inputs, or the class of the exception that it raises."""
    options = {} if isinstance(host, A1111Host) else {"control": None, "transformer_options": {}}
    x = given["x"]
    timesteps = given["timesteps"]
    more = {name: given[name] for name in ("context", "y") if name in given}
    try:
        with host.no_gradients():
            output: Tensor = host.unet(x, timesteps, **more, **options)
            return output.clone()
    except Exception as error:
        return type(error)


def shown(one: Any) -> Any:
    """How an outcome is shown in a message: a tensor's shape, or the exception's class."""
    return tuple(one.shape) if isinstance(one, Tensor) else one


def agree(ours: Any, hosts: Any) -> bool:
    """Whether two outcomes are close outputs of the same dtype and shape, or the same exception class."""
    if isinstance(ours, Tensor) and isinstance(hosts, Tensor):
        same = ours.dtype == hosts.dtype and ours.shape == hosts.shape
        return same and (torch.equal(ours, hosts) or relative_error(ours, hosts) < CLOSE)
    return ours is hosts


def test_with_unusual_inputs_onediff_returns_or_raises_what_the_host_does(host: Host, tracebacks: Any) -> None:
    """The expected outcomes were recorded before OneDiff was switched on: outputs must be close, exceptions of the same
    class. OneDiff logs no traceback, and serves calls with usual inputs before and after the unusual ones."""
    expected = {name: outcome(host, given) for name, given in unusual_inputs()}
    assert any(isinstance(one, type) for one in expected.values())
    host.begin()
    for _ in range(2):
        outcome(host, usual_inputs())
    assert runtime.status()["route"] == "plain", runtime.status()["reason"]
    before = tracebacks()
    found = []
    for name, given in unusual_inputs():
        ours = outcome(host, given)
        if not agree(ours, expected[name]):
            found.append(f"{name}: {shown(ours)}, not {shown(expected[name])}")
        if tracebacks() > before:
            found.append(f"{name}: a traceback")
            before = tracebacks()
    assert not found, "\n".join(found)
    outcome(host, usual_inputs())
    assert runtime.status()["route"] == "plain", runtime.status()["reason"]
