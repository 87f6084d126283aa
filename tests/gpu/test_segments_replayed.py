"""Functions of other extensions on a real GPU: OneDiff captures the segments of the UNet between them as CUDA graphs,
whose tensors overlap in memory, and calls the functions between the replays. Here they are attention processors."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_calls import last_call
from own_forward import own_forward
from torch import Tensor, nn

pytest.importorskip("diffusers")

from lib_onediff.bench.models import inputs, random_unet
from lib_onediff.public import compile_unet
from lib_onediff.runtime.runtime import runtime
from lib_onediff.runtime.verify import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_runtime")]
ROUTES = ("plain", "plain", "graph", "graph")


@pytest.fixture
def unet() -> Any:
    unet = random_unet("tiny-sdxl", torch.device("cuda")).half()
    return compile_unet(unet)


def error_of_a_call(unet: Any, width: int = 256, height: int = 256, seed: int = 0, **wanted: str) -> float:
    """Make a call, and return the relative error of our output against that of the host's forward with the same random
    numbers. wanted: values that last_call() must have, such as the route."""
    given = inputs(unet, width, height, 2, 77, torch.float16)
    torch.manual_seed(seed)
    given["sample"] = torch.randn_like(given["sample"])
    given["encoder_hidden_states"] = torch.randn_like(given["encoder_hidden_states"])
    with torch.no_grad():
        torch.manual_seed(seed)
        output = unet(**given, return_dict=False)[0]
        assert {name: last_call()[name] for name in wanted} == wanted, last_call()["reason"]
        torch.manual_seed(seed)
        return relative_error(output, own_forward(unet)(**given, return_dict=False)[0])


class ScaledContext:
    """An attention processor that OneDiff does not know: it multiplies the prompt by 1.1 and calls another one."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor, **others: Any) -> Tensor:
        return self._processor(attn, hidden_states, 1.1 * encoder_hidden_states, **others)


def cross_attentions(unet: Any) -> list[str]:
    return [name for name, _ in unet.named_modules() if name.endswith(".attn2")]


def replace_processors(unet: Any, make: Any, names: Any = None) -> None:
    """Replace the processors of cross-attentions by make(processor). names: the paths of these attentions; None: all
    cross-attentions."""
    processors = unet.attn_processors
    chosen = [f"{name}.processor" for name in cross_attentions(unet) if names is None or name in names]
    unet.set_attn_processor({**processors, **{name: make(processors[name]) for name in chosen}})


@contextlib.contextmanager
def scaled_context(unet: Any) -> Iterator[None]:
    """An unknown processor in every cross-attention."""
    before = unet.attn_processors
    replace_processors(unet, ScaledContext)
    yield
    unet.set_attn_processor(before)


class Keeping:
    """An attention processor that keeps its input, with a copy, and multiplies it by random numbers drawn on the
    GPU."""

    kept: list[tuple[Tensor, Tensor]] = []

    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *rest: Any, **more: Any) -> Tensor:
        noise = torch.rand(hidden_states.shape[1], 1, device=hidden_states.device, dtype=hidden_states.dtype)
        output = self._own(attn, hidden_states * (1 + noise), *rest, **more)
        self.kept.append((hidden_states, hidden_states.clone()))
        return output


@pytest.mark.parametrize(("name", "side", "backend"), [
    ("tiny-sdxl", 256, "native"), ("tiny-sdxl", 256, "cudagraph"), ("sdxl", 1024, "native"),
])
def test_every_replay_with_an_unknown_processor_is_close_to_the_host_output(
    name: str, side: int, backend: str
) -> None:
    """The first two calls of a size run without graphs, later ones replay them (ROUTES). After the processor is
    removed, calls of this size have another entry in the table, without patches. name: the name of the model."""
    unet = compile_unet(random_unet(name, torch.device("cuda")).half(), backend=backend)
    with scaled_context(unet):
        for seed, route in enumerate(ROUTES):
            assert error_of_a_call(unet, side, side, seed=seed, backend=backend, route=route) < 5e-3
    assert error_of_a_call(unet, side, side, seed=9) < 5e-3 and not runtime.call_stats.last_call.entry.key.patches


def test_processors_may_keep_their_arguments_and_draw_random_numbers(unet: Any) -> None:
    """No later replay writes to a tensor that a processor has kept. Our output is close to the host's with the same
    seed, so the processors draw the same random numbers in both."""
    Keeping.kept.clear()
    replace_processors(unet, Keeping)
    with torch.inference_mode():
        for seed in range(4):
            assert error_of_a_call(unet, 128, 128, seed=seed, route=ROUTES[seed]) < 5e-3
    for seed in range(8):
        assert error_of_a_call(unet, seed=seed, route=ROUTES[min(seed, 3)]) < 5e-3
    assert len(Keeping.kept) > 8 and all(torch.equal(tensor, copy) for tensor, copy in Keeping.kept)


def test_graphs_of_sizes_with_processors_and_without_can_be_replayed_in_turn(unet: Any) -> None:
    """All these graphs share a pool of memory, but a replay must not overwrite what another graph still needs: the
    output of every replay is close to the host's."""
    sizes = [(256, 256), (128, 192), (192, 136)]
    for size in sizes:
        for seed in range(3):
            error_of_a_call(unet, *size, seed=seed)
    with scaled_context(unet):
        for size in sizes:
            for seed in range(3):
                error_of_a_call(unet, *size, seed=seed)
        for seed in range(3):
            for size in sizes:
                assert error_of_a_call(unet, *size, seed=seed, route="graph") < 5e-3
    for size in sizes:
        # The UNet's processors are new objects, so the graphs must be captured again.
        error_of_a_call(unet, *size)
        assert error_of_a_call(unet, *size, route="graph") < 5e-3


class Failing(Keeping):
    """An attention processor that raises an error at the call number `after` from now, in the count of all instances
    together. 0: never."""

    after = 0

    def __call__(self, attn: nn.Module, hidden_states: Tensor, *rest: Any, **more: Any) -> Tensor:
        Failing.after -= 1
        if not Failing.after:
            raise ValueError("a function that fails")
        return self._own(attn, hidden_states, *rest, **more)


def test_a_processor_that_fails_during_a_capture_has_no_lasting_effect(unet: Any) -> None:
    """The output of that call is close to the host's, and the reason for having no graph names the error. After the
    processor is removed, the size is captured and replayed."""
    error_of_a_call(unet, 128, 128)
    replace_processors(unet, Failing)
    count = len(cross_attentions(unet))
    Failing.after = 0
    error_of_a_call(unet, seed=0)
    # The second call runs each processor once without a graph; the error comes half-way through the capture after it.
    Failing.after = count + count // 2
    assert error_of_a_call(unet, seed=1) < 5e-3
    assert "a function that fails" in runtime.call_stats.last_call.entry.no_graph
    replace_processors(unet, lambda processor: getattr(processor, "_own", processor))
    for seed, route in enumerate(ROUTES):
        assert error_of_a_call(unet, seed=seed, route=route) < 5e-3
    assert torch.randn(4, device="cuda").isfinite().all()
