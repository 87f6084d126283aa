"""Random weights for the networks of tests."""
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


def randomise(module: nn.Module, seed: int = 0) -> Any:
    """Give every parameter random values that are so large that every layer affects the output, also those that a class
    initialises with zeros."""
    parameters = dict(module.named_parameters())
    values = random_values(seed, tuple((name, tuple(parameter.shape)) for name, parameter in parameters.items()))
    with torch.no_grad():
        for parameter, value in zip(parameters.values(), values, strict=True):
            parameter.copy_(value)
    return module.eval()


@lru_cache(maxsize=16)
def random_values(seed: int, parameters: tuple[tuple[str, tuple[int, ...]], ...]) -> list[Tensor]:
    """The values of randomise for parameters of these names and shapes. Cached, because the tests of a file mostly use
    the same network."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    with torch.inference_mode(False), torch.no_grad():
        for name, shape in parameters:
            values = torch.randn(shape, generator=generator)
            if len(shape) > 1:
                made.append(values / math.prod(shape[1:]) ** 0.5)
            else:
                made.append(0.1 * values + (0.0 if name.endswith("bias") else 1.0))
    return made
