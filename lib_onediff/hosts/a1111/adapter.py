"""Our forward in AUTOMATIC1111's WebUI, in place of ldm's and sgm's: above the WebUI's own patches, and below whatever
an extension sets on an instance (ControlNet)."""
from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.call import APART, OTHER_ROWS, Call, PromptRows, half_of
from ...core.key import LATENT_PIXEL
from ...core.origins import author
from ...core.refusal import Refusal
from ...core.sizes import TOKENS
from ...families.unet.call import UNetCall
from ...runtime.runtime import runtime
from ...weights.scan import HostTraits, own_method, refuse_global_hooks
from ...weights.snapshot import no_object
from ..changed_modules import ChangedModules, foreign_forward, forward_above, is_brought, replaced_method
from ..contract import BYPASSED, Need, WebUI, check_needs, random_state_kept
from ..hooks import ForwardPatches, UNetHooks, VaeHooks, serve_call
from ..sampler_schedule import sampling_of
from .layers import CASTS, NOTED, SYNCED, WRITTEN, LorasOnTheFly, apply_wanted_networks, check_layers, wanted_networks
from .patches import TRUSTED, does_nothing_now, patches_of, replaced_concatenation

UNET_MODULES = ("ldm.modules.diffusionmodules.openaimodel", "sgm.modules.diffusionmodules.openaimodel")
VAE_MODULES = ("ldm.modules.diffusionmodules.model", "sgm.modules.diffusionmodules.model")
# Undoing an attention optimisation, the WebUI gives sgm's VAE the attention of ldm's: the same one.
# Its decoders note the latent's shape at every decode.
VAE_TRAITS = HostTraits(
    (*TRUSTED, "ldm.modules.diffusionmodules.model"), written=frozenset({"last_z_shape"}), synced=SYNCED,
)
NEEDS = (
    # The WebUI's own patch, modules.sd_unet's, stands there: it hands on what follows the context as it comes.
    *(Need(module, "UNetModel.forward", ("x", "timesteps", "context")) for module in UNET_MODULES),
    *(Need(module, "TimestepEmbedSequential.forward") for module in UNET_MODULES),
    *(Need(module, "Decoder.forward", ("z",)) for module in VAE_MODULES),
    *(Need(module, "Encoder.forward", ("x",)) for module in VAE_MODULES),
    Need("modules.sd_hijack_unet", "th"), Need("modules.sd_unet", "current_unet"),
    Need("modules.shared", "loaded_hypernetworks"), Need("modules.sd_models", "model_data"),
    Need("modules.call_queue", "queue_lock"), Need("modules.devices", "autocast"),
    Need("modules.lowvram", "module_in_gpu"), Need("modules.lowvram", "send_everything_to_cpu"),
)
# Why the prompt's rows of a call are not known.
NO_STEP = "the WebUI's denoiser does not make this call"
SEVERAL_PROMPTS = "AND joins several prompts"
OTHER_PROMPTS = "an extension calls with other prompts than the WebUI's denoiser"


def release() -> str:
    """ "A1111 v1.10.1", as git or the changelog tells."""
    launch: Any = sys.modules.get("modules.launch_utils")
    tag = launch.git_tag() if hasattr(launch, "git_tag") else ""
    return f"A1111 {tag}".strip()


class A1111(WebUI):
    """The adapter; see contract.WebUI."""

    name = "a1111"
    # SD3 and others have these too, and are told apart by their network.
    checkpoint_paths = ("model", "first_stage_model", "apply_model")

    def __init__(self, release: str) -> None:
        """Raises Refusal for a release that lacks something."""
        check_needs(release, NEEDS)
        super().__init__(release)
        modules = [importlib.import_module(name) for name in UNET_MODULES]
        self.network_classes = tuple(module.UNetModel for module in modules)
        self._unets = UNetHooks(self.network_classes, self._forward, self._why_bypassed)
        self._changed = ChangedModules(does_nothing_now)
        stages = [module.TimestepEmbedSequential for module in modules]
        self._stages = ForwardPatches(stages, self._stage, "the UNet's blocks", lambda stage, reason: None)
        # The UNet of the sampling in progress.
        self._unet: Callable[[], Any] = no_object
        self._host_traits = HostTraits(
            TRUSTED, does_nothing_now, apply_wanted_networks, wanted_networks, brought=is_brought, casts=CASTS,
            functions=LorasOnTheFly(), movers=("modules.lowvram",), written=WRITTEN,
            placed=NOTED, synced=SYNCED,
        )
        modules = [importlib.import_module(name) for name in VAE_MODULES]
        parts = [part for module in modules for part in (module.Decoder, module.Encoder)]
        self._vae = VaeHooks(parts, VAE_TRAITS, upcasts=upcasts_attention)
        self.patches = self._unets, self._stages, self._vae
        # The host's CFGDenoiserParams, which live as long as the step; other callbacks may change them.
        self._step: Callable[[], Any] = no_object

    def loads_at_start(self) -> bool:
        from modules import shared

        return not getattr(shared.cmd_opts, "skip_load_model_at_start", False)

    def network(self, checkpoint: Any) -> Any:
        return getattr(getattr(checkpoint, "model", None), "diffusion_model", None)

    def host_traits(self, unet: Any) -> HostTraits:
        return self._host_traits

    def before_sampling(self, p: Any) -> None:
        self._vae.begin_run(getattr(getattr(p.sd_model, "first_stage_model", None), "decoder", None))
        unet = self.adopt(p.sd_model)
        self._unets.begin_sampling(p, unet)
        if unet is None:
            return
        if "forward" in unet.__dict__ and own_method(unet, "forward") is None:
            # ControlNet puts back what it found: while OneDiff was off, that led past our hook.
            del unet.forward
        self._changed.look_again(unet)
        runtime.begin_sampling(unet, sampling_of(p))
        self._unet = weakref.ref(unet)

    def before_step(self, params: Any) -> None:
        self._step = weakref.ref(params)

    def _why_bypassed(self) -> str:
        checkpoint = self.checkpoint()
        unet = self.unet_of(checkpoint)
        if unet is None:
            return BYPASSED
        owner = forward_above(unet, [patch.function for patch in self._unets.patches])
        owner = owner or replaced_method(checkpoint.model, "forward") or replaced_method(checkpoint, "apply_model")
        return BYPASSED if owner is None else f"{owner} runs the UNet past OneDiff's hook"

    # --- one call -------------------------------------------------------------------------------------------------

    def _forward(
        self, original: Callable[..., Tensor], unet: nn.Module, x: Tensor, timesteps: Any = None, context: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Tensor:
        """Stands in for UNetModel.forward(self, x, timesteps=None, context=None, y=None, **kwargs)."""
        host = lambda: original(unet, x, timesteps, context, *args, **kwargs)  # noqa: E731
        owner, y = foreign_forward(unet), args[0] if args else kwargs.get("y")
        if owner is not None and unet is self._unet():
            # The owner calls this from its own forward, as ControlNet's reference does, and calls the stages itself.
            return runtime.pressure.run_host(host)

        def read() -> Call:
            tensors = (x, timesteps, context) if y is None else (x, timesteps, context, y)
            if not all(isinstance(one, Tensor) for one in tensors):
                raise Refusal("the latent, the timestep, the context or y is no tensor")
            if len(args) > 1 or any(value is not None for name, value in kwargs.items() if name != "y"):
                names = ", ".join(sorted(kwargs)) or "by position"
                raise Refusal(f"the UNet is called with arguments that OneDiff does not know ({names})")
            self._unets.refuse_derived(unet)
            self._check_state(unet)
            if owner is not None:
                raise Refusal(f"{owner} calls the UNet from a forward of its own")
            patches = patches_of(self._changed.at_call(unet), replaced_concatenation())
            return UNetCall(x, timesteps, context, y, upcast_attention=upcasts_attention(), patches=patches)

        def prompt_rows() -> PromptRows:
            rows = rows_of_prompts(self._step(), context)
            label = None if y is None else y[rows]
            return PromptRows(rows, lambda: original(unet, x[rows], timesteps[rows], context[rows], y=label))

        return serve_call(unet, read, host, prompt_rows, self._host_traits)

    def _stage(self, original: Callable[..., Tensor], stage: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Stands in for TimestepEmbedSequential.forward: an extension that calls the stages itself, as
        sd-webui-controlnet does, calls no forward of the UNet's class. Its loops are logged and counted."""
        unet = self._unet()
        if unet is not None and stage is unet.input_blocks[0]:
            owner = foreign_forward(unet)
            if owner is not None:
                runtime.note_host(f"{owner} runs the UNet's loop itself", unet)
        return runtime.pressure.run_host(lambda: original(stage, *args, **kwargs))

    def _check_state(self, unet: nn.Module) -> None:
        """Raise Refusal where the calls of this UNet are not ours now. Microseconds."""
        from modules import lowvram, sd_hijack_unet, sd_unet, shared

        if self.unmet is not None:
            raise Refusal(self.unmet)
        if sd_unet.current_unet is not None:
            raise Refusal(f"the UNet of {author(sd_unet.current_unet)} is active (Settings, SD Unet)")
        if shared.loaded_hypernetworks:
            raise Refusal("a hypernetwork changes the attention")
        functions = getattr(sys.modules[type(unet).__module__], "th", None)
        if functions is not sd_hijack_unet.th:
            raise Refusal(f"the UNet's torch functions were replaced by {author(functions)}")
        refuse_global_hooks()
        if shared.cmd_opts.lowvram and lowvram.module_in_gpu is not None:
            # What the first layer's own hook would do: another network may be on the GPU, or a layer of the last call.
            lowvram.send_everything_to_cpu()
        check_layers()

    # --- calls between images -------------------------------------------------------------------------------------

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        from modules import devices

        autocast = devices.without_autocast if devices.unet_needs_upcast else devices.autocast
        noise = lambda *shape: torch.randn(shape, dtype=devices.dtype, device=devices.device)  # noqa: E731
        with random_state_kept(), torch.no_grad(), autocast():
            call = self.call_to_warm(width, height, batch, tokens, noise)
            context, *labels = call.prompt
            prompt = {"crossattn": context, "vector": labels[0]} if labels else {"c_crossattn": [context]}
            # An inpainting model's latent has the masked image's beside it.
            latent, beside = call.latent[:, :4], call.latent[:, 4:]
            self.checkpoint().apply_model(latent, call.timestep, {**prompt, "c_concat": [beside]})

    def warm_decode(self, width: int, height: int, images: int) -> None:
        from modules import devices, sd_samplers_common

        with random_state_kept(), torch.no_grad():
            # One image after the other, however many there are.
            shape = 1, 4, height // LATENT_PIXEL, width // LATENT_PIXEL
            latent = torch.randn(shape, dtype=devices.dtype_vae, device=devices.device)
            sd_samplers_common.decode_first_stage(self.checkpoint(), latent)

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        from modules import shared

        # As CFGDenoiser.forward: the prompt's half alone where the guidance is skipped, and each half by itself where
        # their lengths differ; then the shorter one is most often a negative prompt of ordinary length.
        both = ((2 * images, tokens),) if shared.opts.batch_cond_uncond else ()
        padded = shared.opts.pad_cond_uncond or shared.opts.pad_cond_uncond_v0
        shorter = ((images, TOKENS),) if tokens != TOKENS and not padded else ()
        return (*both, (images, tokens), *shorter)


def upcasts_attention() -> bool:
    from modules import shared

    return bool(shared.opts.upcast_attn)


def rows_of_prompts(step: Any, context: Tensor) -> slice:
    """The prompts' rows of a call with this context, (batch, tokens, width). Raises Refusal where they are not
    known. step: the host's CFGDenoiserParams; None outside of a step.

    CFGDenoiser puts the prompts' rows first and the negative prompts' last, one of each for an image unless AND joins
    several prompts. Skipping the negative prompt (NGMS), calling for each by itself, and edit models with three rows an
    image come after it has told of its step, so the call itself has to fit.
    """
    if step is None:
        raise Refusal(NO_STEP)
    # SDXL's are dictionaries with the labels beside them.
    prompt, negative = (
        cond["crossattn"] if isinstance(cond, dict) else cond for cond in (step.text_cond, step.text_uncond)
    )
    images, batch = negative.shape[0], context.shape[0]
    if prompt.shape[0] != images:
        raise Refusal(SEVERAL_PROMPTS if batch != images else APART)
    if batch != 2 * images:
        raise Refusal(APART if batch == images else OTHER_ROWS)
    # Which waits for the GPU, as reading the timestep has.
    if not begins_with(context[:images], prompt) or not begins_with(context[images:], negative):
        raise Refusal(OTHER_PROMPTS)
    return half_of(batch, is_first=True)


def begins_with(context: Tensor, prompt: Tensor) -> bool:
    """Whether these rows are a prompt's, which the host may have made longer, or cut, to the other one's length."""
    tokens = min(context.shape[1], prompt.shape[1])
    return torch.equal(context[:, :tokens], prompt[:, :tokens].to(context.device, context.dtype))
