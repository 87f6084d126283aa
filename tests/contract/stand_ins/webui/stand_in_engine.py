"""Code that the Forge family's stand-ins share: a checkpoint, its model patcher, and the loop of a UNet's forward."""
from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")


def code_of(file: str, namespace: dict[str, Any], *changes: tuple[str, str]) -> None:
    """Execute a file of another WebUI's stand-in in a namespace.

    file: relative to the folder stand_ins. changes: (before, after), replaced in the file's source first.
    """
    namespace["__file__"] = path = str(Path(__file__).parents[1] / file)
    source = Path(path).read_text()
    for before, after in changes:
        source = source.replace(before, after)
    exec(compile(source, path, "exec"), namespace)


def in_own_classes(network: nn.Module, namespace: dict[str, Any]) -> None:
    """Change the class of each ldm module in the network to a subclass with the same name, since each WebUI has its own
    copy of ldm's code. namespace: the globals of the WebUI's file, to which the subclasses are added."""
    for module in network.modules():
        kind = type(module)
        if kind.__module__.partition(".")[0] == "ldm":
            derived = type(kind.__name__, (kind,), {"__module__": namespace["__name__"]})
            module.__class__ = namespace.setdefault(kind.__name__, derived)


def walk(
    unet: Any, x: Tensor, embedding: Tensor, context: Tensor, control: Any, apply_control: Callable[..., Tensor],
    stage: Callable[..., Tensor], output_block_patches: Any, block_modifiers: Any = (),
) -> Tensor:
    """The forward of a UNet: the loops over its blocks. stage(module, h, emb, context) runs one of them."""
    emb = unet.time_embed(embedding)
    h = x
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
    """Add the next ControlNet residual of this part to h, and remove it from control[name], as apply_control does in
    every WebUI."""
    residual = control[name].pop() if control and control.get(name) else None
    return h if residual is None else h + residual


def attention_of_heads(q: Tensor, k: Tensor, v: Tensor, heads: int, skip_reshape: bool = False) -> Tensor:
    """Softmax attention. skip_reshape: whether the inputs are already (batch, heads, tokens, width of a head)."""
    if not skip_reshape:
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention_of_pixels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = (part.flatten(2).transpose(1, 2).unsqueeze(1) for part in (q, k, v))
    return scaled_dot_product_attention(*flat).squeeze(1).transpose(1, 2).reshape(q.shape)


def merged(weight: Tensor, patches: Any) -> Tensor:
    """The weight with patches merged into it. Each patch is (strength, value, strength of the model, offset, ...).
    offset: (axis, first, count) for a part of the weight; None for all of it."""
    for strength, what, _, part, *_ in patches:
        if part is not None:
            weight = weight.clone()
            target = weight.narrow(*part)
            target.copy_(merged(target, [(strength, what, 1.0, None)]))
            continue
        kind, parts = what if len(what) == 2 else ("diff", what)
        if kind == "lora":
            up, down, alpha = parts[:3]
            difference = alpha / down.shape[0] * up.flatten(1) @ down.flatten(1)
        elif kind == "loha":
            difference = (parts[0] @ parts[1]) * (parts[2] @ parts[3])
        else:
            difference = parts[0]
        weight = weight + strength * difference.reshape(weight.shape).to(weight.dtype)
    return weight


def parameters_of(layer: Any, x: Tensor) -> list[Any]:
    """The weight and the bias with which a layer computes: cast to the input's dtype (if the layer casts), and then
    changed by the layer's functions and online LoRAs."""
    casts = getattr(layer, "parameters_manual_cast", False) or getattr(layer, "ldm_patched_cast_weights", False)
    found: list[Any] = []
    for name in ("weight", "bias"):
        parameter = getattr(layer, name)
        if parameter is not None:
            parameter = parameter.to(x.dtype) if casts else parameter
            for function in getattr(layer, f"{name}_function", ()):
                parameter = function(parameter)
            parameter = merged(parameter, getattr(layer, "forge_online_loras", {}).get(name, ()))
        found.append(parameter)
    return found


UNETS = ("IntegratedUNet2DConditionModel", "UNetModel")


class KModel(nn.Module):
    """The model around the UNet. Converts noise levels to timesteps; for transformers, both are the same."""

    def __init__(self, unet: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.diffusion_model = unet
        self.multiplier = 100 if type(unet).__name__ in UNETS else 1
        self.storage_dtype = self.computation_dtype = dtype
        unet.storage_dtype = unet.computation_dtype = dtype

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Any = None, control: Any = None, transformer_options: Any = None,
        **others: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        timesteps = (self.multiplier * t).float()
        output = self.diffusion_model(
            x, timesteps, context=c_crossattn, control=control, transformer_options=options, **others
        )
        return x - 0.1 * t.view(-1, *(1 for _ in x.shape[1:])) * output.float()


class ModelPatcher:
    """Applies LoRA patches to a model: merges them into new parameters, or lets the layers apply them at every call
    (online_mode).

    originals: the parameters before merging, by path; shared by all clones.
    """

    def __init__(self, model: Any, originals: dict[str, nn.Parameter]) -> None:
        self.model = model
        self._originals = originals
        self.load_device = self.offload_device = CPU
        self.lora: dict[str, list[Any]] = {}
        self.model_options: dict[str, Any] = {"transformer_options": {}}

    def clone(self) -> Any:
        made = copy.copy(self)
        made.lora = {key: list(patches) for key, patches in self.lora.items()}
        made.model_options = copy.deepcopy(self.model_options)
        return made

    def model_dtype(self) -> torch.dtype:
        return self.model.storage_dtype

    def add_patches(self, patches: dict[str, Any], strength_patch: float = 1.0, online_mode: bool = False) -> None:
        """Add patches: by parameter, ("lora", (up, down, alpha, middle, dora scale)), ("loha", (...)) or
        (difference,)."""
        for key, what in patches.items():
            self.lora.setdefault(key, []).append([strength_patch, what, 1.0, None, None, online_mode])

    def set_model_output_block_patch(self, patch: Any) -> None:
        self.model_options["transformer_options"].setdefault("patches", {})["output_block_patch"] = [patch]

    def patch_model(self) -> None:
        """Undo the patches that the model has, and apply those of this patcher."""
        for key in list(self._originals):
            self.put(key, self._originals.pop(key))
        for layer in self.model.modules():
            self.take_off(layer)
        for key, patches in self.lora.items():
            if patches[0][-1]:
                self.put_on(key, patches)
            else:
                weight = self.model.get_parameter(key)
                self._originals[key] = weight
                self.put(key, nn.Parameter(self.merged(key, weight, patches), requires_grad=False))

    def merged(self, key: str, weight: Any, patches: list[Any]) -> Tensor:
        """A parameter with these patches merged into it, in the dtype in which it is stored."""
        return merged(weight.float(), patches).to(weight.dtype)

    def put(self, key: str, value: Any) -> None:
        """Set this as a parameter of the model."""
        setattr(self._layer(key), key.rpartition(".")[2], value)

    def put_on(self, key: str, patches: Any) -> None:
        """Let a layer apply the patches at every call."""
        raise NotImplementedError

    def take_off(self, layer: nn.Module) -> None:
        """Undo put_on."""

    def _layer(self, key: str) -> Any:
        return self.model.get_submodule(key.rpartition(".")[0])


class ComfyPatcher(ModelPatcher):
    """Applies online patches by functions in the layers' lists. The parameters before merging are in its `backup`."""

    def __init__(self, model: Any) -> None:
        self.backup: dict[str, Any] = {}
        super().__init__(model, self.backup)

    def put_on(self, key: str, patches: Any) -> None:
        setattr(self._layer(key), f"{key.rpartition('.')[2]}_function", self.functions(key, patches))

    def functions(self, key: str, patches: list[Any]) -> list[Any]:
        return [LowVramPatch(key, self.lora)]

    def take_off(self, layer: Any) -> None:
        for name in ("weight_function", "bias_function"):
            if layer.__dict__.get(name):
                setattr(layer, name, [])


class LowVramPatch:
    """ComfyUI's function for a layer's list: merges the patches of the parameter `key` into the weight that it gets."""

    def __init__(self, key: str, patches: Any) -> None:
        self.key = key
        self.patches = patches

    def __call__(self, weight: Tensor) -> Tensor:
        return merged(weight, self.patches[self.key])


def module_size(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def get_free_memory(device: Any = None) -> int:
    return 2**36


current_loaded_models: list[Any] = []


def load_models_gpu(models: list[Any]) -> None:
    current_loaded_models[:] = models
    for model in models:
        model.patch_model()


def sampling_prepare(unet: Any, x: Any) -> None:
    load_models_gpu([unet])


def sampling_cleanup(unet: Any) -> None:
    pass


class AutoencoderKL(nn.Module):
    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder


class VAE:
    vae_dtype = torch.float32
    device = CPU

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
        self.unet = unet
        self.vae = vae

    def shallow_copy(self) -> ForgeObjects:
        return ForgeObjects(self.unet, self.vae)


class Engine:
    """A loaded checkpoint. Three of its attributes hold the same model patcher."""

    def __init__(self, patcher: Any, vae: VAE) -> None:
        self.forge_objects = ForgeObjects(patcher, vae)
        self.forge_objects_original = self.forge_objects.shallow_copy()
        self.forge_objects_after_applying_lora = self.forge_objects.shallow_copy()

    def decode_first_stage(self, latent: Tensor) -> Tensor:
        return self.forge_objects.vae.decode(latent)

    def encode_first_stage(self, image: Tensor) -> Tensor:
        return self.forge_objects.vae.encode(image)
