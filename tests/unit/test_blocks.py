"""Our blocks inside a foreign loop, with the real ldm UNet and a loop that adds residuals as a ControlNet does."""
from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from builders import SMALL_LDM, a_call, ldm_unet, randomise, relative_error
from ladder_builders import EAGER, NATIVE, Weather
from torch import Tensor

from lib_onediff.core.settings import Settings
from lib_onediff.hosts.a1111.stages import StageHooks
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.scan import HostTraits

CLOSE = 1e-5


def controlled_forward(unet: Any, x: Tensor, timesteps: Tensor, context: Tensor, strength: float = 0.1) -> Tensor:
    """Walks the stages and adds something to the middle and to every skip."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    embedding = unet.time_embed(timestep_embedding(timesteps, unet.model_channels))
    image, skips = x, []
    for block in unet.input_blocks:
        image = block(image, embedding, context)
        skips.append(image)
    image = unet.middle_block(image, embedding, context) + strength
    for block in unet.output_blocks:
        image = block(torch.cat([image, skips.pop() - strength], dim=1), embedding, context)
    return unet.out(image)


@pytest.fixture
def unet() -> Any:
    return ldm_unet(**SMALL_LDM)


@pytest.fixture
def loop(unet: Any) -> Iterator[StageHooks]:
    from ldm.modules.diffusionmodules.openaimodel import TimestepEmbedSequential

    loop = StageHooks([TimestepEmbedSequential])
    loop.serve()
    runtime.adopt(unet, host_traits=HostTraits())
    loop.watch(unet)
    yield loop
    loop.stop()
    runtime.release_all()
    assert not hasattr(TimestepEmbedSequential.forward, "__wrapped__")


def controlled(unet: Any, seed: int = 0, **size: int) -> Tensor:
    call = a_call(unet, seed=seed, **size)
    with torch.no_grad():
        return unet.forward(call.latent, call.timestep, call.context)


def own_loop(unet: Any) -> None:
    unet.forward = types.MethodType(controlled_forward, unet)


def counted(route: str) -> int:
    return runtime.status()["calls"][route]


@pytest.mark.parametrize("size", [{}, {"height": 16, "width": 8, "batch": 3, "tokens": 154}], ids=["8x8", "16x8"])
def test_blocks_in_a_foreign_loop_are_ours_and_exact(unet: Any, loop: StageHooks, size: dict[str, int]) -> None:
    own_loop(unet)
    with runtime.settings_for_run(Settings(enabled=False)):
        expected = controlled(unet, **size)
    before = counted("blocks")
    for _ in range(2):
        assert relative_error(controlled(unet, **size), expected) < CLOSE
        assert runtime.status()["route"] == "blocks"
    assert counted("blocks") == before + 2
    assert "test_blocks runs the UNet's loop" in runtime.status()["reason"]


def test_a_stage_that_differs_is_left_to_the_host(unet: Any, loop: StageHooks, monkeypatch: pytest.MonkeyPatch) -> None:
    from lib_onediff.devices.torch import operators as torch_ops

    own_loop(unet)
    with runtime.settings_for_run(Settings(enabled=False)):
        expected = controlled(unet)
    real = torch_ops.geglu
    monkeypatch.setattr(torch_ops, "geglu", lambda tokens, reader: real(tokens, reader) * 1.01)
    for _ in range(2):
        assert torch.equal(controlled(unet), expected)
        assert runtime.status()["route"] == "host"
    assert "a stage differs from the model's own" in runtime.status()["reason"]


@pytest.mark.parametrize("ours, theirs", [(2.0, 1.0), (1.0, 2.0)], ids=["slower", "faster"])
def test_the_slower_blocks_are_not_used(
    unet: Any, loop: StageHooks, monkeypatch: pytest.MonkeyPatch, ours: float, theirs: float
) -> None:
    """Where launches may cost more than the work, as on a GPU: a check, three passes of ours, three of the host's."""
    from ldm.modules.attention import FeedForward

    from lib_onediff.devices.torch import operators as torch_ops

    own_loop(unet)
    with runtime.settings_for_run(Settings(enabled=False)):
        expected = controlled(unet)
    monkeypatch.setattr(loop, "timed_on", ("cpu",))
    clock = [0.0]

    def taking(seconds: float, function: Any) -> Any:
        def slowly(*args: Any) -> Any:
            clock[0] += seconds
            return function(*args)

        return slowly

    monkeypatch.setattr(torch_ops, "geglu", taking(ours, torch_ops.geglu))
    monkeypatch.setattr(FeedForward, "forward", taking(theirs, FeedForward.forward))
    runtime.managed_unet(unet).bound.host_traits = HostTraits(trusted={__name__})
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    routes, reasons = [], []
    for _ in range(10):
        assert relative_error(controlled(unet), expected) < CLOSE
        routes.append(runtime.status()["route"])
        reasons.append(runtime.status()["reason"])
    assert routes == ["blocks"] * 4 + ["host"] * 3 + (["host"] if ours > theirs else ["blocks"]) * 3
    assert reasons[4] == "the WebUI's own blocks are timed"
    assert ("the WebUI's own blocks are faster here" in reasons[-1]) == (ours > theirs)


def test_where_one_backend_fails_the_next_computes_the_blocks(unet: Any, loop: StageHooks, weather: Weather) -> None:
    own_loop(unet)
    with runtime.settings_for_run(Settings(enabled=False)):
        expected = controlled(unet)
    assert relative_error(controlled(unet), expected) < CLOSE
    assert runtime.status()["backend"] == NATIVE and weather.calls
    runtime.purge()
    weather.raises(RuntimeError("out of resource: shared memory"))
    assert relative_error(controlled(unet), expected) < CLOSE and runtime.status()["route"] == "host"
    assert "out of resource" in runtime.status()["reason"]
    for _ in range(2):
        assert relative_error(controlled(unet), expected) < CLOSE
    assert (runtime.status()["backend"], runtime.status()["route"]) == (EAGER, "blocks")
    assert "out of resource" in runtime.status()["reason"], "why it is not the better one"


def test_blocks_that_record_are_left_to_the_host(unet: Any, loop: StageHooks) -> None:
    """A ControlNet reference sets _forward on the transformer blocks to read along."""
    own_loop(unet)
    controlled(unet)
    seen: list[Tensor] = []
    block = next(module for module in unet.modules() if type(module).__name__ == "BasicTransformerBlock")
    own = block._forward

    def recording(self: Any, x: Tensor, context: Tensor | None = None) -> Tensor:
        seen.append(x)
        return own(x, context)

    block._forward = types.MethodType(recording, block)
    runtime.begin_sampling(unet)
    controlled(unet)
    assert len(seen) == 1
    assert runtime.status()["route"] == "host"
    assert "has a _forward of its own" in runtime.status()["reason"]


def test_weights_changed_between_passes_are_seen(unet: Any, loop: StageHooks) -> None:
    own_loop(unet)
    controlled(unet)
    randomise(unet, seed=5)
    with runtime.settings_for_run(Settings(enabled=False)):
        expected = controlled(unet)
    assert relative_error(controlled(unet), expected) < CLOSE
    assert runtime.status()["route"] == "blocks"


def test_a_pass_that_its_owner_gives_up_keeps_no_weights(unet: Any, loop: StageHooks) -> None:
    unet.forward = types.MethodType(failing_forward, unet)
    watched, _ = loop._places[unet.input_blocks[0]]
    # pytest.raises would keep the traceback, and with it the frames of the loop.
    with contextlib.suppress(TypeError):
        controlled(unet)
        pytest.fail("the loop was to fail")
    assert runtime.status()["route"] == "blocks" and watched.running is None


def failing_forward(unet: Any, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
    return controlled_forward(unet, x, timesteps, context, strength="no number")
