"""Forge Neo's backend without its page: its UNet, patcher, memory management and LoRA around random weights.

None of its code is here: it is imported from a checkout. Only modules of the page get stand-ins: which checkpoint is
loaded, the options, the queue.
"""
from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import tempfile
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

LORA_RANK = 16
LORA_STRENGTH = 0.8
LORA_SCALE = 0.1
BIAS_SCALE = 0.02
TOKENS = 77
LATENT_PIXEL = 8
COMPILE_SCRIPT = "extensions-builtin/sd_forge_compile/scripts/compile.py"

Size = tuple[int, int]

COMMON = {"in_channels": 4, "out_channels": 4, "model_channels": 320, "use_spatial_transformer": True}
# As Neo's detection reads them from a checkpoint.
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {
        **COMMON, "num_res_blocks": [2] * 4, "channel_mult": [1, 2, 4, 4], "context_dim": 768,
        "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0], "transformer_depth_output": [1] * 9 + [0] * 3,
        "transformer_depth_middle": 1, "use_linear_in_transformer": False,
    },
    "sdxl": {
        **COMMON, "num_res_blocks": [2] * 3, "channel_mult": [1, 2, 4], "context_dim": 2048,
        "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10],
        "transformer_depth_middle": 10, "use_linear_in_transformer": True, "num_classes": "sequential",
        "adm_in_channels": 2816,
    },
}
SMALL = {"model_channels": 32, "context_dim": 32}
SMALL_SDXL = {
    **SMALL, "num_head_channels": 16, "adm_in_channels": 48, "transformer_depth": [0, 0, 1, 1, 2, 2],
    "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2], "transformer_depth_middle": 2,
}
SMALLER: dict[str, dict[str, Any]] = {"sd15": SMALL, "sdxl": SMALL_SDXL}
# The size of the first images, and the one that the user changes to.
SIZES: dict[str, tuple[Size, Size]] = {
    "sd15": ((512, 512), (512, 768)), "sdxl": ((1024, 1024), (832, 1216)),
}
SMALL_SIZES: tuple[Size, Size] = ((64, 64), (64, 96))


def import_backend(checkout: Path, cpu: bool) -> str:
    """Make `backend` importable, set up as for a generation. Returns Neo's release. Raises ImportError."""
    if not (checkout / "backend" / "nn" / "unet.py").is_file():
        raise ImportError(f"{checkout} is no checkout of Forge Neo")
    root = str(checkout.resolve())
    sys.path[:0] = [root, f"{root}/modules_forge/packages"]
    stand_in_for_the_page(root)
    # Neo reads its flags when it is imported. On a full card it would warn at every call.
    flags = ["--cpu", "--use-pytorch-cross-attention"] if cpu else ["--disable-gpu-warning"]
    arguments, sys.argv = sys.argv, ["launch.py", *flags]
    try:
        for name in ("backend.nn.unet", "backend.nn.vae", "backend.patcher.unet", "backend.sampling.sampling_function"):
            importlib.import_module(name)
        return str(importlib.import_module("modules_forge.forge_version").release)
    except ImportError as error:
        raise ImportError(f"its backend cannot be imported: {error}") from error
    finally:
        sys.argv = arguments


def stand_in_for_the_page(root: str) -> None:
    """The modules of the page that the backend, its Torch Compile and our adapter ask. Others are the checkout's."""
    page: Any = types.ModuleType("modules")
    page.__path__ = [f"{root}/modules"]
    sys.modules["modules"] = page
    model_data = SimpleNamespace(sd_model=None)
    stand_ins: dict[str, dict[str, Any]] = {
        "shared": {
            "opts": SimpleNamespace(data={}), "cmd_opts": SimpleNamespace(),
            "state": SimpleNamespace(interrupted=False, skipped=False, stopping_generation=False),
        },
        "sd_models": {"model_data": model_data, "forge_model_reload": lambda: (model_data.sd_model, False)},
        "call_queue": {"queue_lock": threading.RLock()},
        "paths": {"data_path": tempfile.mkdtemp(prefix="onediff-bench-")},
        "scripts": {"Script": object, "AlwaysVisible": object()},
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(f"modules.{name}")
        vars(module).update(attributes)
        sys.modules[f"modules.{name}"] = module
        setattr(page, name, module)


def torch_compile_script(checkout: Path) -> Any:
    """The script behind Neo's Torch Compile accordion. It draws the page with gradio, which nobody asks it to here."""
    spec = importlib.util.spec_from_file_location("sd_forge_compile", checkout / COMPILE_SCRIPT)
    if spec is None or spec.loader is None:
        raise ImportError(f"no {COMPILE_SCRIPT}")
    module = importlib.util.module_from_spec(spec)
    has_gradio = "gradio" in sys.modules
    sys.modules.setdefault("gradio", types.ModuleType("gradio"))
    try:
        spec.loader.exec_module(module)
    finally:
        if not has_gradio:
            del sys.modules["gradio"]
    return module.TorchCompileForForge()


class Checkpoint:
    """A loaded checkpoint as Neo's diffusion engines are: its UNet alone, with random weights."""

    def __init__(self, name: str, small: bool) -> None:
        from backend import memory_management
        from backend.diffusion_engine.base import ForgeObjects
        from backend.modules.k_prediction import Prediction
        from backend.patcher.unet import UnetPatcher
        from huggingface_guess import model_list

        self.name, self.small = name, small
        self.is_sd1, self.is_sdxl = name == "sd15", name == "sdxl"
        self.is_inpaint, self.current_lora_hash = False, str([])
        self.device: torch.device = memory_management.get_torch_device()
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.float16
        self.model_config = (model_list.SDXL if self.is_sdxl else model_list.SD15)(UNETS[name])
        if small:
            self.model_config.unet_config.update(SMALLER[name])
        unet = self.new_unet(memory_management.unet_offload_device(), self.dtype)
        randomise(unet, self.device)
        predictor = Prediction(1.0, "epsilon", "linear", 0.00085, 0.012, 1000)
        patcher = UnetPatcher.from_model(unet, None, self.model_config, k_predictor=predictor)
        self.forge_objects = ForgeObjects(unet=patcher, clip=None, vae=None, clipvision=None)
        self.forge_objects_original = self.forge_objects.shallow_copy()
        self.forge_objects_after_applying_lora = self.forge_objects.shallow_copy()
        self.lora = random_lora(unet)

    @property
    def unet(self) -> nn.Module:
        return self.forge_objects_original.unet.model.diffusion_model

    @property
    def config(self) -> dict[str, Any]:
        return self.model_config.unet_config

    @property
    def sizes(self) -> tuple[Size, Size]:
        return SMALL_SIZES if self.small else SIZES[self.name]

    def new_unet(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A UNet as backend.loader makes it, its weights not set yet."""
        from backend import memory_management
        from backend.args import dynamic_args
        from backend.nn.unet import IntegratedUNet2DConditionModel
        from backend.operations import using_forge_operations

        dynamic_args.ops = None
        with using_forge_operations(device=device, dtype=dtype, manual_cast_enabled=False):
            unet = IntegratedUNet2DConditionModel.from_config(dict(self.config)).to(device=device, dtype=dtype)
        unet._internal_dict = dict(self.config)
        unet.storage_dtype = unet.computation_dtype = dtype
        unet.load_device, unet.initial_device = self.device, device
        unet.offload_device = memory_management.unet_offload_device()
        return unet.eval().requires_grad_(False)

    def condition(self, seed: int) -> dict[str, Tensor] | Tensor:
        """What Neo's text encoders would give for one prompt."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, self.dtype)

        context = random(1, TOKENS, self.config["context_dim"])
        width = self.config.get("adm_in_channels")
        return context if width is None else {"crossattn": context, "vector": random(1, width)}

    def noise(self, size: Size, seed: int) -> Tensor:
        shape = (1, self.config["in_channels"], size[1] // LATENT_PIXEL, size[0] // LATENT_PIXEL)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device)

    def apply_lora(self) -> None:
        """As Neo's LoRA extension does for <lora:random:0.8>; merged when the next sampling is prepared."""
        from backend.patcher.lora import load_lora, model_lora_keys_unet

        patcher = self.forge_objects_original.unet
        patches, left = load_lora(dict(self.lora), model_lora_keys_unet(patcher.model, {}))
        if left:
            raise RuntimeError(f"{len(left)} of {len(self.lora)} LoRA weights are not recognised")
        patcher = patcher.clone()
        patcher.add_patches(
            filename="random.safetensors", patches=patches, strength_patch=LORA_STRENGTH, online_mode=False
        )
        self.forge_objects_after_applying_lora.unet = patcher
        self.current_lora_hash = "random"

    def remove_lora(self) -> None:
        self.forge_objects_after_applying_lora = self.forge_objects_original.shallow_copy()
        self.forge_objects = self.forge_objects_original.shallow_copy()
        self.current_lora_hash = str([])

    def unload(self) -> None:
        """Off the device, as it was before the first image."""
        from backend import memory_management

        self.remove_lora()
        memory_management.unload_all_models()


@torch.no_grad()
def randomise(unet: nn.Module, device: torch.device) -> None:
    """Weights with which no layer idles and activations keep their size; drawn on the device, where it is fast."""
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in unet.named_parameters():
        if name.endswith(".weight") and parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        scale = BIAS_SCALE if parameter.dim() == 1 else 1 / math.sqrt(parameter[0].numel())
        drawn = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.copy_(drawn.mul_(scale))


def random_lora(unet: nn.Module) -> dict[str, Tensor]:
    """A LoRA over every attention layer, as one is found in a file."""
    generator = torch.Generator().manual_seed(1)
    lora: dict[str, Tensor] = {}
    for name, module in unet.named_modules():
        if not (isinstance(module, nn.Linear) and (".attn1." in name or ".attn2." in name)):
            continue
        rows, columns = module.weight.shape
        key = f"lora_unet_{name.replace('.', '_')}"
        lora[f"{key}.lora_down.weight"] = torch.randn(LORA_RANK, columns, generator=generator) / math.sqrt(columns)
        lora[f"{key}.lora_up.weight"] = torch.randn(rows, LORA_RANK, generator=generator) * LORA_SCALE
        lora[f"{key}.alpha"] = torch.tensor(float(LORA_RANK))
    return lora
