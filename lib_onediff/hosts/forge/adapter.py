"""The Forge family: one class-level patch of the UNet's forward, and of the VAE's Decoder and Encoder.

A class-level patch lies below whatever another extension sets on a UNet (an object patch, a forward of its own), serves
every UNet (the refiner's too), and leaves no attribute on the host's objects.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.sampling import Sampling
from ...model.call import UNetCall
from ...model.fused_storage import shares_storage
from ...model.patches import HostTraits, origin
from ...model.rows import PromptRows
from ...model.weight_functions import Casts
from ...prewarm.job import CannotWarm
from ...runtime.call_stats import HOST
from ...runtime.runtime import runtime
from ...weak_dictionary import WeakDictionary
from .. import sampler_schedule
from ..changed_modules import ChangedModules, is_block_or_attention
from ..class_patch import ClassPatch
from ..contract import why_unknown
from ..ldm_decoder import DecoderPatches
from ..webui import Result, WebUI, network_name
from . import checks, warm
from .additions import Additions, AdditionsReader
from .call import copied_lists, unet_call
from .guidance import control_of_prompt, options_of_prompt, prompt_rows
from .patches import OwnForwards
from .traits import ENGINE_PATHS, FORGE, Traits
from .weight_functions import LayerFunctions, cast_to_input


class Announced(NamedTuple):
    """A sampling that the host has announced: in which generation, of which pass it is, and how many calls we had seen
    before it."""

    generation: int
    is_second_pass: bool
    calls: int


class Look(NamedTuple):
    """What was found out about a UNet in a sampling. refusal: why it is the host's, or None."""

    sampling: int
    refusal: str | None


class Forge(WebUI):
    """hosts.webui.WebUI for Forge and Forge Neo."""

    traits: Traits = FORGE

    def __init__(self) -> None:
        traits = self.traits
        self.name, self.release = traits.name, traits.release()
        unet_class = getattr(traits.module(traits.unet), traits.unet_class)
        self._patch = ClassPatch(
            unet_class, "forward", self._forward, runtime.guard, "the UNet's forward",
            lambda unet, reason: runtime.note_host(reason, unet),
        )
        vae = traits.module(traits.vae)
        self._vae = DecoderPatches(
            [vae.Decoder, vae.Encoder], HostTraits(), lambda decoder: checks.replaced_vae_helper(traits, decoder)
        )
        self._host_traits = HostTraits(
            yardstick=lambda host: checks.with_exact_attention(traits, host),
            functions=LayerFunctions(), casts=Casts(cast_to_input),
            brought=lambda unet, module: is_block_or_attention(module),
            keeps_weights=lambda unet: f"Low-bit only is not for {traits.release()}, which moves the weights itself",
        )
        self._own_forwards = ChangedModules(OwnForwards.of)
        self._helpers = checks.Helpers(traits)
        self._additions: WeakDictionary[nn.Module, AdditionsReader] = WeakDictionary()
        self._names_read = checks.names_read_by(traits.module(traits.unet), traits.module(traits.attention))
        self._looks: weakref.WeakKeyDictionary[nn.Module, Look] = weakref.WeakKeyDictionary()
        self._calls = self._samplings = 0
        self._sampling = Sampling()
        self._announced: Announced | None = None
        self._unmet: str | None = None
        # Images are made on one thread, settings and reloads come on others.
        self._lock = threading.RLock()

    # --- in and out -----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        with self._lock:
            self._patch.apply()
            self._vae.serve()
            if loaded_engine() is not None:
                self.model_loaded(loaded_engine())

    def stop(self) -> None:
        with self._lock:
            self._patch.undo()
            self._announced = None
            runtime.guard.attempt("switching the VAE off", self._vae.stop)
            runtime.guard.attempt("giving the UNets back", runtime.release_all)
            for weight in originals_beneath_loras(loaded_engine()):
                give_storage_of_its_own(weight)
            self._looks.clear()

    def hooks(self) -> int:
        return self._patch.count()

    def model_loaded(self, sd_model: Any) -> None:
        self._unmet = why_unknown(self.release, sd_model, ENGINE_PATHS)
        unet = unet_of(sd_model, self.traits)
        if unet is not None and self._patch.active:
            runtime.adopt(unet, host_traits=self._host_traits)

    # --- a generation ---------------------------------------------------------------------------------------------

    def before_sampling(self, p: Any) -> None:
        if not self._patch.active:
            return
        self._patch.keep_out_of_traces()
        self._vae.begin_run(decoder_of(p.sd_model))
        is_second_pass = bool(getattr(p, "is_hr_pass", False))
        announced, generation = self._announced, runtime.guard.generation
        # The host tells no end of a generation that has failed, and of its last sampling nothing is known.
        if announced and announced.generation != generation:
            self._announced = None
        # Forge announces the second pass of hires fix twice.
        elif not (announced and announced.is_second_pass and is_second_pass):
            self._note_bypass()
        self._samplings += 1
        self._sampling = sampler_schedule.sampling_of(p)
        unet = unet_of(p.sd_model, self.traits)
        if unet is not None:
            runtime.adopt(unet, host_traits=self._host_traits)
            self._announced = Announced(generation, is_second_pass, self._calls)

    def after_run(self, p: Any) -> None:
        self._vae.end_run()
        runtime.end_sampling()
        self._note_bypass()

    def _note_bypass(self) -> None:
        """Say so if the sampling that was announced went past us."""
        announced, self._announced = self._announced, None
        bypassed = announced is not None and announced.calls == self._calls and not runtime.guard.suspended
        if bypassed and not was_interrupted():
            runtime.note_host(why_bypassed(loaded_engine(), self.traits))

    # --- one call -------------------------------------------------------------------------------------------------

    def _forward(
        self, original: Callable[..., Tensor], unet: nn.Module, x: Tensor, timesteps: Any = None, context: Any = None,
        y: Tensor | None = None, control: Any = None, transformer_options: Any = None, **others: Any,
    ) -> Tensor:
        """Stands in for the UNet's forward(self, x, timesteps, context, y, control, transformer_options, **others)."""
        options = {} if transformer_options is None else transformer_options

        def host() -> Tensor:
            return original(
                unet, x, timesteps, context=context, y=y, control=copied_lists(control), transformer_options=options,
                **others,
            )

        def guidance() -> PromptRows | str:
            rows, batch = prompt_rows(x, options), x.shape[0]
            if isinstance(rows, str):
                return rows
            return PromptRows(rows, lambda: original(
                unet, x[rows], timesteps[rows], context=context[rows], y=None if y is None else y[rows],
                control=control_of_prompt(control, rows, batch), transformer_options=options_of_prompt(
                    options, rows, batch
                ), **others,
            ))

        self._calls += 1
        call: UNetCall | str | None = self._look(unet) or self._helpers.replaced()
        if call is None:
            own = self._own_forwards.at_call(unet)
            # The host calls a module with a forward of its own in another way than our additions would.
            additions = Additions() if own is not None else self._additions_of(unet).read(unet, options, x)
            call = unet_call(
                unet, x, timesteps, context, y, control, options, checks.upcasts_attention(self.traits, x.dtype),
                self._names_read, others, additions, own,
            )
        if isinstance(call, str):
            runtime.note_host(call, unet)
            return runtime.pressure.run_host(host)
        return runtime.run(unet, call, host, guidance=guidance)

    def _additions_of(self, unet: nn.Module) -> AdditionsReader:
        found = self._additions.get(unet)
        if found is None:
            found = self._additions[unet] = AdditionsReader()
        return found

    def _look(self, unet: nn.Module) -> str | None:
        """Why this UNet is the host's in this sampling, or None; looked at once a sampling."""
        look = self._looks.get(unet)
        if look is None or look.sampling != self._samplings:
            refusal = self._unmet or checks.why_not_unet(unet, self._patch.original)
            look = self._looks[unet] = Look(self._samplings, refusal)
            self._own_forwards.forget(unet)
            runtime.adopt(unet, host_traits=self._host_traits)
            runtime.begin_sampling(unet, self._sampling)
        return look.refusal

    # --- what users ask -------------------------------------------------------------------------------------------

    def why_not_served(self) -> str | None:
        engine = loaded_engine()
        if self._unmet is not None or engine is None or unet_of(engine, self.traits) is not None:
            return self._unmet
        kind = type(getattr(engine.forge_objects.unet.model, "diffusion_model", None)).__name__
        return f"this checkpoint's network is a {kind}; OneDiff serves the UNets of SD1, SD2 and SDXL"

    def notes(self) -> list[str]:
        if not self._patch.active:
            return []
        unused = checks.unused_attention(self.traits)
        said = [] if unused is None else [
            f"{unused}, chosen for the WebUI, is not used where OneDiff runs the UNet: OneDiff uses the fastest exact "
            "attention of this GPU."
        ]
        engine = loaded_engine()
        model = None if engine is None else engine.forge_objects.unet.model
        if getattr(model, "_torch_compile_config", None) is not None:
            said.append("The WebUI's Torch Compile is on for this checkpoint: OneDiff runs the UNet instead of it.")
        return said

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        if not self._patch.active:
            raise CannotWarm("OneDiff is not in use")
        engine = warm.selected_engine(self.traits)
        unet = unet_of(engine, self.traits)
        if unet is None:
            raise CannotWarm(self.why_not_served() or "no UNet is loaded")
        runtime.adopt(unet, host_traits=self._host_traits)
        self._samplings += 1
        self._sampling = Sampling()
        calls = self._calls
        try:
            warm.one_call(self.traits, patcher_with_loras(engine), width, height, batch, tokens)
        except torch.cuda.OutOfMemoryError as error:
            runtime.free_graphs()
            raise CannotWarm(f"not enough GPU memory for {width}x{height} with {batch} latents") from error
        if self._calls == calls:
            raise CannotWarm(
                why_bypassed(engine, self.traits) if self._patch.active else "OneDiff is not in use"
            )
        status = runtime.status()
        if status["route"] == HOST:
            raise CannotWarm(status["reason"])

    def warm_decode(self, width: int, height: int, images: int) -> None:
        warm.one_decode(self.traits, loaded_engine(), width, height, images)

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        # Prompts of different lengths are repeated to a common one; without guidance there is only the prompt's half.
        return (2 * images, tokens), (images, tokens)

    def model_name(self, sd_model: Any = None) -> str | None:
        return network_name(unet_of(loaded_engine() if sd_model is None else sd_model, self.traits))

    def exclusively(self, work: Callable[[], Result]) -> Result:
        return warm.exclusively(work)


def loaded_engine() -> Any:
    """The loaded checkpoint; None before the first, for which Forge keeps a placeholder, and where none could be loaded
    after Classic had thrown the one before away."""
    from modules import sd_models

    engine = getattr(sd_models.model_data, "sd_model", None)
    return engine if getattr(engine, "forge_objects", None) is not None else None


def patcher_with_loras(engine: Any) -> Any:
    """The UNet's patcher with the last generation's LoRAs; Classic keeps none where there were no LoRAs."""
    return (engine.forge_objects_after_applying_lora or engine.forge_objects_original).unet


def unet_of(engine: Any, traits: Traits) -> nn.Module | None:
    """The checkpoint's UNet if it is of the kind that we serve."""
    patcher = getattr(getattr(engine, "forge_objects", None), "unet", None)
    unet = getattr(getattr(patcher, "model", None), "diffusion_model", None)
    return unet if type(unet).__name__ == traits.unet_class else None


def decoder_of(engine: Any) -> nn.Module | None:
    """The decoder of the checkpoint's VAE."""
    vae = getattr(getattr(engine, "forge_objects", None), "vae", None)
    return getattr(getattr(vae, "first_stage_model", None), "decoder", None)


def originals_beneath_loras(engine: Any) -> Iterator[Tensor]:
    """What the host has put aside under a merged LoRA: Forge in its loader, others in the patcher; Classic as mere
    tensors."""
    patcher = getattr(getattr(engine, "forge_objects", None), "unet", None)
    for holder in (getattr(getattr(patcher, "model", None), "lora_loader", None), patcher):
        backup = getattr(holder, "backup", None)
        for kept in list(backup.values()) if isinstance(backup, dict) else ():
            weight = getattr(kept, "weight", kept)
            if isinstance(weight, Tensor):
                yield weight


def give_storage_of_its_own(weight: Tensor) -> None:
    """As runtime.release does for the parameters that stand in the UNet."""
    if shares_storage(weight):
        with torch.inference_mode(weight.is_inference()):
            weight.data = weight.detach().clone()


def was_interrupted() -> bool:
    from modules.shared import state

    return bool(state.interrupted or state.skipped or getattr(state, "stopping_generation", False))


def why_bypassed(engine: Any, traits: Traits) -> str:
    """Who made an image without our forward, in one line for the user."""
    unet = unet_of(engine, traits)
    standing = None if unet is None else unet.__dict__.get("forward")
    if unet is not None and standing is not None and getattr(standing, "__func__", None) is not type(unet).forward:
        return f"another extension has replaced the UNet's forward ({origin(standing)})"
    wrapper = None if engine is None else engine.forge_objects.unet.model_options.get("model_function_wrapper")
    if wrapper is not None:
        return f"another extension runs the UNet in its own way ({origin(wrapper)})"
    return "none of this generation's UNet calls came to OneDiff"
