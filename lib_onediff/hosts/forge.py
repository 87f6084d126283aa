"""Forge: our forward stands as the forward of every UNet that it loads."""
from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerator import runtime
from ..journal import HOST
from ..unet.foreign import Habits, origin
from ..unet.weights import shares_storage
from . import forge_warm, sampler_schedule
from .forge_hook import ForgeForward, Service, is_foreign, is_ours, loaded_model, own_forward, replaced_vae_helper
from .ldm_decoder import DecoderPatches
from .webui import CannotWarm, Result, network_name

UNET_CLASS = "IntegratedUNet2DConditionModel"
# By this key other extensions replace a UNet's forward through Forge's model patcher.
FORWARD_PATCH = "diffusion_model.forward"
HABITS = Habits(by_content=True)
VAE_MODULE = "backend.nn.vae"


class Announced(NamedTuple):
    """A sampling that the host has announced: how many calls service had seen before it, and of which pass it is."""

    service: Service
    calls: int
    is_second_pass: bool


class Forge:
    """hosts.webui.WebUI for Forge.

    The hook is an attribute of the UNet, not an object patch of its patcher: whenever Forge exchanges one patcher for
    another it takes the patches off, and with them any forward that another extension has set over ours.
    """

    name = "forge"

    def __init__(self) -> None:
        self._service: Service | None = None
        # A UNet, and the module around it that Forge's patchers work on.
        self._unets: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        self._announced: Announced | None = None
        vae = importlib.import_module(VAE_MODULE)
        self._vae = DecoderPatches([vae.Decoder, vae.Encoder], Habits(), replaced_vae_helper)
        # Pictures are made on one thread, settings and reloads come on others.
        self._lock = threading.RLock()

    # --- in and out -----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        with self._lock:
            if self._service is None:
                self._service = Service()
            self._vae.serve()
            self._hook(loaded_engine())

    def stop(self) -> None:
        with self._lock:
            service, self._service, self._announced = self._service, None, None
            if service is not None:
                service.active = False
            self._vae.stop()
            for unet, model_reference in list(self._unets.items()):
                unhook(unet)
                runtime.release(unet)
                model = model_reference()
                if model is not None:
                    release_originals(model)
            self._unets.clear()

    def hooks(self) -> int:
        unet = unet_of(loaded_engine())
        return 0 if unet is None else len({id(forward) for forward in forwards_on(unet) if is_ours(forward)})

    def model_loaded(self, sd_model: Any) -> None:
        self._hook(sd_model)

    def _hook(self, engine: Any) -> None:
        """Put our forward on a checkpoint's UNet, unless somebody else's stands there (it may lead to ours)."""
        unet = unet_of(engine)
        if unet is None:
            return
        with self._lock:
            if self._service is None:
                return
            if unet not in self._unets:
                self._unets[unet] = weakref.ref(engine.forge_objects.unet.model)
                runtime.adopt(unet, habits=HABITS)
            if not any(is_ours(forward) and forward.service is self._service for forward in forwards_on(unet)):
                put_on(unet, ForgeForward(unet, self._service))

    # --- a generation ---------------------------------------------------------------------------------------------

    def before_sampling(self, p: Any) -> None:
        service = self._service
        if service is None:
            return
        self._vae.begin_run(decoder_of(p.sd_model))
        is_second_pass = bool(getattr(p, "is_hr_pass", False))
        # Forge announces the second pass of hires fix twice.
        if not (self._announced and self._announced.is_second_pass and is_second_pass):
            self._settle()
        self._hook(p.sd_model)
        service.samplings += 1
        service.sampling = sampler_schedule.sampling_of(p)
        if unet_of(p.sd_model) is not None:
            self._announced = Announced(service, service.calls, is_second_pass)

    def after_run(self, p: Any) -> None:
        self._vae.end_run()
        self._settle()

    def _settle(self) -> None:
        """Say so if the sampling that was announced went past us."""
        announced, self._announced = self._announced, None
        if announced is None or announced.service is not self._service:
            return
        if announced.service.calls == announced.calls and not was_interrupted():
            runtime.note_host(why_bypassed(loaded_engine()))

    # --- what users ask -------------------------------------------------------------------------------------------

    def data_folder(self) -> Path:
        from modules import paths

        return Path(paths.data_path)

    def why_not_served(self) -> str | None:
        engine = loaded_engine()
        if engine is None or unet_of(engine) is not None:
            return None
        kind = type(engine.forge_objects.unet.model.diffusion_model).__name__
        return f"this checkpoint's network is a {kind}; OneDiff serves the UNets of SD1, SD2 and SDXL"

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        service = self._service
        if service is None:
            raise CannotWarm("OneDiff is not in use")
        engine = forge_warm.selected_engine()
        if unet_of(engine) is None:
            raise CannotWarm(self.why_not_served() or "no UNet is loaded")
        self._hook(engine)
        service.samplings += 1
        calls = service.calls
        try:
            forge_warm.one_call(engine.forge_objects_after_applying_lora.unet, width, height, batch, tokens)
        except torch.cuda.OutOfMemoryError as error:
            runtime.free_graphs()
            raise CannotWarm(f"not enough GPU memory for {width}x{height} with {batch} latents") from error
        if service.calls == calls:
            raise CannotWarm(why_bypassed(engine) if service.active else "OneDiff is not in use")
        status = runtime.status()
        if status["route"] == HOST:
            raise CannotWarm(status["reason"])

    def warm_decode(self, width: int, height: int, pictures: int) -> None:
        forge_warm.one_decode(loaded_engine(), width, height, pictures)

    def call_shapes(self, pictures: int, tokens: int) -> tuple[tuple[int, int], ...]:
        # Prompts of different lengths are repeated to a common one; without guidance there is only the prompt's half.
        return (2 * pictures, tokens), (pictures, tokens)

    def model_name(self, sd_model: Any = None) -> str | None:
        return network_name(unet_of(loaded_engine() if sd_model is None else sd_model))

    def exclusively(self, work: Callable[[], Result]) -> Result:
        return forge_warm.exclusively(work)


def loaded_engine() -> Any:
    """The loaded checkpoint; None before the first, for which Forge keeps a placeholder."""
    from modules import sd_models

    engine = sd_models.model_data.sd_model
    return engine if getattr(engine, "forge_objects", None) is not None else None


def unet_of(engine: Any) -> nn.Module | None:
    """The checkpoint's UNet if it is of the kind that we serve."""
    objects = getattr(engine, "forge_objects", None)
    unet = None if objects is None else getattr(objects.unet.model, "diffusion_model", None)
    return unet if type(unet).__name__ == UNET_CLASS else None


def decoder_of(engine: Any) -> nn.Module | None:
    """The decoder of the checkpoint's VAE."""
    vae = getattr(getattr(engine, "forge_objects", None), "vae", None)
    return getattr(getattr(vae, "first_stage_model", None), "decoder", None)


def forwards_on(unet: nn.Module) -> list[Any]:
    """What stands as a UNet's forward, and what Forge will put back there when it takes off an object patch."""
    loaded = loaded_model(unet)
    kept = None if loaded is None else loaded.model.object_patches_backup.get(FORWARD_PATCH)
    return [unet.__dict__.get("forward"), kept]


def put_on(unet: nn.Module, hook: ForgeForward) -> None:
    """Let the hook stand as the UNet's forward, or beneath an object patch of somebody else's."""
    standing, loaded = unet.__dict__.get("forward"), loaded_model(unet)
    if not is_foreign(unet, standing):
        unet.__dict__["forward"] = hook
    elif loaded is not None and loaded.model.object_patches.get(FORWARD_PATCH) is standing:
        beneath = loaded.model.object_patches_backup
        if not is_foreign(unet, beneath.get(FORWARD_PATCH)):
            beneath[FORWARD_PATCH] = hook  # Forge puts it back when it takes off the other's patch.


def unhook(unet: nn.Module) -> None:
    if is_ours(unet.__dict__.get("forward")):
        del unet.__dict__["forward"]
    loaded = loaded_model(unet)
    if loaded is not None and is_ours(loaded.model.object_patches_backup.get(FORWARD_PATCH)):
        loaded.model.object_patches_backup[FORWARD_PATCH] = own_forward(unet)


def release_originals(model: Any) -> None:
    """Give what Forge has put aside under a merged LoRA storages of its own again, as runtime.release does the rest."""
    for parameter in list(model.lora_loader.backup.values()):
        if isinstance(parameter, nn.Parameter) and shares_storage(parameter):
            with torch.inference_mode(parameter.is_inference()):
                parameter.data = parameter.detach().clone()


def was_interrupted() -> bool:
    from modules.shared import state

    return bool(state.interrupted or state.skipped or state.stopping_generation)


def why_bypassed(engine: Any) -> str:
    """Who made a picture without our forward, in one line for the user."""
    unet = unet_of(engine)
    standing = None if unet is None else unet.__dict__.get("forward")
    if unet is not None and is_foreign(unet, standing):
        return f"another extension has replaced the UNet's forward ({origin(standing)})"
    wrapper = None if engine is None else engine.forge_objects.unet.model_options.get("model_function_wrapper")
    if wrapper is not None:
        return f"another extension runs the UNet in its own way ({origin(wrapper)})"
    return "none of this picture's UNet calls came to OneDiff"
