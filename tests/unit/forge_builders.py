"""Forge around one checkpoint: its own UNet, model patcher, memory management and sampling, from a checkout.

Only which checkpoint is loaded, and whether the user has interrupted, is said by stand-ins: those two modules of
Forge's need the whole WebUI.
"""
from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import CONTEXT_WIDTH
from test_real_host_unets import FORGE, SD1, Y_WIDTH, forge_unet
from torch import Tensor, nn

from lib_onediff.hosts.forge.adapter import Forge
from lib_onediff.runtime.runtime import runtime

FORWARD_PATCH = "diffusion_model.forward"
ATTENTION = "diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"


class Checkpoint:
    """A loaded checkpoint as Forge's diffusion engines are: the same patcher in three places."""

    def __init__(self, computed: torch.dtype = torch.float32, **config: Any) -> None:
        self.config = config or SD1
        unet = forge_unet(**self.config)
        in_forge_layers(unet)
        unet.storage_dtype, unet.computation_dtype = torch.float32, computed
        unet.load_device = unet.initial_device = unet.offload_device = torch.device("cpu")
        from backend.diffusion_engine.base import ForgeObjects
        from backend.modules.k_prediction import Prediction
        from backend.patcher.unet import UnetPatcher

        predictor = Prediction(prediction_type="epsilon")
        patcher = UnetPatcher.from_model(unet, diffusers_scheduler=None, config=None, k_predictor=predictor)
        self.forge_objects = ForgeObjects(unet=patcher, clip=None, vae=None, clipvision=None)
        self.forge_objects_original = self.forge_objects.shallow_copy()
        self.forge_objects_after_applying_lora = self.forge_objects.shallow_copy()

    @property
    def unet(self) -> Any:
        return self.forge_objects.unet.model.diffusion_model

    def with_lora(self, name: str, strength: float) -> None:
        """As networks.load_networks: a clone of the original patcher; merged when a sampling is prepared."""
        weight = self.unet.get_submodule(ATTENTION.removeprefix("diffusion_model.").removesuffix(".weight")).weight
        difference = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name)))
        patcher = self.forge_objects_original.unet
        if strength:
            patcher = patcher.clone()
            patcher.add_patches(filename=name, patches={ATTENTION: (difference,)}, strength_patch=strength)
        self.forge_objects_after_applying_lora.unet = patcher


def in_forge_layers(unet: nn.Module) -> None:
    """Give every layer the class that Forge's loader builds it with, the parameters staying."""
    from backend.operations import ForgeOperations

    for module in unet.modules():
        kind = getattr(ForgeOperations, type(module).__name__, None)
        if kind is not None:
            module.__class__ = kind
            module.parameters_manual_cast = False


class ForgeHost:
    """Forge around one checkpoint: what a generation does to the UNet, by Forge's own functions."""

    def __init__(self, adapter: Forge) -> None:
        self.adapter = adapter
        self.model_data = SimpleNamespace(sd_model=object())
        self.state = SimpleNamespace(interrupted=False, skipped=False, stopping_generation=False)

    def load(self, checkpoint: Checkpoint) -> Checkpoint:
        self.model_data.sd_model = checkpoint
        self.adapter.model_loaded(checkpoint)
        return checkpoint

    def generate(self, extension: Any = None, is_hr_pass: bool = False, size: tuple[int, int] = (8, 8)) -> Tensor:
        """One sampling of two steps; extension(patcher) may return another patcher, as scripts do."""
        checkpoint = self.model_data.sd_model
        checkpoint.forge_objects = checkpoint.forge_objects_after_applying_lora.shallow_copy()
        p = SimpleNamespace(sd_model=checkpoint, is_hr_pass=is_hr_pass)
        self.adapter.before_sampling(p)
        if extension is not None:
            checkpoint.forge_objects.unet = extension(checkpoint.forge_objects.unet) or checkpoint.forge_objects.unet
        output = sample(checkpoint.forge_objects.unet, size)
        self.adapter.after_run(p)
        return output


@torch.inference_mode()
def sample(patcher: Any, size: tuple[int, int], batch: int = 1) -> Tensor:
    from backend.sampling.condition import Condition, ConditionCrossAttn
    from backend.sampling.sampling_function import calc_cond_uncond_batch, sampling_cleanup, sampling_prepare

    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    image = random(batch, 4, *size)
    labelled = patcher.model.diffusion_model.num_classes is not None

    def condition() -> list[dict[str, Any]]:
        inputs: dict[str, Any] = {"c_crossattn": ConditionCrossAttn(random(batch, 77, CONTEXT_WIDTH))}
        if labelled:
            inputs["y"] = Condition(random(batch, Y_WIDTH))
        return [{"model_conds": inputs}]

    positive, negative = condition(), condition()
    sampling_prepare(patcher, image)
    for sigma in (9.0, 1.5):
        predictions = calc_cond_uncond_batch(
            patcher.model, positive, negative, image, torch.full((batch,), sigma), patcher.model_options
        )
        image = 0.5 * image + 0.5 * (predictions[0] + 3 * (predictions[0] - predictions[1]))
    sampling_cleanup(patcher)
    return image.clone()


@pytest.fixture(name="host")
def forge_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForgeHost]:
    forge_unet(**SD1)
    made = ForgeHost(Forge())
    modules: Any = types.ModuleType("modules")
    modules.sd_models = SimpleNamespace(
        model_data=made.model_data, forge_model_reload=lambda: (made.model_data.sd_model, False)
    )
    modules.shared = SimpleNamespace(state=made.state, opts=SimpleNamespace())
    modules.call_queue = SimpleNamespace(queue_lock=forge_file("modules/fifo_lock.py").FIFOLock())
    for name in ("sd_models", "shared", "call_queue"):
        monkeypatch.setitem(sys.modules, f"modules.{name}", getattr(modules, name))
    monkeypatch.setitem(sys.modules, "modules", modules)
    made.adapter.serve()
    yield made
    made.adapter.stop()
    take_off_patches()


def forge_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), Path(FORGE or "") / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calls_of(work: Any) -> tuple[Any, dict[str, int]]:
    """What work() returns, and how many UNet calls took each route meanwhile."""
    before = runtime.status()["calls"]
    result = work()
    after = runtime.status()["calls"]
    return result, {route: after[route] - before[route] for route in after if after[route] != before[route]}


def take_off_patches() -> None:
    from backend import memory_management

    memory_management.unload_all_models()


def without_us(host: ForgeHost, **generation: Any) -> Tensor:
    host.adapter.stop()
    output = host.generate(**generation)
    host.adapter.serve()
    return output
