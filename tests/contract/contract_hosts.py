"""The WebUIs of the contract tests: stand-ins on disk with a small checkpoint, and functions that make a generation as
the WebUI and our script do."""
from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from builders import CONTEXT_WIDTH, ldm_structure, randomise
from torch import Tensor, nn
from vae_builders import LDM_LAYOUTS, ldm_decoder

from lib_onediff.core.settings import Settings
from lib_onediff.hosts import this_webui
from lib_onediff.hosts.contract import WebUI
from lib_onediff.runtime.runtime import runtime

STAND_INS = Path(__file__).with_name("stand_ins")
# By WebUI: the folders with its modules, in the order in which they are searched.
FOLDERS = {
    "a1111": ("a1111", "webui"), "forge": ("forge", "webui"), "neo": ("neo", "forge", "webui"),
    # reForge also contains A1111's modules.
    "reforge": ("reforge", "a1111", "webui"), "classic": ("classic", "reforge", "webui"),
}
FAMILY = ("forge", "neo", "reforge", "classic")
HOSTS = ("a1111", *FAMILY)
TOP_NAMES = (
    "modules", "modules_forge", "backend", "ldm_patched", "sgm", "networks", "stand_in_engine", "comfy_kitchen",
)
SMALL = {"channel_mult": [1, 2], "num_res_blocks": 1, "attention_resolutions": [2]}
ATTENTION = "input_blocks.3.1.transformer_blocks.0.attn1.to_q"


@contextlib.contextmanager
def on_path(*folders: str) -> Iterator[None]:
    """A context in which the modules in these folders can be imported, and those of no other WebUI."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*(str(STAND_INS / folder) for folder in folders), *sys.path])
        ours = lambda: [name for name in sys.modules if name.partition(".")[0] in TOP_NAMES]  # noqa: E731
        for name in ours():
            patch.delitem(sys.modules, name)
        try:
            yield
        finally:
            for name in ours():
                del sys.modules[name]


def controlled_forward(unet: Any, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
    """A forward like sd-webui-controlnet's: runs the stages itself, and adds a number to the middle stage's output and
    to every skip."""
    from ldm.modules.diffusionmodules.util import timestep_embedding

    embedding = unet.time_embed(timestep_embedding(timesteps, unet.model_channels))
    hidden_states = x
    skips = []
    for stage in unet.input_blocks:
        hidden_states = stage(hidden_states, embedding, context)
        skips.append(hidden_states)
    hidden_states = unet.middle_block(hidden_states, embedding, context) + 0.1
    for stage in unet.output_blocks:
        hidden_states = stage(torch.cat([hidden_states, skips.pop() - 0.1], dim=1), embedding, context)
    return unet.out(hidden_states)


class Made(NamedTuple):
    """The results of a generation: a latent after two UNet calls, a decoded image, and an encoded latent."""

    latent: Tensor
    image: Tensor
    encoded: Tensor


class Sampler:
    """The part of a k-diffusion sampler that OneDiff reads: its schedule."""

    def __init__(self) -> None:
        self.model_wrap = SimpleNamespace(log_sigmas=torch.zeros(1), sigma_to_t=lambda sigmas: 100 * sigmas)

    def func(self, model: Any, x: Any, sigmas: Any) -> None:
        """The sampling function. OneDiff reads its parameters, and nothing calls it."""

    def get_sigmas(self) -> Tensor:
        return torch.tensor([9.0, 1.5, 0.0])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Host:
    """A WebUI with one checkpoint, and methods that call it as its own code and our script do.

    Each subclass has:
    make(): a new checkpoint of the WebUI's classes.
    unet: the checkpoint's UNet.
    networks(): all modules on which OneDiff could have left something.
    sample(extension, control): makes two UNet calls, and returns the latent. extension: a function that first changes
        the WebUI's model patcher, as an extension does. control: residuals of a ControlNet. A1111 ignores both.
    set_lora(strength): merges a LoRA for later generations; 0 removes it.
    """

    unet_module = ""
    unet_class = ""
    vae_module = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module("modules.shared")
        self.checkpoint = self.make()
        self.module("modules.sd_models").model_data.sd_model = self.checkpoint
        self.adapter: WebUI | None = None

    def module(self, name: str) -> Any:
        return importlib.import_module(name)

    def new_unet(self, **config: Any) -> Any:
        return randomise(ldm_structure({**SMALL, **config}, self.unet_module, self.unet_class))

    def new_vae(self) -> tuple[nn.Module, nn.Module]:
        small = LDM_LAYOUTS["one layer"]
        encoder, decoder = (ldm_decoder(module=self.vae_module, kind=kind, **small) for kind in ("Encoder", "Decoder"))
        return encoder, decoder

    def forwards(self) -> list[Any]:
        """The forwards of the classes that OneDiff patches."""
        unet = getattr(self.module(self.unet_module), self.unet_class)
        vae = self.module(self.vae_module)
        return [kind.__dict__["forward"] for kind in (unet, vae.Decoder, vae.Encoder)]

    # --- as scripts/onediff.py does --------------------------------------------------------------------------------

    def start(self) -> WebUI:
        self.adapter = this_webui()
        self.switch(True)
        self.announce()
        return self.adapter

    def begin(self) -> WebUI:
        """Start OneDiff, and begin a sampling."""
        adapter = self.start()
        adapter.before_sampling(SimpleNamespace(sd_model=self.checkpoint, sampler=Sampler(), is_hr_pass=False))
        return adapter

    def switch(self, on: bool) -> None:
        """Switch OneDiff on or off, as the settings tab does."""
        runtime.configure(Settings(enabled=on))
        (self.adapter.serve if on else self.adapter.stop)()

    def announce(self) -> None:
        """Tell OneDiff that the WebUI has loaded its checkpoint."""
        runtime.guard.hook("looking at a loaded checkpoint")(self.adapter.model_loaded)(self.checkpoint)

    def generate(self, extension: Any = None, control: Any = None) -> Made:
        """Make one generation; before start(), by the WebUI alone."""
        guard = runtime.guard
        adapter = self.adapter if runtime.settings.enabled else None
        guard.hook("the settings of this generation", in_generation=True)(guard.resume)()
        p = SimpleNamespace(sd_model=self.checkpoint, sampler=Sampler(), is_hr_pass=False)
        if adapter is not None:
            guard.hook("the beginning of a sampling", in_generation=True)(lambda: adapter.before_sampling(p))()
        p.sampler.get_sigmas()
        with self.no_gradients():
            made = Made(
                self.sample(extension, control).clone(), self.checkpoint.decode_first_stage(random(1, 4, 6, 6)).clone(),
                self.checkpoint.encode_first_stage(random(1, 3, 16, 16)).clone(),
            )
        if adapter is not None:
            guard.hook("the end of a generation")(lambda: adapter.after_run(p))()
        return made

    def no_gradients(self) -> Any:
        return torch.inference_mode()

    @property
    def adapter_module(self) -> Any:
        return sys.modules[type(self.adapter).before_sampling.__module__]


class FamilyHost(Host):
    """A WebUI of the Forge family."""

    unet_module = "backend.nn.unet"
    unet_class = "IntegratedUNet2DConditionModel"
    vae_module = "backend.nn.vae"
    patcher = "backend.patcher.base"
    layers = ("backend.operations", "ForgeOperations")
    sampling = "backend.sampling.sampling_function"

    def make(self) -> Any:
        engine = self.module("stand_in_engine")
        unet = self.new_unet()
        encoder, decoder = self.new_vae()
        for network in (unet, encoder, decoder):
            self.in_own_layers(network)
        model = engine.KModel(unet)
        return engine.Engine(self.module(self.patcher).ModelPatcher(model), engine.VAE(encoder, decoder))

    def in_own_layers(self, network: nn.Module) -> None:
        """Give every layer the class that the WebUI would have built it with. It keeps its parameters."""
        module, name = self.layers
        classes = getattr(self.module(module), name)
        for layer in network.modules():
            kind = getattr(classes, type(layer).__name__.removesuffix("32"), None)
            # A module without weight is not a layer, though its class may have a layer's name.
            if kind is not None and hasattr(layer, "weight"):
                layer.__class__ = kind

    @property
    def unet(self) -> Any:
        return self.checkpoint.forge_objects.unet.model.diffusion_model

    def networks(self) -> list[nn.Module]:
        return [self.checkpoint.forge_objects.unet.model, self.checkpoint.forge_objects.vae.first_stage_model]

    def sample(self, extension: Any, control: Any) -> Tensor:
        with_loras = self.checkpoint.forge_objects_after_applying_lora
        self.checkpoint.forge_objects = (with_loras or self.checkpoint.forge_objects_original).shallow_copy()
        patcher = self.checkpoint.forge_objects.unet.clone()
        if extension is not None:
            extension(patcher)
        sampling = self.module(self.sampling)
        image, context = self.noise_and_prompts()
        sampling.sampling_prepare(patcher, image)
        for sigma in (9.0, 1.5):
            options = {
                **patcher.model_options["transformer_options"], "cond_or_uncond": [1, 0],
                "sigmas": torch.tensor([sigma]), **self.options_of_a_call(),
            }
            lists = control and {part: list(values) for part, values in control.items()}
            predictions = patcher.model.apply_model(
                torch.cat([image, image]), torch.full((2,), sigma), c_crossattn=context.clone(), control=lists,
                transformer_options=options,
            )
            image = 0.5 * image + 0.5 * (predictions[1:] + 3 * (predictions[:1] - predictions[1:]))
        sampling.sampling_cleanup(patcher)
        return image

    def noise_and_prompts(self) -> tuple[Tensor, Tensor]:
        return random(1, 4, 8, 8, seed=1), random(2, 77, CONTEXT_WIDTH, seed=2)

    def options_of_a_call(self) -> dict[str, Any]:
        """The options that this WebUI adds to transformer_options."""
        if self.name == "neo":
            return {"sampling_sigmas": torch.tensor([9.0, 1.5, 0.0])}
        return {"uuids": [1, 2]} if self.name == "reforge" else {}

    def set_lora(self, strength: float) -> None:
        difference = {f"{ATTENTION}.weight": (random(*self.unet.get_submodule(ATTENTION).weight.shape),)}
        self.set_loras(*[(difference, strength)] * bool(strength), online=False)

    def set_loras(self, *loras: tuple[dict[str, Any], float], online: bool = True) -> None:
        """Use these LoRAs in later generations. loras: for each, its patches by parameter name, and its strength.
        online: whether the layers apply them at each use of a weight; otherwise, the WebUI merges them."""
        patcher = self.checkpoint.forge_objects_original.unet.clone()
        for patches, strength in loras:
            patcher.add_patches({f"diffusion_model.{key}": what for key, what in patches.items()}, strength, online)
        self.checkpoint.forge_objects_after_applying_lora.unet = patcher

    def store_as(self, dtype: torch.dtype) -> None:
        """Store the weights in this dtype, which every layer casts at each use: the setting "Diffusion in Low Bits"."""
        self.unet.to(dtype)
        self.unet.storage_dtype = self.checkpoint.forge_objects.unet.model.storage_dtype = dtype
        for layer in self.unet.modules():
            layer.parameters_manual_cast = layer.ldm_patched_cast_weights = True


class LdmPatchedHost(FamilyHost):
    """reForge."""

    unet_module = "ldm_patched.ldm.modules.diffusionmodules.openaimodel"
    unet_class = "UNetModel"
    vae_module = "ldm_patched.ldm.modules.diffusionmodules.model"
    patcher = "ldm_patched.modules.model_patcher"
    layers = ("ldm_patched.modules.ops", "disable_weight_init")
    sampling = "modules_forge.forge_sampler"


class ClassicHost(LdmPatchedHost):
    """Forge Classic. Its weights are inference tensors, and it has forge_objects_after_applying_lora only if
    there are LoRAs."""

    def make(self) -> Any:
        with torch.inference_mode():
            checkpoint = super().make()
        checkpoint.forge_objects_after_applying_lora = None
        return checkpoint

    def set_lora(self, strength: float) -> None:
        checkpoint = self.checkpoint
        checkpoint.forge_objects_after_applying_lora = checkpoint.forge_objects.shallow_copy() if strength else None
        if strength:
            super().set_lora(strength)

    def write_in_place(self) -> None:
        """Switch on the setting "patch LoRA in place"."""
        self.checkpoint.forge_objects_original.unet.weight_inplace_update = True


class A1111Host(Host):
    unet_module = "ldm.modules.diffusionmodules.openaimodel"
    unet_class = "UNetModel"
    vae_module = "ldm.modules.diffusionmodules.model"
    _file: dict[str, Tensor] | None = None

    def make(self) -> Any:
        self.module("modules.launch_utils")
        checkpoint = self.module("modules.stand_in_checkpoint").LatentDiffusion(self.new_unet(), *self.new_vae())
        for name, layer in checkpoint.model.diffusion_model.named_modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.network_layer_name = name
        return checkpoint

    @property
    def unet(self) -> Any:
        return self.checkpoint.model.diffusion_model

    def networks(self) -> list[nn.Module]:
        return [self.unet, self.checkpoint.first_stage_model.encoder, self.checkpoint.first_stage_model.decoder]

    def no_gradients(self) -> Any:
        return torch.no_grad()

    def sample(self, extension: Any, control: Any) -> Tensor:
        image = random(1, 4, 8, 8, seed=1)
        context = random(2, 77, CONTEXT_WIDTH, seed=2)
        for time in (900.25, 150.5):
            predictions = self.checkpoint.apply_model(
                image.repeat(2, 1, 1, 1), torch.full((2,), time), {"c_crossattn": [context.clone()]}
            )
            image = image - 0.1 * (predictions[:1] + 3 * (predictions[:1] - predictions[1:]))
        return image

    def store_in_fp8(self, on: bool, cache: bool = False) -> None:
        """Load the checkpoint again, into the same modules, as the options "FP8 weight" (on) and "Cache FP16 weight for
        LoRA" (cache) do."""
        devices = self.module("modules.devices")
        if self._file is None:
            self._file = {name: value.clone() for name, value in self.unet.state_dict().items()}
        devices.fp8 = on
        self.unet.float().load_state_dict(self._file)
        for layer in self.unet.modules():
            for name in ("network_current_names", "network_weights_backup", "fp16_weight", "fp16_bias"):
                layer.__dict__.pop(name, None)
            if on and isinstance(layer, (nn.Linear, nn.Conv2d)):
                if cache:
                    layer.__dict__.update({f"fp16_{name}": value.half() for name, value in layer.named_parameters()})
                layer.to(torch.float8_e4m3fn)

    def set_lora(self, strength: float, online: bool = False) -> None:
        networks = self.module("networks")
        self.module("modules.shared").opts.lora_functional = online
        weight = self.unet.get_submodule(ATTENTION).weight
        wanted = [networks.network("one", strength, {ATTENTION: random(*weight.shape)})] if strength else []
        networks.loaded_networks[:] = wanted


CLASSES = {
    "a1111": A1111Host, "forge": FamilyHost, "neo": FamilyHost, "reforge": LdmPatchedHost, "classic": ClassicHost,
}


@contextlib.contextmanager
def running(name: str, kind: type[Host] | None = None) -> Iterator[Host]:
    """A context with the WebUI of this name and a checkpoint, before OneDiff is loaded. kind: the class of the Host, if
    not the usual one."""
    with on_path(*FOLDERS[name]), pytest.MonkeyPatch.context() as patch:
        host = (kind or CLASSES[name])(name)
        if name == "a1111":
            for change in host.module("modules.sd_hijack").changes():
                patch.setattr(*change)
        yield host
        if host.adapter is not None:
            host.adapter.stop()


def calls_of(work: Any) -> tuple[Any, dict[str, int]]:
    """The result of work(), and the number of UNet calls that took each route meanwhile."""
    before = runtime.status()["calls"]
    result = work()
    after = runtime.status()["calls"]
    return result, {route: after[route] - before[route] for route in after if after[route] != before[route]}
