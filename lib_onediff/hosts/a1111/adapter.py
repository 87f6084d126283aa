"""Our forward in AUTOMATIC1111's WebUI: one class-level patch of ldm's and of sgm's UNetModel.forward, and Decoder's.

A class-level patch lies below whatever another extension sets on the instance (ControlNet), and above the WebUI's own
patches. It serves every UNet: the loaded checkpoint's, the refiner's, the hires pass's.
"""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...model.call import UNetCall
from ...model.patches import HostTraits, own_method
from ...model.rows import PromptRows
from ...prewarm.job import TOKENS, CannotWarm
from ...runtime.runtime import runtime
from ...shapes.key import LATENT_PIXEL
from .. import sampler_schedule
from ..class_patch import ClassPatch
from ..contract import Need, why_unknown
from ..ldm_decoder import DecoderPatches
from ..webui import PROMPT_NOISE, WebUI, network_name, random_state_kept
from .casts import CASTS, why_cast_by_hand
from .concatenation import replaced_concatenation
from .controlnet_loop import HostLoop
from .guidance import DenoiserStep
from .inert import does_nothing_now, foreign_forward
from .lora import apply_wanted_networks, wanted_networks, why_functional
from .patches import ForeignModules, is_brought

UNET_MODULES = ("ldm.modules.diffusionmodules.openaimodel", "sgm.modules.diffusionmodules.openaimodel")
VAE_MODULES = ("ldm.modules.diffusionmodules.model", "sgm.modules.diffusionmodules.model")
# The WebUI's own patches of layer classes: lazy LoRA (synced before a call), attention and norm variants that
# compute the same, gradient checkpoints (not used here). Hypernetworks live among them and are asked for by name, and
# so is the manual cast of modules.devices.
TRUSTED = (
    "networks", "modules.devices", "modules.sd_hijack_optimizations", "modules.hypernetworks.hypernetwork",
    "modules.sd_hijack_utils", "modules.sd_hijack_checkpoint", "modules.sd_hijack_unet", "modules.sd_unet",
)
# Undoing an attention optimisation, the WebUI gives sgm's VAE the attention of ldm's: the same one.
TRUSTED_IN_VAE = (*TRUSTED, "ldm.modules.diffusionmodules.model")
MIDDLE_OF_THE_SCHEDULE = 500.0
NEEDS = (
    # The WebUI's own patch, modules.sd_unet's, stands there: it hands on what follows the context as it comes.
    *(Need(module, "UNetModel.forward", ("x", "timesteps", "context")) for module in UNET_MODULES),
    *(Need(module, "TimestepEmbedSequential.forward", ("x", "emb", "context")) for module in UNET_MODULES),
    *(Need(module, "Decoder.forward", ("z",)) for module in VAE_MODULES),
    *(Need(module, "Encoder.forward", ("x",)) for module in VAE_MODULES),
    Need("modules.sd_hijack_unet", "th"), Need("modules.sd_unet", "current_unet"),
    Need("modules.shared", "loaded_hypernetworks"), Need("modules.sd_models", "model_data"),
    Need("modules.call_queue", "queue_lock"), Need("modules.devices", "autocast"),
)
# What a loaded checkpoint must have; SD3 and others have it too, and are told apart by their network.
MODEL_PATHS = ("model", "first_stage_model", "apply_model")


def release() -> str:
    """ "A1111 v1.10.1", as git or the changelog tells."""
    launch: Any = sys.modules.get("modules.launch_utils")
    tag = launch.git_tag() if hasattr(launch, "git_tag") else ""
    return f"A1111 {tag}".strip()


class A1111(WebUI):
    """The adapter; see webui.WebUI."""

    name = "a1111"

    def __init__(self) -> None:
        self._unet_modules = [importlib.import_module(name) for name in UNET_MODULES]
        self.release = release()
        self._patches = [
            ClassPatch(
                module.UNetModel, "forward", self._forward, runtime.guard, "the UNet's forward",
                lambda unet, reason: runtime.note_host(reason, unet),
            )
            for module in self._unet_modules
        ]
        self._foreign = ForeignModules(replaced_concatenation)
        self._loop = HostLoop(
            [module.TimestepEmbedSequential for module in self._unet_modules], self._foreign, self._why_host,
            upcasts_attention,
        )
        self._host_traits = HostTraits(
            TRUSTED, does_nothing_now, apply_wanted_networks, wanted_networks, brought=is_brought,
            casts=CASTS,
        )
        modules = [importlib.import_module(name) for name in VAE_MODULES]
        parts = [part for module in modules for part in (module.Decoder, module.Encoder)]
        self._vae = DecoderPatches(parts, HostTraits(TRUSTED_IN_VAE), upcasts=upcasts_attention)
        self._step = DenoiserStep()
        self._calls_before: int | None = None
        self._unmet: str | None = None

    def serve(self) -> None:
        for patch in self._patches:
            patch.apply()
        self._loop.serve()
        self._vae.serve()

    def stop(self) -> None:
        for patch in self._patches:
            patch.undo()
        self._loop.stop()
        runtime.guard.attempt("switching the VAE off", self._vae.stop)
        runtime.guard.attempt("giving the UNets back", runtime.release_all)

    def hooks(self) -> int:
        return max(patch.count() for patch in (*self._patches, *self._vae.patches))

    def loads_at_start(self) -> bool:
        from modules import shared

        return not getattr(shared.cmd_opts, "skip_load_model_at_start", False)

    def model_loaded(self, sd_model: Any) -> None:
        self._unmet = why_unknown(self.release, sd_model, MODEL_PATHS)
        unet = unet_of(sd_model)
        if unet is not None:
            runtime.adopt(unet, host_traits=self._host_traits)

    def before_sampling(self, p: Any) -> None:
        self._calls_before = runtime.call_stats.total
        self._vae.begin_run(getattr(getattr(p.sd_model, "first_stage_model", None), "decoder", None))
        unet = unet_of(p.sd_model)
        if unet is None:
            return
        if "forward" in unet.__dict__ and own_method(unet, "forward") is None:
            # ControlNet puts back what it found: while OneDiff was off, that led past our hook.
            del unet.forward
        runtime.adopt(unet, host_traits=self._host_traits)
        self._foreign.forget(unet)
        runtime.begin_sampling(unet, sampler_schedule.sampling_of(p))
        self._loop.watch(unet)

    def before_step(self, params: Any) -> None:
        self._step.note(params)

    def after_run(self, p: Any) -> None:
        from modules import shared

        bypassed = self._calls_before is not None and self._calls_before == runtime.call_stats.total
        if bypassed and not (shared.state.interrupted or shared.state.skipped):
            runtime.note_host("another extension runs the UNet past OneDiff's hook")
        self._calls_before = None
        runtime.end_sampling()
        self._vae.end_run()

    def why_not_served(self) -> str | None:
        from modules import sd_models

        model = sd_models.model_data.sd_model
        if self._unmet is not None or model is None or unet_of(model) is not None:
            return self._unmet
        return f"{type(model).__name__} has no UNet of the Stable Diffusion 1, 2 or XL kind"

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        from modules import devices, sd_models

        model = sd_models.model_data.sd_model
        unet = unet_of(model)
        if unet is None:
            raise CannotWarm(self.why_not_served() or "no checkpoint is loaded yet")
        runtime.adopt(unet, host_traits=self._host_traits)
        layout = runtime.layout_of(unet)
        noise = lambda *shape: torch.randn(shape, dtype=devices.dtype, device=devices.device)  # noqa: E731
        latent = noise(batch, 4, height // LATENT_PIXEL, width // LATENT_PIXEL)
        timestep = torch.full((batch,), MIDDLE_OF_THE_SCHEDULE, device=devices.device)
        context = PROMPT_NOISE * noise(batch, tokens, layout.context_width)
        extra = noise(batch, layout.in_channels - 4, height // LATENT_PIXEL, width // LATENT_PIXEL)
        autocast = devices.without_autocast if devices.unet_needs_upcast else devices.autocast
        with random_state_kept(), torch.no_grad(), autocast():
            if layout.label is None:
                model.apply_model(latent, timestep, {"c_crossattn": [context], "c_concat": [extra]})
            else:
                vector = PROMPT_NOISE * noise(batch, layout.y_width)
                model.apply_model(latent, timestep, {"crossattn": context, "vector": vector, "c_concat": [extra]})

    def warm_decode(self, width: int, height: int, images: int) -> None:
        from modules import devices, sd_models, sd_samplers_common

        with random_state_kept(), torch.no_grad():
            # One image after the other, however many there are.
            shape = 1, 4, height // LATENT_PIXEL, width // LATENT_PIXEL
            latent = torch.randn(shape, dtype=devices.dtype_vae, device=devices.device)
            sd_samplers_common.decode_first_stage(sd_models.model_data.sd_model, latent)

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        from modules import shared

        # As CFGDenoiser.forward: the prompt's half alone where the guidance is skipped, and each half by itself where
        # their lengths differ; then the shorter one is most often a negative prompt of ordinary length.
        both = ((2 * images, tokens),) if shared.opts.batch_cond_uncond else ()
        padded = shared.opts.pad_cond_uncond or shared.opts.pad_cond_uncond_v0
        shorter = ((images, TOKENS),) if tokens != TOKENS and not padded else ()
        return (*both, (images, tokens), *shorter)

    def model_name(self, sd_model: Any = None) -> str | None:
        from modules import sd_models

        return network_name(unet_of(sd_models.model_data.sd_model if sd_model is None else sd_model))

    def _forward(
        self, original: Callable[..., Tensor], unet: nn.Module, x: Tensor, timesteps: Any = None, context: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Tensor:
        """Stands in for UNetModel.forward(self, x, timesteps=None, context=None, y=None, **kwargs)."""
        host = lambda: original(unet, x, timesteps, context, *args, **kwargs)  # noqa: E731
        owner = foreign_forward(unet)
        if owner is not None and self._loop.watches(unet):
            # The owner calls this from its own forward, as ControlNet's reference does: the host's walk through the
            # stages, each of which is ours, and is counted.
            return runtime.pressure.run_host(host)
        reason = why_not_this_call(timesteps, context, args, kwargs) or self._why_host(unet)
        if reason is None and owner is not None:
            reason = f"{owner} calls the UNet from a forward of its own"
        if reason is not None:
            runtime.note_host(reason, unet)
            return runtime.pressure.run_host(host)
        y, patches = args[0] if args else kwargs.get("y"), self._foreign.at_call(unet)
        call = UNetCall(x, timesteps, context, y, upcast_attention=upcasts_attention(), patches=patches)

        def prompt_rows() -> PromptRows | str:
            rows = self._step.prompt_rows(call.context)
            if isinstance(rows, str):
                return rows
            label = None if y is None else y[rows]
            return PromptRows(rows, lambda: original(unet, x[rows], timesteps[rows], context[rows], y=label))

        return runtime.run(unet, call, host, self._host_traits, prompt_rows)

    def _why_host(self, unet: nn.Module) -> str | None:
        """Why the calls of this UNet and its stages are not ours now, in one line; None where nothing is known against
        it. Microseconds."""
        from modules import sd_hijack_unet, sd_unet, shared

        if self._unmet is not None:
            return self._unmet
        if sd_unet.current_unet is not None:
            return "another extension's UNet is active (Settings, SD Unet)"
        if shared.loaded_hypernetworks:
            return "a hypernetwork changes the attention"
        if getattr(sys.modules[type(unet).__module__], "th", None) is not sd_hijack_unet.th:
            return "an extension has replaced the UNet's torch functions"
        if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
            return "a forward hook is set on all modules"
        if shared.cmd_opts.lowvram and getattr(shared.sd_model, "lowvram", False):
            return "--lowvram moves the UNet's layers one at a time"
        functional = why_functional() if getattr(shared.opts, "lora_functional", False) else None
        return functional or why_cast_by_hand()


def why_not_this_call(timesteps: Any, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if not isinstance(timesteps, Tensor) or not isinstance(context, Tensor):
        return "the UNet is called without a timestep or a context"
    if len(args) > 1 or any(value is not None for name, value in kwargs.items() if name != "y"):
        return f"the UNet is called with more than we know ({', '.join(sorted(kwargs)) or 'by position'})"
    return None


def unet_of(sd_model: Any) -> nn.Module | None:
    """The UNetModel of a loaded checkpoint; None for SD3 and others that have none."""
    unet = getattr(getattr(sd_model, "model", None), "diffusion_model", None)
    return unet if type(unet).__name__ == "UNetModel" else None


def upcasts_attention() -> bool:
    from modules import shared

    return bool(shared.opts.upcast_attn)
