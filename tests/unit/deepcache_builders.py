"""Samplings as hosts make them, and what DeepCache is to answer: computed call by call from the two halves."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, SMALL, diffusers_output, diffusers_unet, relative_error
from torch import Tensor

from lib_onediff.core import timeline
from lib_onediff.core.call import CACHED, FULL, Call
from lib_onediff.core.sampling import Sampling
from lib_onediff.core.settings import Settings
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet import forward as deepcache
from lib_onediff.runtime.runtime import Runtime
from lib_onediff.steps import schedule
from lib_onediff.weights.bound import BoundUNet
from lib_onediff.weights.scan import HostTraits

WEBUI = HostTraits()
STEPS = [float(time) for time in range(951, 0, -50)]
EVERY_THIRD: dict[str, Any] = {"deepcache_interval": 3}


@pytest.fixture(autouse=True)
def few_steps_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """For files that import it: samplings of a few steps are as long ones are."""
    monkeypatch.setattr(timeline, "FEWEST_STEPS", 0)


@pytest.fixture(autouse=True)
def equal_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """For files that import it: whole steps are interval steps apart."""
    monkeypatch.setattr(schedule, "early", lambda total, interval: frozenset(range(0, total, interval)))


def counts(runtime: Any) -> dict[str, int]:
    """How many passes of DeepCache there were of each kind."""
    status = runtime.status()["deepcache"]
    return {name: status[name] for name in (FULL, CACHED)}


def feature_bytes(rig: Rig) -> int:
    """The memory of what step policies keep for the rig's UNet."""
    return sum(memory.bytes() for memory in rig.runtime.managed_unet(rig.unet).step_memories.values())


def prompt(name: str, tokens: int = 77) -> Tensor:
    """A context of one picture, (1, tokens, width): another one for another name."""
    return torch.randn(1, tokens, CONTEXT_WIDTH, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def call_of(unet: Any, time: float, names: Sequence[str] = ("cat", "ugly"), size: int = 8, tokens: int = 77,
            seed: int = 0) -> Call:
    """The call of a step: a picture for each name, with tensors that nobody has seen before."""
    generator = torch.Generator().manual_seed(int(time * 8) + 4096 * seed)
    y_width = unet.config.get("projection_class_embeddings_input_dim")
    context = torch.cat([prompt(name, tokens) for name in names])
    return Call(
        latent=torch.randn(len(names), 4, size, size, generator=generator),
        timestep=torch.full((len(names),), time), context=context,
        y=context[:, :1, :1].expand(-1, 1, y_width)[:, 0].clone() if y_width else None,
    )


class Oracle:
    """The whole UNet, and the cached pass around a feature that another call left."""

    def __init__(self, unet: Any, depth: int) -> None:
        self.unet, self.depth = unet, depth
        self._bound = BoundUNet(unet, FAMILIES.read)

    @torch.no_grad()
    def whole(self, call: Call) -> tuple[Tensor, Tensor]:
        return deepcache.full_pass(*self._inputs(call), self.depth)

    @torch.no_grad()
    def shallow(self, call: Call, feature: Tensor) -> Tensor:
        return deepcache.cached_pass(*self._inputs(call), self.depth, feature)

    def _inputs(self, call: Call) -> tuple:
        self._bound.begin_sampling()
        self._bound.refresh(call)
        binding = self._bound.binding
        return binding.layout, binding.weights(), torch_ops, call


@dataclass
class Rig:
    """A UNet in the care of a runtime, with an oracle beside it; the oracle has weights of its own."""

    runtime: Runtime
    unet: Any
    oracle: Oracle
    log: list[str]
    _feature: dict[str, Tensor]

    @classmethod
    def of(cls, config: dict[str, Any] = SMALL, host_traits: HostTraits = WEBUI, seed: int = 0, runtime: Any = None,
           **options: Any) -> Rig:
        """options: those of Settings; by default DeepCache at every third step."""
        unet = diffusers_unet(seed, **config)
        runtime = runtime or Runtime()
        settings = Settings(**{**EVERY_THIRD, **options})
        runtime.configure(settings)
        runtime.adopt(unet, host_traits=host_traits)
        return cls(runtime, unet, Oracle(diffusers_unet(seed, **config), settings.deepcache_depth), [], {})

    def begin(self, times: Sequence[float] | None = STEPS, **more: Any) -> None:
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: times, **more))

    def host(self, call: Call) -> Tensor:
        """diffusers' own forward; with residuals, which it takes at other places, the oracle's."""
        return diffusers_output(self.unet, call) if call.control is None else self.oracle.whole(call)[0]

    @torch.no_grad()
    def run(self, call: Call) -> Tensor:
        """What the runtime answers; log takes down which half it was."""
        before = counts(self.runtime)
        output = self.runtime.run(self.unet, call, lambda: self.host(call))
        after = counts(self.runtime)
        changed = [deepcache for deepcache in after if after[deepcache] != before.get(deepcache, 0)]
        assert self.runtime.call_stats.route != "host", self.runtime.call_stats.reason
        self.log.append(changed[0] if changed else "whole")
        return output

    def check(self, call: Call, key: str, expected: str) -> None:
        """Run a call, which must be answered by this half; a shallow one around the last feature under key."""
        output = self.run(call)
        assert self.log[-1] == expected, (len(self.log), self.log)
        whole, feature = self.oracle.whole(call)
        if expected == "full":
            self._feature[key] = feature
            assert relative_error(output, whole) < 1e-5
        else:
            assert relative_error(output, self.oracle.shallow(call, self._feature[key])) < 1e-5
            assert relative_error(output, whole) > 1e-4

    def sample(self, times: Iterable[float], **more: Any) -> list[str]:
        """Which half answered at each of these timesteps."""
        self.log.clear()
        for time in times:
            self.run(call_of(self.unet, time, **more))
        return list(self.log)

    @property
    def reason(self) -> str:
        return self.runtime.status()["deepcache"]["reason"]


def passes(whole: Iterable[int], count: int) -> list[str]:
    """What answers a sampling with these whole steps."""
    chosen = set(whole)
    return ["full" if index in chosen else "cached" for index in range(count)]
