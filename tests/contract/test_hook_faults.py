"""Faults in OneDiff's hooks do not reach the user's image: the WebUI computes it, OneDiff logs one traceback, and
serves the next generation."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from contract_hosts import Host, calls_of
from test_generations import OURS, close, same

from lib_onediff.hosts import hooks, sampler_schedule
from lib_onediff.hosts.a1111 import layers
from lib_onediff.hosts.forge import adapter as forge
from lib_onediff.runtime.runtime import OursOrHosts, runtime
from lib_onediff.weights.joining import shares_storage

# Neo has Forge's adapter, and Classic has reForge's.
FAMILY = ("forge", "reforge")
HOSTS = ("a1111", *FAMILY)
UNET = "the UNet's forward"
VAE = "the VAE's forward"
BEGINNING = "the beginning of a sampling"
LATENT = ("latent",)
IMAGES = ("image", "encoded")
ALL = (*LATENT, *IMAGES)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise IndexError("broken by a test")


class Fault(NamedTuple):
    """A function of OneDiff that is made to raise.

    where: returns the object that has the function, and the function's name.
    hosts: the WebUIs on which it is tested.
    hook: how the message to users names the hook that calls the function.
    by_host: the parts of the generation (fields of Made) that the WebUI must then compute.
    """

    where: Callable[[Host], tuple[Any, str]]
    hosts: tuple[str, ...]
    hook: str
    by_host: tuple[str, ...]


FAULTS = {
    "reading a call": Fault(lambda host: (forge, "image_prompts_of"), FAMILY, UNET, ALL),
    "checking the UNet": Fault(lambda host: (host.adapter, "_check"), FAMILY, UNET, ALL),
    "checking the WebUI's state": Fault(lambda host: (host.adapter, "_check_state"), ("a1111",), UNET, ALL),
    "adopting a network": Fault(lambda host: (runtime, "adopt"), HOSTS, BEGINNING, ALL),
    "serving a call": Fault(lambda host: (OursOrHosts, "_ours"), HOSTS, UNET, LATENT),
    "merging a LoRA": Fault(lambda host: (layers, "wanted_loras"), ("a1111",), UNET, LATENT),
    "checking a decode": Fault(lambda host: (hooks, "refuse_replaced"), HOSTS, VAE, IMAGES),
    "serving a decode": Fault(lambda host: (runtime.vae, "_serve"), HOSTS, VAE, IMAGES),
    "finding the schedule": Fault(lambda host: (host.adapter_module, "sampling_of"), HOSTS, BEGINNING, ALL),
    "recording the schedule": Fault(
        lambda host: (sampler_schedule, "record"), HOSTS, "reading the sampler's schedule", ()
    ),
    "after a run": Fault(lambda host: (host.adapter, "after_run"), HOSTS, "the end of a generation", ()),
    "a loaded model": Fault(
        lambda host: (host.adapter, "model_loaded"), HOSTS, "looking at a loaded checkpoint", ()
    ),
}
CASES = [pytest.param(fault, host, id=f"{name}-{host}") for name, fault in FAULTS.items() for host in fault.hosts]


@pytest.mark.parametrize(("fault", "host"), CASES, indirect=["host"])
def test_a_fault_in_a_hook_leaves_the_image_to_the_host_and_is_logged_once(
    fault: Fault, host: Host, tracebacks: Any
) -> None:
    """fault.by_host: which of latent, image and encoded latent the host must compute: they equal the host's to the bit,
    and the others are close to it. The status gives the fault as the reason. OneDiff serves the next generation, and
    logs nothing more."""
    expected = host.generate()
    host.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*fault.where(host), broken)
        host.announce()
        made, calls = calls_of(host.generate)
    sentence = f"a fault of OneDiff in {fault.hook}, please report it: broken by a test"
    assert sentence in runtime.guard.faults and tracebacks() == len(runtime.guard.faults)
    assert close(made, expected)
    for part in fault.by_host:
        assert torch.equal(getattr(made, part), getattr(expected, part)), part
    if "latent" in fault.by_host:
        status = runtime.status()
        assert calls == {"host": 2} and (status["route"], status["reason"]) == ("host", sentence)
    else:
        assert calls == OURS
    if "image" in fault.by_host:
        assert runtime.vae.status()["route"] == "host" and runtime.vae.status()["reason"] == sentence
    logged = tracebacks()
    made, calls = calls_of(host.generate)
    assert calls == OURS and close(made, expected) and runtime.vae.status()["route"] == "ours"
    assert sentence in runtime.guard.faults and tracebacks() == logged


# Calls of a module with arguments that its forward does not take: each raises an exception.
WRONG_CALLS: dict[str, Callable[[Any], Any]] = {
    "none": lambda module: module(), "too many": lambda module: module(*map(torch.ones, range(12))),
    "another name": lambda module: module(torch.ones(1), of_nobody=1),
    "twice": lambda module: module(torch.ones(1), **{"x": torch.ones(1), "z": torch.ones(1)}),
}


@pytest.mark.parametrize("wrong", WRONG_CALLS)
@pytest.mark.parametrize("part", ["unet", "decoder"])
@pytest.mark.parametrize("host", HOSTS, indirect=True)
def test_a_call_with_wrong_arguments_raises_the_same_error_as_without_onediff(
    host: Host, part: str, wrong: str, tracebacks: Any
) -> None:
    """The UNet or the VAE's decoder (part) is called directly. The exception's class and message are the same. OneDiff
    logs nothing, and serves the next generation."""
    module = host.unet
    if part == "decoder":
        holder = host.checkpoint if host.name == "a1111" else host.checkpoint.forge_objects.vae
        module = holder.first_stage_model.decoder
    with pytest.raises(Exception) as expected, torch.inference_mode():
        WRONG_CALLS[wrong](module)
    host.start()
    runtime.guard.resume()
    with pytest.raises(expected.type) as raised, torch.inference_mode():
        WRONG_CALLS[wrong](module)
    assert str(raised.value) == str(expected.value)
    assert runtime.guard.faults == [] and not runtime.guard.suspended and tracebacks() == 0
    assert calls_of(host.generate)[1] == OURS


# Functions that run after the hooks were removed when OneDiff is switched off.
ENDS = {
    "the UNets": lambda host: (runtime, "release"), "the VAE": lambda host: (runtime.vae, "release"),
    "the weights under a LoRA": lambda host: (forge, "unshare_backups"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("host", HOSTS, indirect=True)
def test_a_fault_while_onediff_is_switched_off_leaves_no_hook_in_the_host(
    end: str, host: Host, tracebacks: Any
) -> None:
    """end: what is not released, because the function that releases it raises. The next image equals to the bit the one
    before OneDiff was switched on. Switching off again frees the weights; then OneDiff can be switched on."""
    expected = host.generate()
    adapter = host.start()
    host.generate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*ENDS[end](host), broken)
        runtime.guard.hook("following the settings")(lambda: host.switch(False))()
    assert adapter.hooks() == 0 and tracebacks() == len(runtime.guard.faults)
    # A1111 merges LoRAs in place, and puts no weights aside.
    assert bool(runtime.guard.faults) == (host.name != "a1111" or end != "the weights under a LoRA")
    made, calls = calls_of(host.generate)
    assert calls == {} and same(made, expected)
    host.switch(False)
    assert not any(shares_storage(parameter) for parameter in host.unet.parameters())
    host.switch(True)
    assert calls_of(host.generate)[1] == OURS
