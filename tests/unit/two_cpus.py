"""Stand-ins for two GPUs on a machine without GPUs: both are its CPU. The second has another device index, which is
their only difference."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from builders import SMALL, diffusers_output, diffusers_unet
from samplings import STEPS, WEBUI, call_of
from torch import Tensor, nn

from lib_onediff.core.device_memory import Card
from lib_onediff.core.sampling import Sampling
from lib_onediff.core.settings import Settings
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.runtime import Runtime

FIRST = torch.device("cpu")
SECOND = torch.device("cpu", 1)
# Free bytes of a GPU without memory pressure.
ROOMY = 2**40
# The prompt and the negative prompt, one for each row of a call.
NAMES = "cat", "ugly"


@dataclass
class TwoCpus(Card):
    """The CPU as two GPUs. free: the free bytes of each. full: whether the second one runs out of memory when it is
    used. launched: the GPUs that computed something, in order."""

    cards: list[torch.device] = field(default_factory=lambda: [FIRST, SECOND])
    free: int = ROOMY
    full: bool = False
    launched: list[torch.device] = field(default_factory=list)

    def all(self) -> list[torch.device]:
        return self.cards

    def room(self, device: torch.device) -> int:
        return self.free

    @contextlib.contextmanager
    def using(self, device: torch.device) -> Iterator[None]:
        self.launched.append(device)
        yield
        if self.full and device == SECOND:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@dataclass
class OnTwoGpus:
    """A UNet that a runtime computes on two GPUs. second: the status of the second GPU. copies: the UNet's copies on
    it."""

    runtime: Runtime
    unet: Any
    cards: TwoCpus

    def __post_init__(self) -> None:
        self._others = WeakSet(self.runtime.services.networks)

    @classmethod
    def of(cls, config: dict[str, Any] = SMALL, cards: TwoCpus | None = None, **options: Any) -> OnTwoGpus:
        runtime = Runtime()
        unet = diffusers_unet(**config)
        cards = cards or TwoCpus()
        runtime.two_gpus.cards = cards
        runtime.configure(Settings(**{"second_gpu": "auto", **options}))
        runtime.adopt(unet, host_traits=WEBUI)
        return cls(runtime, unet, cards)

    def begin(self) -> None:
        """Begin a sampling over STEPS, as a host does."""
        self.runtime.begin_sampling(self.unet, Sampling(times=lambda: STEPS))

    def call(self, time: float = 501.0, names: Any = NAMES) -> UNetCall:
        return call_of(self.unet, time, names)

    @torch.no_grad()
    def run(self, call: UNetCall, host: Callable[[], Tensor] | None = None, **more: Any) -> Tensor:
        return self.runtime.run(self.unet, call, host or (lambda: diffusers_output(self.unet, call)), **more)

    @property
    def second(self) -> dict[str, Any]:
        return self.runtime.status()["second_gpu"]

    @property
    def copies(self) -> list[nn.Module]:
        return [unet for unet in self.runtime.services.networks if unet is not self.unet and unet not in self._others]


def close(output: Tensor, expected: Tensor) -> bool:
    """Whether an output equals the expected one but for rounding in float32."""
    return bool(torch.allclose(output, expected, atol=1e-5, rtol=1e-4))


@torch.no_grad()
def host_output(served: OnTwoGpus, call: UNetCall) -> Tensor:
    """The output of diffusers' own forward, on one GPU."""
    return diffusers_output(served.unet, call)


def change_in_place(unet: nn.Module) -> None:
    for parameter in unet.parameters():
        parameter.mul_(1.05)


def change_by_data(unet: nn.Module) -> None:
    """New values in new memory, which torch does not count as an edit."""
    for parameter in unet.parameters():
        parameter.data = parameter.data * 1.05


def change_one_layer(unet: nn.Module) -> None:
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_k.weight.mul_(3)
