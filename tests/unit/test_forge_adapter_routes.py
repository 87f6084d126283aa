"""Which route Forge's UNet calls take, and why: extensions, storage, other forwards, warming up.

Point ONEDIFF_FORGE at a checkout of stable-diffusion-webui-forge to run these.
"""
from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import relative_error
from forge_builders import (  # noqa: F401
    ATTENTION,
    FORWARD_PATCH,
    Checkpoint,
    ForgeHost,
    calls_of,
    forge_host,
    sample,
    take_off_patches,
    without_us,
)
from test_real_host_unets import SD1, SDXL, needs_forge
from torch import Tensor

from lib_onediff.hosts.webui import CannotWarm
from lib_onediff.model.layout import UnsupportedUNet
from lib_onediff.model.weights import shares_storage
from lib_onediff.runtime.runtime import runtime

pytestmark = needs_forge


def halved_middle(image: Tensor, state: str, options: dict[str, Any]) -> Tensor:
    return image * 0.5 if state == "after" and options["block"][0] == "middle" else image


def test_what_an_extension_changes_for_a_call_runs_within_ours(host: ForgeHost) -> None:
    host.load(Checkpoint())

    def extension(patcher: Any) -> Any:
        patcher = patcher.clone()
        patcher.add_block_modifier(halved_middle)
        return patcher

    plain = host.generate()
    output, calls = calls_of(lambda: host.generate(extension))
    assert calls == {"plain": 2}
    assert "block_modifiers by test_forge_adapter" in runtime.status()["reason"]
    expected = without_us(host, extension=extension)
    assert torch.allclose(output, expected, atol=1e-4) and not torch.allclose(output, plain, atol=1e-2)
    assert calls_of(host.generate)[1] == {"plain": 2}


def test_a_function_wrapper_and_a_clone_change_nothing(host: ForgeHost) -> None:
    host.load(Checkpoint())

    def extension(patcher: Any) -> Any:
        patcher = patcher.clone()
        patcher.set_model_unet_function_wrapper(
            lambda model, given: 0.5 * model(given["input"], given["timestep"], **given["c"])
        )
        return patcher

    output, calls = calls_of(lambda: host.generate(extension))
    assert calls == {"plain": 2}
    assert relative_error(output, without_us(host, extension=extension)) < 1e-5


def test_a_patch_in_place_of_ours_is_noticed(host: ForgeHost) -> None:
    host.load(Checkpoint())

    def extension(patcher: Any) -> Any:
        patcher = patcher.clone()
        patcher.add_object_patch(FORWARD_PATCH, lambda x, timesteps, **others: x * 0.25)
        return patcher

    output, calls = calls_of(lambda: host.generate(extension))
    assert calls == {"host": 1}
    assert runtime.status()["reason"] == f"another extension has replaced the UNet's forward ({__name__})"
    assert torch.equal(output, without_us(host, extension=extension))
    assert calls_of(host.generate)[1] == {"plain": 2}


def test_a_patch_that_leads_to_ours_is_served(host: ForgeHost) -> None:
    host.load(Checkpoint())

    def extension(patcher: Any) -> Any:
        inner = patcher.get_model_object(FORWARD_PATCH)
        patcher = patcher.clone()
        patcher.add_object_patch(FORWARD_PATCH, lambda x, timesteps, **others: inner(x * 0.5, timesteps, **others))
        return patcher

    output, calls = calls_of(lambda: host.generate(extension))
    assert calls == {"plain": 2} and host.adapter.hooks() == 1
    take_off_patches()
    assert relative_error(output, without_us(host, extension=extension)) < 1e-5


def test_a_forward_set_over_ours_stays_when_forge_exchanges_patchers(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    host.generate()
    ours = checkpoint.unet.forward

    def extension(patcher: Any) -> Any:
        checkpoint.unet.forward = lambda x, timesteps, **others: 0.25 * ours(x, timesteps, **others)
        return patcher.clone()

    output, calls = calls_of(lambda: host.generate(extension))
    assert calls == {"plain": 2}
    checkpoint.unet.forward = ours
    assert calls_of(host.generate)[1] == {"plain": 2}
    del checkpoint.unet.forward
    host.adapter.stop()
    # Whoever has kept ours gets the host's forward from it.
    kept, calls = calls_of(lambda: host.generate(extension))
    assert calls == {} and relative_error(output, kept) < 1e-5


def test_what_forge_stores_otherwise_is_the_hosts(host: ForgeHost) -> None:
    host.load(Checkpoint(computed=torch.float64))
    with pytest.raises(RuntimeError):
        host.generate()  # Nobody casts: the reason is what is looked at.
    assert "stored as float32 and computed in float64" in runtime.status()["reason"]


def test_another_attention_is_noticed_at_once(host: ForgeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.load(Checkpoint())
    host.generate()
    from backend.nn import unet as forge_module

    monkeypatch.setattr(forge_module, "attention_function", lambda q, k, v, heads, mask=None: q)
    output, calls = calls_of(lambda: sample(host.model_data.sd_model.forge_objects.unet, (8, 8)))
    assert calls == {"host": 2}
    assert runtime.status()["reason"] == f"attention_function of the WebUI's UNet was replaced by {__name__}"


def test_hires_is_announced_twice_and_an_interrupted_run_is_no_bypass(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    p = SimpleNamespace(sd_model=checkpoint, is_hr_pass=True)
    host.generate()
    _, calls = calls_of(lambda: (host.adapter.before_sampling(p), host.generate(is_hr_pass=True)))
    assert calls == {"plain": 2}
    host.adapter.before_sampling(p)
    host.state.interrupted = True
    assert calls_of(lambda: host.adapter.after_run(p))[1] == {}


@pytest.mark.parametrize("config", [SD1, SDXL], ids=["SD1", "SDXL"])
def test_warming_makes_the_shape_of_a_generation_ready(host: ForgeHost, config: Any) -> None:
    host.load(Checkpoint(**config))
    assert calls_of(lambda: host.adapter.warm(88, 72, 2, 77))[1] == {"plain": 1}
    entries = len(runtime.table.entries())
    assert calls_of(lambda: host.generate(size=(9, 11)))[1] == {"plain": 2}
    assert len(runtime.table.entries()) == entries == 1


def test_warming_what_the_host_must_run_says_why(host: ForgeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = host.load(Checkpoint())
    checkpoint.unet.input_blocks[0][0].register_forward_hook(lambda module, given, output: None)
    with pytest.raises(UnsupportedUNet, match="forward hook"):
        host.adapter.warm(64, 64, 2, 77)
    monkeypatch.setattr(sys.modules["modules.sd_models"], "forge_model_reload", lambda: int("no model"))
    with pytest.raises(CannotWarm, match="the checkpoint cannot be loaded"):
        host.adapter.warm(64, 64, 2, 77)


def test_switched_off_within_a_sampling_the_host_goes_on(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    switch: list[Any] = [host.adapter.stop, host.adapter.serve]

    def extension(patcher: Any) -> Any:
        patcher = patcher.clone()

        def then_switch(model: Any, given: dict[str, Any]) -> Tensor:
            output = model(given["input"], given["timestep"], **given["c"])
            if switch:
                switch.pop(0)()
            return output

        patcher.set_model_unet_function_wrapper(then_switch)
        return patcher

    output, calls = calls_of(lambda: host.generate(extension))
    assert calls == {"plain": 1} and not switch, "stopped after the first call, and served again after the second"
    assert not any(shares_storage(parameter) for parameter in checkpoint.unet.parameters())
    assert relative_error(output, without_us(host)) < 1e-5
    assert calls_of(host.generate)[1] == {"plain": 2} and host.adapter.hooks() == 1


def test_switched_off_while_warming_says_so(host: ForgeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.load(Checkpoint())
    sd_models = sys.modules["modules.sd_models"]
    load = sd_models.forge_model_reload
    monkeypatch.setattr(sd_models, "forge_model_reload", lambda: (host.adapter.stop(), load())[1])
    with pytest.raises(CannotWarm, match="not in use"):
        host.adapter.warm(64, 64, 2, 77)
    assert host.adapter.hooks() == 0
