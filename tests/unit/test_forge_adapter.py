"""The Forge adapter's hook on a checkpoint: put on, kept through LoRAs, and gone without a trace.

Point ONEDIFF_FORGE at a checkout of stable-diffusion-webui-forge to run these.
"""
from __future__ import annotations

import copy
import gc
import importlib
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH, relative_error
from forge_builders import Checkpoint, ForgeHost, calls_of, forge_host, sample, take_off_patches, without_us  # noqa: F401
from test_real_host_unets import SD1, SDXL, needs_forge
from torch import nn

from lib_onediff.hosts.webui import CannotWarm
from lib_onediff.model.weights import shares_storage

pytestmark = needs_forge


@pytest.mark.parametrize("config", [SD1, SDXL], ids=["SD1", "SDXL"])
@pytest.mark.parametrize("size", [(8, 8), (9, 11)])
def test_every_call_is_ours_and_the_output_forges(host: ForgeHost, config: Any, size: tuple[int, int]) -> None:
    host.load(Checkpoint(**config))
    output, calls = calls_of(lambda: host.generate(size=size))
    assert calls == {"plain": 2}
    assert relative_error(output, without_us(host, size=size)) < 1e-5


def test_one_hook_however_often_and_nothing_afterwards(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    kept = {name: parameter.clone() for name, parameter in checkpoint.unet.named_parameters()}
    before = without_us(host)
    host.adapter.stop()
    attributes = set(checkpoint.unet.__dict__)
    for _ in range(5):
        host.adapter.stop()
        host.adapter.serve()
        host.adapter.serve()
        host.adapter.model_loaded(checkpoint)
        host.generate()
        assert host.adapter.hooks() == 1
    host.adapter.stop()
    host.adapter.stop()
    assert host.adapter.hooks() == 0 and set(checkpoint.unet.__dict__) == attributes
    assert checkpoint.forge_objects.unet.object_patches == {} and "patch" not in vars(type(checkpoint.unet).forward)
    assert not any(shares_storage(parameter) for parameter in checkpoint.unet.parameters())
    assert all(torch.equal(kept[name], parameter) for name, parameter in checkpoint.unet.named_parameters())
    output, calls = calls_of(host.generate)
    assert calls == {} and torch.equal(output, before)


def test_a_checkpoint_that_was_loaded_before_us_is_served(host: ForgeHost) -> None:
    host.adapter.stop()
    host.load(Checkpoint())
    host.generate()
    assert host.adapter.hooks() == 0
    host.adapter.serve()
    assert calls_of(host.generate)[1] == {"plain": 2}


def test_a_refiner_that_is_loaded_within_a_sampling_is_served(host: ForgeHost) -> None:
    host.load(Checkpoint())
    host.generate()
    second = host.load(Checkpoint())
    output, calls = calls_of(lambda: sample(second.forge_objects.unet, (8, 8)))
    assert calls == {"plain": 2}


def test_loras_in_turn_are_those_of_the_host(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    sequence = [("a", 0.0), ("a", 0.5), ("b!", 0.5), ("b!", 0.25), ("a", 0.5), ("a", 0.0)]
    outputs = []
    for name, strength in sequence:
        checkpoint.with_lora(name, strength)
        output, calls = calls_of(host.generate)
        assert calls == {"plain": 2}
        outputs.append(output)
    for (name, strength), output in zip(sequence, outputs, strict=True):
        checkpoint.with_lora(name, strength)
        assert relative_error(output, without_us(host)) < 1e-5
    assert torch.equal(outputs[0], outputs[-1]) and torch.equal(outputs[1], outputs[4])
    assert all(relative_error(outputs[index], outputs[0]) > 1e-3 for index in (1, 2, 3))


def test_weights_are_the_hosts_after_loras_and_the_end(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    kept = {name: parameter.clone() for name, parameter in checkpoint.unet.named_parameters()}
    for strength in (0.5, 0.0, 0.75):
        checkpoint.with_lora("a", strength)
        host.generate()
    host.adapter.stop()  # with a LoRA merged, and the weights beneath it put aside
    checkpoint.with_lora("a", 0.0)
    host.generate()
    assert not any(shares_storage(parameter) for parameter in checkpoint.unet.parameters())
    assert all(torch.equal(kept[name], parameter) for name, parameter in checkpoint.unet.named_parameters())


def test_a_copied_unet_is_served_for_itself(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    host.generate()
    copied = copy.deepcopy(checkpoint.unet)
    with torch.no_grad():
        copied.out[2].bias += 1.0
    x, t, context = torch.randn(2, 4, 8, 8), torch.ones(2), torch.randn(2, 77, CONTEXT_WIDTH)
    with torch.inference_mode():
        output, calls = calls_of(lambda: copied(x, t, context=context, transformer_options={}))
        assert calls == {"plain": 1} and relative_error(output, checkpoint.unet(x, t, context=context) + 1) < 1e-5


def test_an_unloaded_checkpoint_is_gone(host: ForgeHost) -> None:
    checkpoint = host.load(Checkpoint())
    host.generate()
    unet, weight = weakref.ref(checkpoint.unet), weakref.ref(next(checkpoint.unet.parameters()))
    host.model_data.sd_model = None
    take_off_patches()
    del checkpoint
    gc.collect()
    assert unet() is None and weight() is None


def test_another_network_after_a_unet_leaves_nothing_of_it(host: ForgeHost) -> None:
    """As forge_model_reload changes checkpoints: the old one goes first, then the new one is announced."""
    checkpoint = host.load(Checkpoint())
    host.generate()
    unet, weight = weakref.ref(checkpoint.unet), weakref.ref(next(checkpoint.unet.parameters()))
    other = Checkpoint()
    other.forge_objects.unet.model.diffusion_model = nn.Linear(1, 1)
    host.model_data.sd_model = None
    del checkpoint
    take_off_patches()
    gc.collect()
    host.load(other)
    assert unet() is None and weight() is None
    assert "Linear" in host.adapter.why_not_served()
    host.load(Checkpoint())
    assert host.adapter.why_not_served() is None and calls_of(host.generate)[1] == {"plain": 2}


def test_other_networks_are_left_alone(host: ForgeHost) -> None:
    class IntegratedFluxTransformer2DModel(nn.Module):
        pass

    other = Checkpoint()
    other.forge_objects.unet.model.diffusion_model = IntegratedFluxTransformer2DModel()
    assert host.adapter.why_not_served() is None
    host.load(other)
    assert "IntegratedFluxTransformer2DModel" in host.adapter.why_not_served()
    host.adapter.before_sampling(SimpleNamespace(sd_model=other))
    assert "forward" not in other.unet.__dict__
    with pytest.raises(CannotWarm, match="IntegratedFluxTransformer2DModel"):
        host.adapter.warm(64, 64, 2, 77)


def test_exclusive_work_runs_on_forges_main_thread_with_its_lock(host: ForgeHost) -> None:
    main_thread = importlib.import_module("modules_forge.main_thread")
    lock = sys.modules["modules.call_queue"].queue_lock
    loop = threading.Thread(target=main_thread.loop, daemon=True)
    loop.start()
    answers: list[Any] = []

    def ask() -> None:
        answers.append(host.adapter.exclusively(lambda: (threading.current_thread(), lock.acquire(blocking=False))))
        try:
            host.adapter.exclusively(lambda: [][1])
        except IndexError as error:
            answers.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(20)
    assert answers[0] == (loop, False) and isinstance(answers[1], IndexError)
    assert lock.acquire(blocking=False)
    with pytest.raises(CannotWarm, match="making an image"):
        host.adapter.exclusively(lambda: None)
    lock.release()
    assert host.adapter.exclusively(threading.current_thread) is threading.main_thread()
