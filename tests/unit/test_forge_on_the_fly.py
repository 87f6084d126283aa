"""Forge's own LoRA arithmetic and casting layers on its own UNet: LoRAs on the fly, other functions, weights in float8.

Point ONEDIFF_FORGE at a checkout of stable-diffusion-webui-forge to run these.
"""
from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import relative_error
from forge_builders import Checkpoint, ForgeHost, calls_of, forge_host, without_us  # noqa: F401
from test_real_host_unets import SD1, SDXL, needs_forge
from torch import Tensor

from lib_onediff.runtime.runtime import runtime

pytestmark = needs_forge
OURS = {"plain": 2}
BLOCK = "diffusion_model.input_blocks.4.1.transformer_blocks.0"
LINEAR = (f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn1.to_k", f"{BLOCK}.attn2.to_v", f"{BLOCK}.ff.net.0.proj")
CONVOLUTIONS = ("diffusion_model.input_blocks.4.0.in_layers.2", "diffusion_model.input_blocks.3.0.op")


class Patches:
    """What LoRA files of several kinds hold for these layers, as Forge's loader hands it on."""

    def __init__(self, checkpoint: Checkpoint, paths: tuple[str, ...]) -> None:
        self._model = checkpoint.forge_objects.unet.model
        self._generator = torch.Generator().manual_seed(5)
        self._paths = paths

    def _random(self, *shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=self._generator)

    def of(self, kind: str, rank: int = 4) -> dict[str, Any]:
        return {
            f"{path}.weight": (kind.partition(" ")[0], self._parts(kind, self._model.get_submodule(path).weight, rank))
            for path in self._paths
        }

    def _parts(self, kind: str, weight: Tensor, rank: int) -> tuple[Any, ...]:
        out, *into = weight.shape
        width = weight[0].numel()
        if kind == "lora":
            return (self._random(out, rank, *(1 for _ in into[1:])), self._random(rank, *into), 2.0, None, None)
        if kind == "lora of DoRA":
            scale = self._random(out, *(1 for _ in into)).abs() + 1
            return self._random(out, rank), self._random(rank, width), 2.0, None, scale
        if kind == "lora with a middle":
            return (
                self._random(out, rank, 1, 1), self._random(rank, into[0], 1, 1), 2.0,
                self._random(rank, rank, *into[1:]), None,
            )
        if kind == "loha":
            parts = (self._random(out, rank), self._random(rank, width), 2.0)
            return (*parts, self._random(out, rank), self._random(rank, width), None, None, None)
        if kind == "lokr":
            small = self._random(2, 2)
            rest = self._random(out // 2, into[0] // 2, *into[1:])
            return small, rest, None, None, None, None, None, None, None
        return (self._random(*weight.shape),)


def put_on(checkpoint: Checkpoint, *loras: tuple[dict[str, Any], float]) -> None:
    patcher = checkpoint.forge_objects_original.unet.clone()
    for index, (patches, strength) in enumerate(loras):
        patcher.add_patches(filename=str(index), patches=patches, strength_patch=strength, online_mode=True)
    checkpoint.forge_objects_after_applying_lora.unet = patcher


def stored_as(checkpoint: Checkpoint, dtype: torch.dtype) -> Checkpoint:
    unet = checkpoint.unet
    unet.to(dtype)
    unet.storage_dtype = checkpoint.forge_objects.unet.model.storage_dtype = dtype
    for module in unet.modules():
        if hasattr(module, "parameters_manual_cast"):
            module.parameters_manual_cast = True
    return checkpoint


@pytest.mark.parametrize("config", [SD1, SDXL], ids=["SD1", "SDXL"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_loras_on_the_fly(host: ForgeHost, config: dict[str, Any], dtype: torch.dtype) -> None:
    checkpoint = host.load(stored_as(Checkpoint(**config), dtype) if dtype != torch.float32 else Checkpoint(**config))
    patches = Patches(checkpoint, (*LINEAR, *CONVOLUTIONS))
    one, two = patches.of("lora"), patches.of("lora", rank=2)
    plain = without_us(host)
    for loras in (((one, 1.0),), ((one, 1.0), (two, -0.5)), ((two, 0.5),)):
        put_on(checkpoint, *loras)
        output, calls = calls_of(host.generate)
        assert calls == OURS, runtime.status()["reason"]
        managed = runtime.managed_unet(checkpoint.unet)
        assert managed is not None and managed.kinds[0] == "LoRA on the fly"
        assert "weights changed on the fly" not in managed.kinds
        expected = without_us(host)
        assert relative_error(output, expected) < 1e-5 < 1e-2 < relative_error(plain, expected)
    put_on(checkpoint)
    output, calls = calls_of(host.generate)
    assert calls == OURS and relative_error(output, plain) < 1e-5
    host.adapter.stop()
    assert torch.equal(host.generate(), plain)


@pytest.mark.parametrize("kind", ["loha", "lokr", "lora of DoRA", "lora with a middle", "diff"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_other_kinds_are_applied_by_forges_own_function(host: ForgeHost, kind: str, dtype: torch.dtype) -> None:
    checkpoint = host.load(stored_as(Checkpoint(), dtype) if dtype != torch.float32 else Checkpoint())
    paths = CONVOLUTIONS if "middle" in kind else (*LINEAR, *CONVOLUTIONS[:1])
    other = Patches(checkpoint, paths).of(kind)
    if kind == "diff":
        other = {key: parts for key, (_, parts) in other.items()}
    plain_lora = Patches(checkpoint, LINEAR).of("lora")
    plain = without_us(host)
    for loras in (((other, 0.5),), ((other, 0.5), (plain_lora, 0.5))):
        put_on(checkpoint, *loras)
        output, calls = calls_of(host.generate)
        assert calls == OURS, runtime.status()["reason"]
        managed = runtime.managed_unet(checkpoint.unet)
        assert managed is not None and "weights changed on the fly" in managed.kinds
        expected = without_us(host)
        assert relative_error(output, expected) < 1e-5 < 1e-3 < relative_error(plain, expected)
