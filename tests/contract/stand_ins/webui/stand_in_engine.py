"""What the hosts of the Forge family have in common: a checkpoint, its model patcher, and the walk through its UNet."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")


def walk(
    unet: Any, x: Tensor, embedding: Tensor, context: Tensor, control: Any, apply_control: Callable[..., Tensor],
    stage: Callable[..., Tensor], output_block_patches: Any, block_modifiers: Any = (),
) -> Tensor:
    """The loop of a UNet's forward; stage(module, h, emb, context) runs one of its blocks."""
    emb, h = unet.time_embed(embedding), x
    skips: list[Tensor] = []
    for module in unet.input_blocks:
        h = apply_control(stage(module, h, emb, context), control, "input")
        skips.append(h)
    h = apply_control(stage(unet.middle_block, h, emb, context), control, "middle")
    for module in unet.output_blocks:
        skip = apply_control(skips.pop(), control, "output")
        for patch in output_block_patches:
            h, skip = patch(h, skip, {})
        h = stage(module, torch.cat([h, skip], dim=1), emb, context)
    for modifier in block_modifiers:
        h = modifier(h, "after", {})
    return unet.out(h).type(x.dtype)


def popped(h: Tensor, control: Any, name: str) -> Tensor:
    """What every apply_control does."""
    residual = control[name].pop() if control and control.get(name) else None
    return h if residual is None else h + residual


def attention_of_heads(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    batch, _, width = q.shape
    q, k, v = (part.view(batch, -1, heads, width // heads).transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, -1, width)


def attention_of_pixels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in (q, k, v))
    return scaled_dot_product_attention(*flat).squeeze(1).transpose(1, 2).reshape(q.shape)


def weight_of(layer: Any) -> Tensor:
    """As ComfyUI's layers find it."""
    weight = layer.weight
    for function in getattr(layer, "weight_function", ()):
        weight = function(weight)
    return weight


class KModel(nn.Module):
    """Around the UNet: turns noise levels into timesteps."""

    def __init__(self, unet: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.diffusion_model = unet
        self.storage_dtype = self.computation_dtype = dtype
        unet.storage_dtype = unet.computation_dtype = dtype

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Any = None, control: Any = None, transformer_options: Any = None,
        **others: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        output = self.diffusion_model(
            x, (100 * t).float(), context=c_crossattn, control=control, transformer_options=options, **others
        )
        return x - 0.1 * t.view(-1, 1, 1, 1) * output.float()


class ModelPatcher:
    """Merges patches as new parameters with the originals put aside, or hands them to the layers (online).

    originals: the parameters that were put aside, shared by all clones.
    """

    def __init__(self, model: Any, originals: dict[str, nn.Parameter]) -> None:
        self.model, self._originals = model, originals
        self.load_device = self.offload_device = CPU
        self.lora: dict[str, tuple[Tensor, float, bool]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> Any:
        made = copy.copy(self)
        made.lora, made.model_options = dict(self.lora), copy.deepcopy(self.model_options)
        return made

    def model_dtype(self) -> torch.dtype:
        return self.model.storage_dtype

    def add_patches(self, patches: dict[str, Tensor], strength_patch: float = 1.0, online_mode: bool = False) -> None:
        self.lora.update({key: (difference, strength_patch, online_mode) for key, difference in patches.items()})

    def set_model_output_block_patch(self, patch: Any) -> None:
        self.model_options["transformer_options"].setdefault("patches", {})["output_block_patch"] = [patch]

    def set_model_unet_function_wrapper(self, wrapper: Any) -> None:
        self.model_options["model_function_wrapper"] = wrapper

    def patch_model(self) -> None:
        """Make the model's weights those of this patcher."""
        for key in list(self._originals):
            self._layer(key).weight = self._originals.pop(key)
        for layer in self.model.modules():
            self.take_off(layer)
        for key, (difference, strength, online) in self.lora.items():
            layer = self._layer(key)
            if online:
                self.put_on(layer, strength * difference)
            else:
                self._originals[key] = layer.weight
                layer.weight = nn.Parameter(layer.weight + strength * difference, requires_grad=False)

    def put_on(self, layer: nn.Module, difference: Tensor) -> None:
        """Let a layer add the difference at every call."""
        raise NotImplementedError

    def take_off(self, layer: nn.Module) -> None:
        """Undo put_on."""

    def _layer(self, key: str) -> Any:
        return self.model.get_submodule(key.removesuffix(".weight"))


class ComfyPatcher(ModelPatcher):
    """Layers get functions; what was put aside lies in the patcher."""

    def __init__(self, model: Any) -> None:
        self.backup: dict[str, Any] = {}
        super().__init__(model, self.backup)

    def put_on(self, layer: Any, difference: Tensor) -> None:
        layer.weight_function = [lambda weight: weight + difference]

    def take_off(self, layer: Any) -> None:
        if layer.__dict__.get("weight_function"):
            layer.weight_function = []


def module_size(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def get_free_memory(device: Any = None) -> int:
    return 2**36


class AutoencoderKL(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


class VAE:
    vae_dtype, device = torch.float32, CPU

    def __init__(self, encoder: nn.Module, decoder: Any) -> None:
        self.first_stage_model = AutoencoderKL(encoder, decoder)
        self.latent_channels = decoder.conv_in.in_channels

    def memory_used_decode(self, shape: Any, dtype: torch.dtype) -> int:
        return 2178 * shape[2] * shape[3] * 64 * 4

    def decode(self, latent: Tensor) -> Tensor:
        return self.first_stage_model.decoder(latent)

    def encode(self, image: Tensor) -> Tensor:
        return self.first_stage_model.encoder(image)


class ForgeObjects:
    def __init__(self, unet: Any, vae: Any) -> None:
        self.unet, self.vae = unet, vae

    def shallow_copy(self) -> ForgeObjects:
        return ForgeObjects(self.unet, self.vae)


class Engine:
    """A loaded checkpoint: the same patcher in three places."""

    def __init__(self, patcher: Any, vae: VAE) -> None:
        self.forge_objects = ForgeObjects(patcher, vae)
        self.forge_objects_original = self.forge_objects.shallow_copy()
        self.forge_objects_after_applying_lora = self.forge_objects.shallow_copy()

    def decode_first_stage(self, latent: Tensor) -> Tensor:
        return self.forge_objects.vae.decode(latent)

    def encode_first_stage(self, image: Tensor) -> Tensor:
        return self.forge_objects.vae.encode(image)
