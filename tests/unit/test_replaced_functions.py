"""Functions that the network's code calls by name are replaced after a size was checked. The host then computes the
calls, with a reason that names the extension or Python module from which the replacement is. Once it is removed,
OneDiff computes them again. A check compares our output with the host's; without a replacement, it is made at the first
call of a size."""
from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import diffusers.models.attention_processor
import diffusers.models.embeddings
import diffusers.models.resnet
import pytest
import torch
import torch.nn.functional as F
from builders import SMALL_XL, a_call, diffusers_unet, served
from ladder_builders import error
from torch import Tensor, nn

import lib_onediff
from lib_onediff.core.origins import origin
from lib_onediff.runtime import verify
from lib_onediff.runtime.runtime import runtime
from lib_onediff.weights.host_code import MOST_NEW

CLOSE = 1e-5
EMBEDDINGS = diffusers.models.embeddings
RESNET = diffusers.models.resnet
ATTENTION = diffusers.models.attention_processor
Change = Callable[[pytest.MonkeyPatch], object]


def louder(function: Any) -> Any:
    return lambda *given, **named: function(*given, **named) * 1.1


def louder_first(function: Any) -> Any:
    def called(*given: Any, **named: Any) -> Any:
        first, *others = function(*given, **named)
        return first * 1.1, *others

    return called


def disguised(function: Any) -> Any:
    """A replacement with the name and the module of the original: functools.wraps copies them, here onto a function
    that torch.no_grad has decorated."""
    return functools.wraps(function)(torch.no_grad()(louder(function)))


def with_code(function: Any) -> Callable[[pytest.MonkeyPatch], object]:
    """Gives the same function object another body."""
    def other(timesteps: Any, embedding_dim: Any, *given: Any, **named: Any) -> Any:
        return torch.ones(len(timesteps), embedding_dim)

    return lambda patch: patch.setattr(function, "__code__", other.__code__)


REPLACED: dict[str, Change] = {
    "torch.cat": lambda patch: patch.setattr(torch, "cat", louder(torch.cat)),
    "torch.nn.functional.dropout": lambda patch: patch.setattr(F, "dropout", louder(F.dropout)),
    "torch.nn.functional.silu": lambda patch: patch.setattr(F, "silu", louder(F.silu)),
    "torch.group_norm": lambda patch: patch.setattr(torch, "group_norm", louder(torch.group_norm)),
    "torch.baddbmm": lambda patch: patch.setattr(torch, "baddbmm", louder(torch.baddbmm)),
    "torch.Tensor.chunk": lambda patch: patch.setattr(Tensor, "chunk", louder_first(Tensor.chunk), raising=False),
    "torch.Tensor.view": lambda patch: patch.setattr(Tensor, "view", louder(Tensor.view), raising=False),
    "torch.Tensor.__add__": lambda patch: patch.setattr(Tensor, "__add__", louder(Tensor.__add__), raising=False),
    "get_timestep_embedding": lambda patch: patch.setattr(
        EMBEDDINGS, "get_timestep_embedding", louder(EMBEDDINGS.get_timestep_embedding)),
    "math.log": lambda patch: patch.setattr(math, "log", louder(math.log)),
    "another function of torch's": lambda patch: patch.setattr(F, "silu", F.relu),
    "a module in a module's place": lambda patch: patch.setattr(RESNET, "torch", types.SimpleNamespace(
        **{**vars(torch), "float16": torch.float32, "cat": louder(torch.cat)})),
    "its code": with_code(EMBEDDINGS.get_timestep_embedding),
    "its defaults": lambda patch: patch.setattr(
        EMBEDDINGS.get_timestep_embedding, "__defaults__",
        (*EMBEDDINGS.get_timestep_embedding.__defaults__[:-1], 50)),
    "a method of the processor": lambda patch: patch.setattr(
        ATTENTION.AttnProcessor2_0, "__call__", louder(ATTENTION.AttnProcessor2_0.__call__)),
    "a method behind a method": lambda patch: patch.setattr(
        ATTENTION.Attention, "head_to_batch_dim", louder(ATTENTION.Attention.head_to_batch_dim)),
    "disguised": lambda patch: patch.setattr(
        EMBEDDINGS, "get_timestep_embedding", disguised(EMBEDDINGS.get_timestep_embedding)),
    "a partial": lambda patch: patch.setattr(torch, "cat", functools.partial(louder(torch.cat))),
}


# Replacements that change our own forward in the same way as the host's.
OF_OURS_TOO = {"torch.nn.functional.silu", "torch.group_norm", "math.log", "another function of torch's"}
# Replacements of code that this network does not run.
NOT_CALLED = {"a method behind a method", "a module in a module's place"}


@pytest.fixture
def unet() -> Any:
    return lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))


def route_of(unet: nn.Module, **change: Any) -> str:
    """The route of a call, whose output must be the host's."""
    assert error(unet, a_call(unet, **change)) < CLOSE, runtime.status()
    return str(runtime.status()["route"])


@pytest.mark.parametrize("name", REPLACED)
def test_the_host_computes_calls_after_a_function_was_replaced_until_it_is_restored(unet: Any, name: str) -> None:
    """The host also computes calls of another size, and those of another UNet with the same weights. Replacements in
    OF_OURS_TOO and NOT_CALLED leave the route open; only the outputs are compared with the host's, by route_of."""
    assert [route_of(unet) for _ in range(2)] == ["plain"] * 2
    with pytest.MonkeyPatch.context() as patch:
        REPLACED[name](patch)
        routes = {route_of(unet) for _ in range(2)}
        reason = runtime.status()["reason"]
        # Another size, and another UNet with the same weights, were not checked before.
        routes |= {route_of(unet, height=12), route_of(lib_onediff.compile_unet(diffusers_unet(**SMALL_XL)))}
    if name not in OF_OURS_TOO | NOT_CALLED:
        assert routes == {"host"} and "was replaced by" in reason
        assert __name__ in reason or name == "its defaults", reason
    assert [route_of(unet), route_of(unet, height=12)] == ["plain"] * 2, runtime.status()["reason"]


def checks(unet: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list to which every check from now on is added, as the identity of its weights."""
    found: list[str] = []
    why_it_differs = verify.why_it_differs

    def compared(entry: Any, *given: Any, **named: Any) -> Any:
        found.append(entry.weights)
        return why_it_differs(entry, *given, **named)

    monkeypatch.setattr(verify, "why_it_differs", compared)
    return found


def same_again(function: Any, number: int = 0) -> Any:
    """Another function object that computes the same."""
    return functools.partial(lambda *given, of=number, **named: function(*given, **named))


def test_a_replacement_that_computes_the_same_is_checked_once_however_often_it_is_made(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replacement is a new function object with the same code. The restored original needs no check."""
    assert route_of(unet) == "plain"
    found = checks(unet, monkeypatch)
    real = torch.cat
    for _ in range(3):
        monkeypatch.setattr(torch, "cat", same_again(real))
        assert route_of(unet) == "plain", runtime.status()["reason"]
    assert len(found) == 1
    monkeypatch.setattr(torch, "cat", real)
    assert route_of(unet) == "plain" and len(found) == 1


def test_code_that_is_new_at_every_call_is_checked_a_limited_number_of_times(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After MOST_NEW checks, the host computes the calls, with a reason, until the original code is back."""
    assert route_of(unet) == "plain"
    found = checks(unet, monkeypatch)
    real = torch.cat
    for number in range(MOST_NEW + 4):
        monkeypatch.setattr(torch, "cat", same_again(real, number))
        route = route_of(unet)
    assert route == "host" and len(found) <= MOST_NEW
    assert "it is new at every step" in runtime.status()["reason"]
    assert route_of(unet) == "plain"


# By a place where a function may keep state: makes (a replacement of get_timestep_embedding that computes the same, a
# function that changes its state and with it its result).
STATES: dict[str, Callable[[], tuple[Any, Callable[[], object]]]] = {}


def state(make: Callable[[], tuple[Any, Callable[[], object]]]) -> None:
    STATES[make.__name__] = make


@state
def in_a_cell() -> tuple[Any, Callable[[], object]]:
    factor = 1.0
    real = EMBEDDINGS.get_timestep_embedding

    def function(*given: Any, **named: Any) -> Any:
        return real(*given, **named) * factor

    def turn() -> None:
        nonlocal factor
        factor = 1.1

    return function, turn


@state
def in_a_dictionary() -> tuple[Any, Callable[[], object]]:
    known = {"factor": 1.0}
    real = EMBEDDINGS.get_timestep_embedding
    return (lambda *given, **named: real(*given, **named) * known["factor"]), lambda: known.update(factor=1.1)


@state
def in_an_object() -> tuple[Any, Callable[[], object]]:
    known = types.SimpleNamespace(factor=1.0)
    real = EMBEDDINGS.get_timestep_embedding
    return (lambda *given, **named: real(*given, **named) * known.factor), lambda: vars(known).update(factor=1.1)


@state
def in_a_tensor() -> tuple[Any, Callable[[], object]]:
    known = torch.ones(1)
    real = EMBEDDINGS.get_timestep_embedding
    return (lambda *given, **named: real(*given, **named) * known), lambda: known.mul_(1.1)


@state
def in_a_global() -> tuple[Any, Callable[[], object]]:
    real = EMBEDDINGS.get_timestep_embedding
    return (lambda *given, **named: real(*given, **named) * FACTOR[0]), lambda: FACTOR.__setitem__(0, 1.1)


@state
def out_of_sight() -> tuple[Any, Callable[[], object]]:
    real = EMBEDDINGS.get_timestep_embedding
    hidden = iter([*[1.0] * 3, *[1.1] * 100])
    return (lambda *given, **named: real(*given, **named) * next(hidden)), lambda: None


FACTOR = [1.0]


@pytest.mark.parametrize("name", STATES)
def test_the_host_computes_calls_once_the_state_of_a_replacement_changes_its_result(
    unet: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replacement of STATES computes the same at first, and is checked; then turn() changes its state. If the state
    cannot be read, as an iterator's (out_of_sight), the host computes calls from the beginning."""
    assert route_of(unet) == "plain"
    FACTOR[0] = 1.0
    function, turn = STATES[name]()
    monkeypatch.setattr(EMBEDDINGS, "get_timestep_embedding", function)
    if name == "out_of_sight":
        served(unet, a_call(unet))
        assert runtime.status()["route"] == "host" and "cannot see" in runtime.status()["reason"]
        return
    assert [route_of(unet) for _ in range(2)] == ["plain"] * 2, runtime.status()["reason"]
    turn()
    assert route_of(unet) == "host" and __name__ in runtime.status()["reason"]


DIGEST = """
import sys
for name in sys.argv[1:]:
    __import__(name)
import torch
from diffusers import UNet2DConditionModel
from lib_onediff.weights.module_tree import Tree
with torch.device("meta"):
    unet = UNet2DConditionModel(block_out_channels=(32, 64), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32)
print(Tree(unet, (), ()).digest)
"""


def test_the_digest_of_the_sources_is_the_same_in_any_process() -> None:
    """Processes with other seeds of hashes, and with other modules imported before, find the same digest of the code
    that a network runs. Stored verdicts are valid in a later process for the same digest."""
    digests = set()
    for seed, modules in (("1", ()), ("2", ("torch._dynamo", "diffusers.loaders.peft", "logging.handlers"))):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", DIGEST, *modules]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert len(digests) == 1 and all(digests)


def test_calls_within_a_torch_function_mode_are_checked_separately_and_once(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`with torch.device("cpu")` is such a mode, through which every operator goes. Calls within it and outside of it
    alternate: each kind is checked at its first call alone."""
    assert route_of(unet) == "plain"
    found = checks(unet, monkeypatch)
    for _ in range(2):
        with torch.device("cpu"):
            assert route_of(unet) == "plain"
        assert route_of(unet) == "plain" and len(found) == 1


@pytest.mark.parametrize(
    "decorate", [torch.inference_mode(), torch.no_grad(), torch.compiler.disable],
    ids=["inference_mode", "no_grad", "disable"],
)
def test_the_origin_of_a_function_decorated_by_torch_is_that_of_the_function(decorate: Any) -> None:
    """origin() is the module whose code a function runs, which reasons name. torch's decorators and functools.wraps
    give the decorated function another __module__."""

    def foreign() -> None:
        pass

    assert origin(decorate(foreign)) == __name__
    assert origin(functools.wraps(torch.nn.Linear.forward)(decorate(foreign))) == __name__
    assert origin(decorate(EMBEDDINGS.get_timestep_embedding)) == EMBEDDINGS.__name__


def test_an_attention_processor_with_a_counter_needs_no_new_check_at_each_call() -> None:
    """OneDiff runs an unknown attention processor itself at each call, so a change of its state affects our output as
    the host's. called: how often each call of the UNet ran processors; in the first call, the check runs them, too."""
    class Counting:
        calls: list[int] = []

        def __init__(self, own: Any) -> None:
            self._own = own

        def __call__(self, *given: Any, **named: Any) -> Tensor:
            self.calls.append(len(self.calls))
            return self._own(*given, **named)

    unet = diffusers_unet(**SMALL_XL)
    processors = unet.attn_processors
    unet.set_attn_processor({name: Counting(one) for name, one in processors.items()})
    lib_onediff.compile_unet(unet)
    called = []
    for seed in range(4):
        before = len(Counting.calls)
        served(unet, a_call(unet, seed=seed))
        called.append(len(Counting.calls) - before)
    assert called[2:] == [len(processors)] * 2 and called[0] > len(processors), "compared once, with the first call"
    assert runtime.status()["route"] == "plain", runtime.status()["reason"]
