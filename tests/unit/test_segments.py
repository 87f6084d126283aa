"""Functions of other extensions between CUDA graphs are called in every replay, with its tensors and options."""
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from builders import a_call, compute, diffusers_arguments, our_output, relative_error, shared_ldm_unet
from ladder_builders import entry_of, reason, served_by
from own_forward import own_forward
from tape import TapeRecording
from test_patch_points import CASES, CLOSE, PATCHES, Options, copied, ours
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lib_onediff.core.inputs import cloned_inputs
from lib_onediff.devices.cuda.graphs.segments import GraphRecording, GraphRunner, record
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.families.registry import FAMILIES
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.weights.bound import BoundNetwork

SEED = 7


def recorded(unet: Any, call: UNetCall) -> tuple[GraphRunner, TapeRecording]:
    """Our forward, recorded in graphs of a CPU's stand-in (see tape.py): what replays it, and the recording."""
    bound = BoundNetwork(unet, FAMILIES.read)
    bound.refresh(call)
    inputs = cloned_inputs(call)
    recording = TapeRecording()
    weights = bound.binding.weights()
    runner = record(recording, inputs, None, lambda call: compute(bound.layout, weights, torch_ops, call))
    return runner, recording


@pytest.mark.parametrize("case", CASES)
def test_a_replay_between_functions_of_extensions_computes_the_new_call(case: str) -> None:
    """The graphs of one call replay another call, and then the first again. Each output is close to that of our forward
    without graphs. case: which functions of extensions divide the forward into several graphs."""
    unet = shared_ldm_unet()
    with torch.no_grad():
        first, second = (ours(unet, a_call(unet, seed=seed), copied(CASES[case])) for seed in (0, 1))
        runner, recording = recorded(unet, first)
        assert recording.parts > 1 and relative_error(runner.output, our_output(unet, first)) < CLOSE
        for call in (second, first):
            assert relative_error(runner.run(call), our_output(unet, call)) < CLOSE


def test_a_view_of_a_recording_does_not_keep_its_tensor_alive() -> None:
    """Functions between graphs get views of a graph's memory. Such a view has the tensor's values and strides, but does
    not own the memory, so that later graphs can reuse it."""
    given = torch.arange(24.0).view(4, 6)[:, 1:4].t()
    memory = StorageWeakRef(given.untyped_storage())
    view = GraphRecording.view(None, given)  # type: ignore[arg-type]
    assert torch.equal(view, given) and view.stride() == given.stride()
    view.mul_(2)
    assert given[0, 0] == 2, "it is the same memory"
    del given
    assert memory.expired()


def test_functions_between_graphs_get_the_options_of_the_replayed_call() -> None:
    """The functions are called at the same places, and as often, as in the recorded forward."""
    unet = shared_ldm_unet()
    received = []

    def listening(seed: int) -> UNetCall:
        def hear(tensor: Tensor, extra: Options) -> Tensor:
            received.append((seed, extra["step"], extra["block"], extra["block_index"], extra["transformer_index"]))
            return tensor * extra["step"]

        options: Options = {"step": 1 + seed / 10, PATCHES: {"attn2_output_patch": [hear]}}
        return ours(unet, a_call(unet, seed=seed), options)

    with torch.no_grad():
        runner, _ = recorded(unet, listening(0))
        plain = received.copy()
        places = len(received)
        received.clear()
        output = runner.run(listening(3))
        assert [(3, 1.3, *place) for _, _, *place in plain] == received and len(received) == places > 10
        assert relative_error(output, our_output(unet, listening(3))) < CLOSE


class Louder:
    """An extension's attention processor, which counts its calls. factor: multiplies its output."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor
        self.calls = 0

    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        self.calls += 1
        return self.factor * attn.to_out[0](attn.to_v(hidden_states))


def plain_processor() -> Any:
    from diffusers.models import attention_processor

    return attention_processor.AttnProcessor2_0()


def put(unet: nn.Module, processor: Any) -> Any:
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(processor)
    return processor


def error(unet: nn.Module, seed: int) -> float:
    """The error of a compiled UNet's output against that of diffusers' own forward, with the same random numbers.
    Asserts that both leave torch's and Python's generators alike."""
    given = diffusers_arguments(a_call(unet, seed=seed))
    with torch.no_grad():
        torch.manual_seed(SEED)
        random.seed(SEED)
        output = unet(**given).sample
        after = torch.rand(1), random.random()
        torch.manual_seed(SEED)
        random.seed(SEED)
        expected = own_forward(unet)(**given).sample
        assert (torch.rand(1), random.random()) == after, "ours draws as many random numbers as the host"
    return relative_error(output, expected)


def test_an_extensions_processor_is_called_once_in_each_replay(unet: nn.Module) -> None:
    """From the third call on, graphs are replayed around the processor. An edited processor, another one in its place,
    and diffusers' own in turn with it take effect in the next call. Outputs are close to those of diffusers."""
    processor = put(unet, Louder())
    for seed, route in enumerate(("plain", "plain", "graph", "graph")):
        assert error(unet, seed) < CLOSE and served_by() == ("native", route), reason()
    assert "test_segments.Louder in 1 attentions" in reason()
    before = processor.calls
    assert error(unet, 9) < CLOSE and processor.calls == before + 2  # ours, and the expected output's
    processor.factor = 3.0
    assert error(unet, 9) < CLOSE and served_by() == ("native", "graph")
    other = put(unet, Louder(5.0))
    assert error(unet, 4) < CLOSE and served_by() == ("native", "graph") and other.calls == 2, "called in its place"
    for seed in range(3):
        put(unet, Louder() if seed % 2 else plain_processor())
        error(unet, seed)
    for seed in range(4):
        put(unet, Louder() if seed % 2 else plain_processor())
        assert error(unet, seed) < CLOSE and served_by() == ("native", "graph"), reason()


class Drawing(Louder):
    """A processor that draws random numbers from torch and from Python."""

    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        mask = torch.rand(1, hidden_states.shape[1], 1) > 0.3 * random.random()
        return super().__call__(attn, hidden_states * mask)


def test_a_processor_between_graphs_draws_the_random_numbers_of_the_hosts_forward(unet: nn.Module) -> None:
    """This also holds for the check at the first use, which computes the forward more than once. error() compares both
    random generators afterwards."""
    put(unet, Drawing())
    for seed, route in enumerate(("plain", "plain", "graph", "graph")):
        assert error(unet, seed) < CLOSE and served_by() == ("native", route), reason()


class Counting(Louder):
    """A processor with another factor at each call from the fifth on. Its list of calls cannot be restored."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        self.factor = 2.0 + max(0, len(self.seen) - 3)
        self.seen.append(1)
        return super().__call__(attn, hidden_states)


def test_a_function_whose_result_changes_with_every_call_gets_no_graphs(unet: nn.Module) -> None:
    """A capture calls the function more often than the host does. Once its results differ, the host computes the calls.
    The status says that the function gives another result each time."""
    put(unet, Counting())
    for seed in range(2):
        error(unet, seed)
    assert served_by() == ("native", "plain")
    error(unet, 2)
    assert "gave a different result inside CUDA graphs" in entry_of("native").no_graph
    assert served_by()[1] == "host" and "gives another result each time" in reason()


class Alike(Louder):
    """A processor as Louder. While is_alike is set, its result has one row for the whole batch."""

    is_alike = False

    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Tensor:
        added = super().__call__(attn, hidden_states)
        return added.mean(0, keepdim=True) if self.is_alike else added


def test_after_repeated_changes_of_a_functions_output_shape_cudagraph_replaces_native(
    unet: nn.Module
) -> None:
    """Every two calls, the result changes between one row and one for each row of the batch. Native captures anew at
    first; finally the backend cudagraph computes the calls. All outputs are close to those of diffusers."""
    processor = put(unet, Alike())
    routes = []
    for seed in range(16):
        processor.is_alike = seed // 2 % 2 == 1
        assert error(unet, seed) < CLOSE
        routes.append(served_by())
    assert ("native", "graph") in routes and routes[-1][0] == "cudagraph", routes
