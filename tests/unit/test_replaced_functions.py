"""Functions that a network calls by name, replaced after a size was proved: the host's output counts, with a reason
that names the author; and ours again once the replacement is removed."""
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
    """functools.wraps copies the names of the function that it replaces, also onto one of torch's decorators."""
    return functools.wraps(function)(torch.no_grad()(louder(function)))


def with_code(function: Any) -> Callable[[pytest.MonkeyPatch], object]:
    """Another body in the same function."""
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


# Replacements that our own forward depends on as well.
OF_OURS_TOO = {"torch.nn.functional.silu", "torch.group_norm", "math.log", "another function of torch's"}
# No call of this network reaches it.
NOT_CALLED = {"a method behind a method", "a module in a module's place"}


@pytest.fixture
def unet() -> Any:
    return lib_onediff.compile_unet(diffusers_unet(**SMALL_XL))


def route_of(unet: nn.Module, **change: Any) -> str:
    """The route of a call, whose output must be the host's."""
    assert error(unet, a_call(unet, **change)) < CLOSE, runtime.status()
    return str(runtime.status()["route"])


@pytest.mark.parametrize("name", REPLACED)
def test_a_function_replaced_after_the_check_leaves_calls_to_the_host_until_it_is_restored(
    unet: Any, name: str
) -> None:
    """Also calls of another size, and of another UNet with the same weights. route_of compares each output with the
    host's."""
    assert [route_of(unet) for _ in range(2)] == ["plain"] * 2
    with pytest.MonkeyPatch.context() as patch:
        REPLACED[name](patch)
        routes = {route_of(unet) for _ in range(2)}
        reason = runtime.status()["reason"]
        # Another size, and another UNet with the same weights, were not checked before.
        routes |= {route_of(unet, height=12), route_of(lib_onediff.compile_unet(diffusers_unet(**SMALL_XL)))}
    if name not in OF_OURS_TOO | NOT_CALLED:
        assert routes == {"host"} and ("was replaced by" in reason or "a module" in name)
        assert __name__ in reason or name == "its defaults", reason
    assert [route_of(unet), route_of(unet, height=12)] == ["plain"] * 2, runtime.status()["reason"]


def checks(unet: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that records all checks from now on."""
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
    assert route_of(unet) == "plain"
    found = checks(unet, monkeypatch)
    real = torch.cat
    for _ in range(3):
        monkeypatch.setattr(torch, "cat", same_again(real))
        assert route_of(unet) == "plain", runtime.status()["reason"]
    assert len(found) == 1
    monkeypatch.setattr(torch, "cat", real)
    assert route_of(unet) == "plain" and len(found) == 1


def test_code_that_is_new_at_every_call_is_checked_at_most_most_new_times(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the host serves, with a reason, until the code is as it was."""
    assert route_of(unet) == "plain"
    found = checks(unet, monkeypatch)
    real = torch.cat
    for number in range(MOST_NEW + 4):
        monkeypatch.setattr(torch, "cat", same_again(real, number))
        route = route_of(unet)
    assert route == "host" and len(found) <= MOST_NEW
    assert "it is new at every step" in runtime.status()["reason"]
    assert route_of(unet) == "plain"


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
def test_a_replacement_whose_state_changes_its_result_later_is_noticed(
    unet: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STATES: where the function keeps the state: turn() changes it after the check. State that cannot be seen, such as
    an iterator's, leaves the call to the host at once."""
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
    """With another seed of hashes, and with other modules imported before."""
    digests = set()
    for seed, modules in (("1", ()), ("2", ("torch._dynamo", "diffusers.loaders.peft", "logging.handlers"))):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", DIGEST, *modules]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip())
    assert len(digests) == 1 and all(digests)


def test_a_mode_that_every_operator_goes_through_has_a_verdict_of_its_own(
    unet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`with torch.device("cpu")` is such a mode. Each of the two verdicts is found once, even if the two alternate."""
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
    """origin() names the module of a function's code, for reasons. torch's decorators and functools.wraps hide it."""

    def foreign() -> None:
        pass

    assert origin(decorate(foreign)) == __name__
    assert origin(functools.wraps(torch.nn.Linear.forward)(decorate(foreign))) == __name__
    assert origin(decorate(EMBEDDINGS.get_timestep_embedding)) == EMBEDDINGS.__name__


def test_an_attention_processor_with_a_counter_needs_no_new_check_at_each_call() -> None:
    """Each call runs it as it is, so a change of its state does not affect the verdict. called: how often each call of
    the UNet ran it."""
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
