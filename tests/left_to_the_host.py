"""Networks and calls that OneDiff does not know: it leaves them to the host's own forward, errors included."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from own_forward import own_forward
from torch import Tensor, nn

import lib_onediff

# Where a change is: in the configuration of a network, in a block of it, or in the arguments of a call.
IN_CONFIG = "config"
IN_BLOCK = "block"
IN_CALL = "call"


def replace_part(network: nn.Module, path: str, value: Any) -> None:
    """Set an attribute of a module within the network, such as "blocks.0.attn.processor"."""
    above, _, name = path.rpartition(".")
    setattr(network.get_submodule(above), name, value)


def answer(forward: Callable[..., Any], given: dict[str, Any]) -> Tensor:
    """The values of the sample that a diffusers forward returns, flattened; or the bytes of its error's message."""
    try:
        return torch.cat([one.flatten() for one in forward(**given).sample])
    except Exception as error:
        return torch.tensor(list(str(error).encode()))


def check_left_to_the_host(
    network_of: Callable[..., nn.Module], block: str, given: dict[str, Any], where: str, change: dict[str, Any],
    reason: str,
) -> None:
    """Assert that OneDiff leaves a changed call of a diffusers network to its own forward, and gives this reason.

    The output, or the error's message, must equal that of the network's own forward.

    network_of: makes the network of a configuration. block: the path of the block to change. given: the arguments of
    the unchanged call. where: IN_CONFIG, IN_BLOCK or IN_CALL. change: the new values, by name or, in a block, by path.
    reason: a part of the reason in the status.
    """
    network = network_of(**change) if where == IN_CONFIG else network_of()
    if where == IN_BLOCK:
        for path, value in change.items():
            replace_part(network.get_submodule(block), path, value)
    if where == IN_CALL:
        given = {**given, **change}
    expected = answer(own_forward(network), given)
    assert torch.equal(answer(lib_onediff.compile_unet(network), given), expected)
    assert reason in lib_onediff.status()["reason"]
