"""A fault of ours, a doubt or a damaged model never costs the host's output, and condemns no more than it must."""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import SMALL_XL, a_call, diffusers_output, diffusers_unet, relative_error, served
from torch import Tensor

import lib_onediff
from lib_onediff.core.call import UNetCall
from lib_onediff.core.table import State
from lib_onediff.devices.torch import operators as torch_ops
from lib_onediff.runtime.runtime import runtime


def route() -> str:
    return lib_onediff.status()["route"]


def reason() -> str:
    return lib_onediff.status()["reason"]


def test_training_keeps_the_hosts_forward_and_its_gradients() -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    call = a_call(unet)
    unet(call.latent, call.timestep, call.context).sample.sum().backward()
    assert unet.conv_in.weight.grad.abs().sum() > 0
    assert (route(), reason()) == ("host", "gradients are being recorded (training?)")
    served(unet, call)
    assert route() == "plain"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_condemn_no_shape(value: float) -> None:
    damaged = lib_onediff.compile_unet(diffusers_unet())
    with torch.no_grad():
        damaged.conv_out.bias[0] = value
    output = served(damaged, a_call(damaged))
    assert torch.equal(output.isfinite(), diffusers_output(damaged, a_call(damaged)).isfinite())
    assert route() == "host"
    assert reason().startswith("the model's own output has NaN or infinite values")
    healthy = lib_onediff.compile_unet(diffusers_unet(1))
    served(healthy, a_call(healthy))
    assert route() == "plain", reason()


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, TypeError, ValueError, IndexError])
def test_an_error_of_ours_costs_no_picture(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def broken(*given: Any) -> Tensor:
        raise kind("first line\nsecond line")

    unet = lib_onediff.compile_unet(diffusers_unet())
    monkeypatch.setattr(torch_ops, "geglu", broken)
    assert torch.equal(served(unet, a_call(unet)), diffusers_output(unet, a_call(unet)))
    assert route() == "host" and "first line" in reason() and "\n" not in reason()


def test_running_out_of_memory_costs_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(*given: Any) -> Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    unet = lib_onediff.compile_unet(diffusers_unet())
    with monkeypatch.context() as patch:
        patch.setattr(torch_ops, "geglu", hungry)
        assert torch.equal(served(unet, a_call(unet)), diffusers_output(unet, a_call(unet)))
        assert (route(), reason()) == ("host", "out of GPU memory: the graphs were freed")
    served(unet, a_call(unet))
    assert route() == "plain"


def test_a_forward_that_disagrees_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    with monkeypatch.context() as patch:
        patch.setattr(torch_ops, "geglu", lambda tokens, reader: tokens.chunk(2, dim=-1)[0])
        assert torch.equal(served(unet, a_call(unet)), diffusers_output(unet, a_call(unet)))
        assert route() == "host" and reason().startswith("it differs from the model's own forward by ")
    [entry] = runtime.table.entries()
    assert entry.state is State.FAILED and entry.reason == reason()
    assert torch.equal(served(unet, a_call(unet, seed=1)), diffusers_output(unet, a_call(unet, seed=1)))
    assert route() == "host" and entry.reason == reason()
    served(unet, a_call(unet, tokens=154))
    assert route() == "plain", "another shape was not proved wrong"


def test_autocast_around_one_call_condemns_no_shape() -> None:
    """There the host itself rounds to bfloat16; that is no yardstick for the calls after it."""
    unet = lib_onediff.compile_unet(diffusers_unet())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = served(unet, a_call(unet))
        expected = diffusers_output(unet, a_call(unet))
    assert output.dtype == expected.dtype
    assert relative_error(output.float(), diffusers_output(unet, a_call(unet))) < 0.05
    served(unet, a_call(unet))
    assert route() == "plain", reason()


MISFITS: dict[str, Callable[[UNetCall], UNetCall]] = {
    "context width": lambda call: replace(call, context=torch.randn(2, 77, 31)),
    "context batch": lambda call: replace(call, context=torch.randn(3, 77, 48)),
    "no context": lambda call: replace(call, context=None),
    "latent channels": lambda call: replace(call, latent=torch.randn(2, 5, 8, 8)),
    "latent dimensions": lambda call: replace(call, latent=torch.randn(2, 8, 8)),
    "latent type": lambda call: replace(call, latent=call.latent.double()),
    "no y": lambda call: replace(call, y=None),
    "y width": lambda call: replace(call, y=torch.randn(2, 7)),
    "timestep batch": lambda call: replace(call, timestep=torch.tensor([1.0, 2.0, 3.0])),
}


@pytest.mark.parametrize("misfit", MISFITS.values(), ids=MISFITS)
def test_inputs_that_do_not_fit_get_the_hosts_own_error(misfit: Callable[[UNetCall], UNetCall]) -> None:
    unet = diffusers_unet(**SMALL_XL)
    call = misfit(a_call(unet))
    with pytest.raises((RuntimeError, ValueError, TypeError)) as expected:
        diffusers_output(unet, call)
    lib_onediff.compile_unet(unet)
    with pytest.raises(expected.type) as error:
        served(unet, call)
    assert str(error.value) == str(expected.value)
    served(unet, a_call(unet))
    assert route() == "plain", reason()


def test_an_empty_latent_is_the_hosts_affair() -> None:
    unet = lib_onediff.compile_unet(diffusers_unet())
    # Whether that is an error is for the host to say, too.
    with contextlib.suppress(RuntimeError):
        served(unet, a_call(unet, 8, 0))
    assert (route(), reason()) == ("host", "the latent is empty")
    assert runtime.rows() == []


def test_two_unets_in_two_threads_get_their_own_pictures() -> None:
    unets = [lib_onediff.compile_unet(diffusers_unet(seed)) for seed in (1, 2)]
    wrong: list[Any] = []

    def work(unet: Any) -> None:
        for seed in range(6):
            call = a_call(unet, 8, 8 + seed % 2, seed=seed)
            expected = diffusers_output(unet, call)
            try:
                error = relative_error(served(unet, call), expected)
            except Exception as failure:  # a thread's exception would be lost
                wrong.append(failure)
            else:
                wrong.extend([error] if error > 1e-5 else [])

    threads = [threading.Thread(target=work, args=(unet,)) for unet in unets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert wrong == []
    assert len(runtime.table.entries()) == 2
