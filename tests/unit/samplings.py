"""Samplings of a UNet by a runtime, as hosts make them; and the outputs that DeepCache must have, computed by full and
cached passes."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, SMALL, diffusers_output, diffusers_unet, relative_error
from torch import Tensor

from lib_onediff.core import sampling
from lib_onediff.core.call import CACHED, FULL, PromptRows, half_of
from lib_onediff.core.inputs import take_rows
from lib_onediff.core.policy import StepMemory
from lib_onediff.core.sampling import Sampling, Solver
from lib_onediff.core.settings import Settings
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet import forward as deepcache
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.runtime import Runtime
from lib_onediff.steps import schedules
from lib_onediff.weights.bound import BoundNetwork
from lib_onediff.weights.scan import HostTraits

WEBUI = HostTraits()
STEPS = [float(time) for time in range(951, 0, -50)]
EVERY_THIRD: dict[str, Any] = {"deepcache_interval": 3}
# How a call was answered: by a forecast, by the prompt's rows only, or by the whole UNet.
FORECAST = "forecast"
ALONE = "prompt alone"
WHOLE = "whole"
ON: dict[str, dict[str, Any]] = {
    "forecast": {**EVERY_THIRD, "deepcache_depth": 0}, "guidance": {"skip_negative_after": 50},
}


@pytest.fixture(autouse=True)
def few_steps_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Applies to files that import it: step policies are active in samplings of few steps, too."""
    monkeypatch.setattr(sampling, "FEWEST_STEPS", 0)


@pytest.fixture(autouse=True)
def evenly_spaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Applies to files that import it: without a searched schedule, full passes are evenly spaced, one every `interval`
    steps."""
    def one_every_interval(total: int, interval: int) -> frozenset[int]:
        return frozenset(range(0, total, interval))

    monkeypatch.setattr(schedules, "authors_whole_steps", one_every_interval)
    schedules.schedule_for.cache_clear()
    yield
    schedules.schedule_for.cache_clear()


def counts(runtime: Any) -> dict[str, int]:
    """The number of full and cached passes that DeepCache has counted."""
    status = runtime.status()["deepcache"]
    return {name: status[name] for name in (FULL, CACHED)}


def memories(rig: Rig) -> dict[str, StepMemory]:
    """The step policies' memories for the rig's UNet, by the policy's name."""
    kept: dict[str, StepMemory] = rig.runtime.services.networks.get(rig.unet).step_memories
    return kept


def prompt(name: str, tokens: int = 77) -> Tensor:
    """A random context of one prompt, (1, tokens, width). name: equal names give equal contexts."""
    return torch.randn(1, tokens, CONTEXT_WIDTH, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def call_of(unet: Any, time: float, names: Sequence[str] = ("cat", "ugly"), size: int = 8, tokens: int = 77,
            seed: int = 0) -> UNetCall:
    """The UNet call of a step, with new random latents. time: the timestep. names: the name of each row's prompt; equal
    names give equal contexts."""
    generator = torch.Generator().manual_seed(int(time * 8) + 4096 * seed)
    y_width = unet.config.get("projection_class_embeddings_input_dim")
    context = torch.cat([prompt(name, tokens) for name in names])
    return UNetCall(
        latent=torch.randn(len(names), 4, size, size, generator=generator),
        timestep=torch.full((len(names),), time), context=context,
        y=context[:, :1, :1].expand(-1, 1, y_width)[:, 0].clone() if y_width else None,
    )


class Oracle:
    """DeepCache's passes of a UNet, by our forward with torch's operators and without the runtime: the reference for
    which pass the runtime makes at each step, and with the deep feature of which step."""

    def __init__(self, unet: Any, depth: int) -> None:
        self.unet = unet
        self.depth = depth
        self._bound = BoundNetwork(unet, FAMILIES.read)

    @torch.no_grad()
    def whole(self, call: UNetCall) -> tuple[Tensor, Tensor]:
        """A full pass: the output, and the deep feature."""
        return deepcache.full_pass(*self._inputs(call), self.depth)

    @torch.no_grad()
    def shallow(self, call: UNetCall, feature: Tensor) -> Tensor:
        """The output of a cached pass with this deep feature."""
        return deepcache.cached_pass(*self._inputs(call), self.depth, feature)

    def _inputs(self, call: UNetCall) -> tuple:
        self._bound.refresh(call)
        binding = self._bound.binding
        return binding.layout, binding.weights(), torch_ops, call


class Adopted:
    """A new UNet, adopted by a runtime. runtime: None for a new one. options: those of Settings."""

    def __init__(self, config: dict[str, Any] = SMALL, seed: int = 0, runtime: Any = None, **options: Any) -> None:
        self.config = config
        self.settings = Settings(**options)
        self.unet = diffusers_unet(seed, **config)
        self.runtime = runtime or Runtime()
        self.runtime.configure(self.settings)
        self.runtime.adopt(self.unet, host_traits=WEBUI)

    def begin(self, times: Any = STEPS, **more: Any) -> None:
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: times, **more))


class Rig(Adopted):
    """A UNet with DeepCache, by default at interval 3, and an oracle with a copy of it. log: the kind of each call's
    pass, "full" or "cached"; "whole" for a call that DeepCache counted as neither."""

    def __init__(self, config: dict[str, Any] = SMALL, seed: int = 0, runtime: Any = None, **options: Any) -> None:
        super().__init__(config, seed, runtime, **{**EVERY_THIRD, **options})
        self.oracle = Oracle(diffusers_unet(seed, **config), self.settings.deepcache_depth)
        self.log: list[str] = []
        self._feature: dict[str, Tensor] = {}

    def host(self, call: UNetCall) -> Tensor:
        """The output of diffusers' own forward; of the oracle for calls with control residuals, which diffusers adds at
        other places."""
        return diffusers_output(self.unet, call) if call.control is None else self.oracle.whole(call)[0]

    @torch.no_grad()
    def run(self, call: UNetCall) -> Tensor:
        """The runtime's output of a call. Adds the kind of its pass to log."""
        before = counts(self.runtime)
        output = self.runtime.run(self.unet, call, lambda: self.host(call))
        after = counts(self.runtime)
        changed = [kind for kind in after if after[kind] != before.get(kind, 0)]
        assert self.runtime.call_stats.last_call.route != "host", self.runtime.call_stats.last_call.reason
        self.log.append(changed[0] if changed else "whole")
        return output

    def check(self, call: UNetCall, key: str, expected: str) -> None:
        """Run a call and compare its output with the oracle's. expected: "full" or "cached". key: names the call's
        prompt and shape; a cached pass must use the last deep feature of this key."""
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
        """Run calls at these timesteps. Returns the kinds of their passes."""
        self.log.clear()
        for time in times:
            self.run(call_of(self.unet, time, **more))
        return list(self.log)

    @property
    def reason(self) -> str:
        return self.runtime.status()["deepcache"]["reason"]


def passes(whole: Iterable[int], count: int) -> list[str]:
    """For each of `count` steps: "full" if `whole` has its index, otherwise "cached"."""
    chosen = set(whole)
    return ["full" if index in chosen else "cached" for index in range(count)]


class Samplings(Adopted):
    """A UNet with one step policy. policy: its name in ON. options: further ones of Settings."""

    def __init__(self, policy: str, config: dict[str, Any] = SMALL, **options: Any) -> None:
        super().__init__(config, **{**ON[policy], **options})
        self.policy = policy

    def begin(self, times: Any = STEPS, **more: Any) -> None:
        super().begin(times, **{"solver": lambda: Solver.FIRST_ORDER, **more})

    def call(self, time: float, **more: Any) -> UNetCall:
        """The call of a step, with equal latents for prompt and negative prompt. more: arguments of call_of, whose rows
        have different latents."""
        if more:
            return call_of(self.unet, time, **more)
        call = call_of(self.unet, time)
        return replace(call, latent=call.latent[:1].repeat(2, 1, 1, 1))

    def host(self, call: UNetCall) -> Tensor:
        return diffusers_output(self.unet, call)

    def rows(self, call: UNetCall) -> PromptRows:
        """The rows of the prompt (the second half of the batch), and a function that computes them by the host."""
        rows = half_of(call.latent.shape[0], False)
        return PromptRows(rows, lambda: self.host(take_rows(call, rows)))

    @torch.no_grad()
    def run(self, call: UNetCall, guidance: Callable[[], PromptRows | str] | None = None) -> tuple[str, Tensor]:
        """Run a call. Returns how it was computed (FORECAST, ALONE or WHOLE), and its output."""
        before = self.runtime.status()
        output = self.runtime.run(
            self.unet, call, lambda: self.host(call), guidance=guidance or (lambda: self.rows(call))
        )
        after = self.runtime.status()
        assert after["route"] != "host", after["reason"]
        if after["forecast"]["calls"] > before["forecast"]["calls"]:
            return FORECAST, output
        is_alone = after["guidance"]["without_negative"] > before["guidance"]["without_negative"]
        return ALONE if is_alone else WHOLE, output

    def sample(self, times: Iterable[float] = STEPS, **more: Any) -> list[str]:
        """Run calls at these timesteps. Returns how each was computed."""
        return [self.run(self.call(time, **more))[0] for time in times]

    @property
    def reason(self) -> str:
        return str(self.runtime.status()[self.policy]["reason"])
