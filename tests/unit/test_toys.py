"""A family, a device and a step policy that lib_onediff does not contain: each only needs to be registered."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib_onediff.core.call import Call
from lib_onediff.core.family import Layout
from lib_onediff.core.leaves import Convolution, Linear
from lib_onediff.core.policy import Answer, Compute, StepContext, StepMemory
from lib_onediff.core.refusal import Refusal
from lib_onediff.core.sampling import UNANNOUNCED, Sampling
from lib_onediff.core.settings import Settings
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.devices.torch.device import Eager
from lib_onediff.families.leaf_reader import LeafReader
from lib_onediff.runtime.runtime import Runtime
from lib_onediff.steps.deepcache import NO_CUT

TIMES = [float(time) for time in range(981, 0, -49)]


class Toy(nn.Module):
    """A network: a convolution of the latent, plus a linear layer of the prompt's mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)
        self.prompt = nn.Linear(8, 4)

    def forward(self, latent: Tensor, timestep: Tensor, context: Tensor) -> Tensor:
        return self.convolution(latent) * timestep[:, None, None, None] + self.prompt(context.mean(1))[..., None, None]


@dataclass(frozen=True)
class ToyLayout(Layout):
    convolution: Convolution
    prompt: Linear
    model_name: str = "Toy"


@dataclass(frozen=True)
class ToyCall(Call):
    context: Tensor

    @property
    def prompt(self) -> tuple[Tensor, ...]:
        return (self.context,)


def is_toy(module: nn.Module) -> bool:
    return isinstance(module, Toy)


def read_toy(module: Any) -> ToyLayout:
    reader = LeafReader(module)
    layout = ToyLayout(reader.convolution(module.convolution), reader.linear(module.prompt))
    reader.refuse_unclaimed()
    return layout


class Toys:
    layout = ToyLayout
    schedule = "toy"
    readers = ((is_toy, read_toy),)
    usual_sizes = ()

    def refuse_call(self, layout: ToyLayout, call: ToyCall) -> None:
        if call.latent.shape[1] != layout.convolution.in_channels:
            raise Refusal("a toy has four channels")

    def output(self, layout: ToyLayout, weights: Any, ops: Any, call: ToyCall) -> Tensor:
        hidden_states = ops.convolution(call.latent, weights[layout.convolution.path], layout.convolution)
        prompt = ops.linear(call.context.mean(1), weights[layout.prompt.path])
        return hidden_states * call.timestep[:, None, None, None] + prompt[..., None, None]

    def deepest(self, layout: ToyLayout) -> int:
        return 0

    def attentions(self, layout: ToyLayout, call: ToyCall) -> list[Any]:
        return []


class ToyDevice(Eager):
    """A device that computes with PyTorch's operators; a real one has its own. calls: how often they were requested."""

    name = "toy"

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def refuse_call(self, call: Call, weight_marks: Any, layout: Any) -> None:
        if call.latent.shape[-1] > 16:
            raise Refusal("it is too wide for a toy")

    def operators(self, wide_norms: bool = False) -> Any:
        self.calls += 1
        return torch_ops


class EveryOther:
    """A policy that answers every second step with the last computed output, and refuses the fifth step."""

    name = "every_other"
    title = "Every other step"

    def __init__(self, whole_batch: bool) -> None:
        self.whole_batch = whole_batch
        self.status: dict[str, Any] = {"skipped": 0, "reason": ""}

    def is_on(self, settings: Settings) -> bool:
        return settings.enabled

    def answerer(self, step_context: StepContext) -> Callable[[Compute], Answer]:
        index = step_context.position().step.index
        if index == 4:
            raise Refusal("the fifth step is whole")
        last = step_context.memory_of(self.name, LastOutput)

        def answer(compute: Compute) -> Answer:
            self.status["reason"] = ""
            if index % 2 and last.output is not None:
                self.status["skipped"] += 1
                return Answer(last.output)
            computed = compute(step_context.call, step_context.host)
            last.output = computed.output
            return computed

        return answer


class LastOutput(StepMemory):
    def __init__(self) -> None:
        self.output: Tensor | None = None


def a_call(time: float = 500.0, width: int = 8) -> ToyCall:
    generator = torch.Generator().manual_seed(int(time))
    return ToyCall(
        torch.randn(2, 4, 8, width, generator=generator), torch.full((2,), time),
        torch.randn(2, 77, 8, generator=generator),
    )


def run(runtime: Runtime, toy: Toy, call: ToyCall) -> Tensor:
    with torch.no_grad():
        return runtime.run(toy, call, lambda: toy(call.latent, call.timestep, call.context))


@pytest.mark.parametrize("width", [8, 24])
def test_a_new_family_is_computed_by_a_new_device_or_by_eager_where_that_device_refuses(width: int) -> None:
    """The toy device refuses latents wider than 16 pixels, which PyTorch's device, eager, then computes. Outputs are
    close to the network's own; an edited weight takes effect in the next call."""
    toy = Toy()
    device = ToyDevice()
    runtime = Runtime(policies=(), devices=(device, Eager()), families=(Toys(),))
    runtime.adopt(toy)
    call = a_call(width=width)
    with torch.no_grad():
        expected = toy(call.latent, call.timestep, call.context)
    assert torch.allclose(run(runtime, toy, call), expected, atol=1e-4)
    status = runtime.status()
    assert (status["route"], status["model"]) == ("plain", "Toy")
    assert (status["backend"], bool(device.calls)) == (("toy", True) if width == 8 else ("eager", False))
    with torch.no_grad():
        toy.convolution.weight.mul_(2)
        expected = toy(call.latent, call.timestep, call.context)
    assert torch.allclose(run(runtime, toy, call), expected, atol=1e-4)


def test_a_network_of_no_registered_family_is_computed_by_the_host() -> None:
    """The output is the host's, to the bit, and the status gives the reason."""
    toy = Toy()
    call = a_call()
    runtime = Runtime()
    runtime.adopt(toy)
    assert torch.equal(run(runtime, toy, call), toy(call.latent, call.timestep, call.context))
    assert "does not support this kind of UNet or transformer" in runtime.status()["reason"]


@pytest.mark.parametrize("whole_batch", [True, False])
def test_a_new_step_policy_repeats_the_output_of_every_other_step(whole_batch: bool) -> None:
    """The policy refuses the fifth step, which is computed. Its memory lasts for one sampling, and it is inactive
    outside of samplings. whole_batch: whether it answers for prompt and negative prompt together."""
    toy = Toy()
    policy = EveryOther(whole_batch)
    runtime = Runtime(policies=(policy,), devices=(Eager(),), families=(Toys(),))
    runtime.adopt(toy)
    memories = runtime.services.networks.get(toy).step_memories
    for _ in range(2):
        runtime.begin_sampling(toy, Sampling(times=lambda: TIMES))
        # The fifth step does not use the policy, so the sixth repeats the output of the third.
        for index, source in enumerate([0, 0, 2, 2, 4, 2, 6]):
            call = a_call(TIMES[source])
            expected = toy(call.latent, call.timestep, call.context)
            assert torch.allclose(run(runtime, toy, a_call(TIMES[index])), expected, atol=1e-3)
            assert "the fifth step is whole" in policy.status["reason"] or index != 4
        assert memories[policy.name].output is not None
        runtime.end_sampling()
        assert not memories
    assert runtime.status()["every_other"] == {"skipped": 6, "reason": ""}
    run(runtime, toy, a_call(TIMES[1]))
    assert runtime.status()["every_other"]["reason"] == f"Every other step is inactive: {UNANNOUNCED}"


def test_deepcache_is_inactive_for_a_family_without_a_cut() -> None:
    """The toy network cannot be cut into shallow and deep layers (deepest() is 0), so that every step is computed. The
    status gives the reason."""
    toy = Toy()
    runtime = Runtime(devices=(Eager(),), families=(Toys(),))
    runtime.configure(Settings(deepcache_interval=3))
    runtime.adopt(toy)
    runtime.begin_sampling(toy, Sampling(times=lambda: TIMES))
    for time in TIMES[:4]:
        call = a_call(time)
        assert torch.allclose(run(runtime, toy, call), toy(call.latent, call.timestep, call.context), atol=1e-3)
    assert runtime.status()["deepcache"]["reason"] == f"DeepCache is inactive: {NO_CUT}"
