"""The adapter of AUTOMATIC1111's WebUI. Replaces the forwards of ldm's and sgm's classes, above the WebUI's own patches
and below forwards that extensions set on instances (ControlNet)."""
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
from ...core.refusal import Refusal, unsupported_inputs
from ...core.sizes import TOKENS
from ...families.unet.call import UNetCall
from ...runtime.runtime import runtime
from ...weights.scan import HostTraits, own_method, refuse_global_hooks
from ...weights.snapshot import no_object
from ..changed_modules import ChangedModules, foreign_forward, forward_above, is_brought, replaced_method
from ..contract import BYPASSED, Need, WebUI, check_needs, random_state_kept
from ..hooks import ForwardPatches, UNetHooks, VaeHooks, serve_call
from ..sampler_schedule import sampling_of
from .layers import CASTS, NOTED, SYNCED, WRITTEN, LorasOnTheFly, check_layers, merge_wanted_loras, wanted_loras
from .patches import TRUSTED, does_nothing_now, patches_of, replaced_concatenation

# The WebUI's Python modules with the classes of UNets, and of VAEs' decoders and encoders.
UNET_MODULES = ("ldm.modules.diffusionmodules.openaimodel", "sgm.modules.diffusionmodules.openaimodel")
VAE_MODULES = ("ldm.modules.diffusionmodules.model", "sgm.modules.diffusionmodules.model")
# ldm's module is trusted, because undoing an attention optimisation gives sgm's VAE the attention of ldm's, which is
# the same. Decoders write the latent's shape to last_z_shape.
VAE_TRAITS = HostTraits(
    (*TRUSTED, "ldm.modules.diffusionmodules.model"), written=frozenset({"last_z_shape"}), synced=SYNCED,
)
# What this adapter reads or replaces in the WebUI; a release that lacks one of these is refused (check_needs).
NEEDS = (
    # UNetModel.forward is the WebUI's own patch of modules.sd_unet, which passes on arguments after the context.
    *(Need(module, "UNetModel.forward", ("x", "timesteps", "context")) for module in UNET_MODULES),
    *(Need(module, "TimestepEmbedSequential.forward") for module in UNET_MODULES),
    *(Need(module, "Decoder.forward", ("z",)) for module in VAE_MODULES),
    *(Need(module, "Encoder.forward", ("x",)) for module in VAE_MODULES),
    Need("modules.sd_hijack_unet", "th"), Need("modules.sd_unet", "current_unet"),
    Need("modules.shared", "loaded_hypernetworks"), Need("modules.sd_models", "model_data"),
    Need("modules.call_queue", "queue_lock"), Need("modules.devices", "autocast"),
    Need("modules.lowvram", "module_in_gpu"), Need("modules.lowvram", "send_everything_to_cpu"),
)
# What git_tag of the WebUI returns if it finds no version.
NO_TAG = "<none>"
# Reasons for users why the prompt's rows of a call are unknown; core.call has two more (APART, OTHER_ROWS).
NO_STEP = "this step does not come from the WebUI's own sampling loop"
SEVERAL_PROMPTS = "AND joins several prompts"
OTHER_PROMPTS = "an extension replaces the WebUI's prompts in this step"


def release() -> str:
    """The WebUI's name and version for users: "A1111 v1.10.1" from git, or "A1111 1.10.1" from the changelog. "A1111"
    alone if neither has a version, or the WebUI has no git_tag()."""
    launch: Any = sys.modules.get("modules.launch_utils")
    tag = launch.git_tag() if hasattr(launch, "git_tag") else NO_TAG
    return "A1111" if tag == NO_TAG else f"A1111 {tag}"


class A1111(WebUI):
    """The adapter of AUTOMATIC1111's WebUI. contract.WebUI describes all attributes and methods."""

    name = "a1111"
    # Checkpoints of SD3 and others have these too; network_classes decides.
    checkpoint_paths = ("model", "first_stage_model", "apply_model")

    def __init__(self, release: str) -> None:
        """release: see release(). Raises Refusal, with the reason for users, if this release lacks something that
        OneDiff needs. Nothing is patched yet."""
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
            TRUSTED, does_nothing_now, merge_wanted_loras, wanted_loras, brought=is_brought, casts=CASTS,
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
        """Whether the WebUI loads a checkpoint when it starts, rather than with the first image: unless the user has
        set --skip-load-model-at-start."""
        from modules import shared

        return not getattr(shared.cmd_opts, "skip_load_model_at_start", False)

    def network(self, checkpoint: Any) -> Any:
        """The UNet of a checkpoint, or the network in its place, of any class; None if it has none."""
        return getattr(getattr(checkpoint, "model", None), "diffusion_model", None)

    def host_traits(self, unet: Any) -> HostTraits:
        """How this WebUI treats the modules and weights of a network: the same for all networks."""
        return self._host_traits

    def before_sampling(self, p: Any) -> None:
        """Called before each sampling of the generation p: adopt its UNet, tell the runtime and our hooks that a
        sampling begins, and let the next call look for changed modules anew. Removes the class's own forward from the
        UNet's instance, where ControlNet may have left it. If OneDiff does not serve the checkpoint, only our hooks are
        told."""
        self._vae.begin_run(getattr(getattr(p.sd_model, "first_stage_model", None), "decoder", None))
        unet = self.adopt(p.sd_model)
        self._unets.begin_sampling(p, unet)
        if unet is None:
            return
        if "forward" in unet.__dict__ and own_method(unet, "forward") is None:
            # ControlNet puts back the bound method that it found. If OneDiff was off then, it bypasses our hook.
            del unet.forward
        self._changed.look_again(unet)
        runtime.begin_sampling(unet, sampling_of(p))
        self._unet = weakref.ref(unet)

    def before_step(self, params: Any) -> None:
        """Called by the WebUI before each step of a sampling. params: its CFGDenoiserParams, of which a weak reference
        is kept: text_cond and text_uncond tell later which rows of a call are prompts and which negative prompts."""
        self._step = weakref.ref(params)

    def _why_bypassed(self) -> str:
        """Why no call of a sampling reached our forward, for users; BYPASSED if no extension can be named. UNetHooks
        calls this after such a sampling."""
        checkpoint = self.checkpoint()
        unet = self.unet_of(checkpoint)
        if unet is None:
            return BYPASSED
        owner = forward_above(unet, [patch.function for patch in self._unets.patches])
        owner = owner or replaced_method(checkpoint.model, "forward") or replaced_method(checkpoint, "apply_model")
        return BYPASSED if owner is None else f"another extension calls the UNet in place of the WebUI ({owner})"

    # --- one call -------------------------------------------------------------------------------------------------

    def _forward(
        self, original: Callable[..., Tensor], unet: nn.Module, x: Tensor, timesteps: Any = None, context: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Tensor:
        """Replaces UNetModel.forward(self, x, timesteps=None, context=None, y=None, **kwargs): returns the UNet's
        output, computed by OneDiff or by the original with the same arguments. original: the forward that is replaced;
        unet: its self. If a forward that an extension has set on the UNet of the present sampling makes this call, the
        original computes it, and _stage() counts it."""

        def host() -> Tensor:
            """The host's own output."""
            return original(unet, x, timesteps, context, *args, **kwargs)

        owner = foreign_forward(unet)
        y = args[0] if args else kwargs.get("y")
        if owner is not None and unet is self._unet():
            # An extension's forward on the instance makes this call, as ControlNet's reference mode does.
            return runtime.pressure.run_host(host)

        def read() -> Call:
            """These arguments as a UNetCall. Raises Refusal, with the reason for users, if OneDiff cannot serve it."""
            tensors = (x, timesteps, context) if y is None else (x, timesteps, context, y)
            if not all(isinstance(one, Tensor) for one in tensors):
                raise unsupported_inputs("the latent, the timestep, the prompt or the pooled prompt is not a tensor")
            if len(args) > 1 or any(value is not None for name, value in kwargs.items() if name != "y"):
                names = ", ".join(sorted(kwargs)) or "by position"
                raise unsupported_inputs(f"unknown arguments ({names})")
            self._unets.refuse_derived(unet)
            self._check_state(unet)
            if owner is not None:
                raise Refusal(f"{owner} runs the UNet itself")
            patches = patches_of(self._changed.at_call(unet), replaced_concatenation())
            return UNetCall(x, timesteps, context, y, upcast_attention=upcasts_attention(), patches=patches)

        def prompt_rows() -> PromptRows:
            """The prompts' rows, and a function that lets the host compute these alone; Refusal if they are unknown."""
            rows = rows_of_prompts(self._step(), context)
            label = None if y is None else y[rows]
            return PromptRows(rows, lambda: original(unet, x[rows], timesteps[rows], context[rows], y=label))

        return serve_call(unet, read, host, prompt_rows, self._host_traits)

    def _stage(self, original: Callable[..., Tensor], stage: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces the forward of TimestepEmbedSequential, the class of a UNet's stages. Returns the original's result;
        if the original runs out of GPU memory, OneDiff frees its own memory and runs the original once more.

        Extensions such as sd-webui-controlnet set a forward on the UNet's instance that calls the stages itself, so
        that the UNet's hook never runs. The call of the first stage is then counted as a UNet call of the host, with
        the extension as the reason.
        """
        unet = self._unet()
        if unet is not None and stage is unet.input_blocks[0]:
            owner = foreign_forward(unet)
            if owner is not None:
                runtime.note_host(f"{owner} runs the UNet's layers itself", unet)
        return runtime.pressure.run_host(lambda: original(stage, *args, **kwargs))

    def _check_state(self, unet: nn.Module) -> None:
        """Raise Refusal, with the reason for users, if the WebUI's present state does not allow us to serve this UNet:
        the checkpoint lacks something (unmet), an SD Unet or a hypernetwork is in use, an extension has replaced
        PyTorch's functions in the UNet or set global hooks, or every layer is computed in another way (check_layers).

        With --lowvram, also moves to main memory the one module that the WebUI now has on the GPU: a network such as
        the text encoder or the VAE, or a block of the UNet. Without --lowvram, takes microseconds.
        """
        from modules import lowvram, sd_hijack_unet, sd_unet, shared

        if self.unmet is not None:
            raise Refusal(self.unmet)
        if sd_unet.current_unet is not None:
            owner = author(sd_unet.current_unet)
            raise Refusal(f"the UNet of {owner} is used instead of the checkpoint's: set 'SD Unet' to None")
        if shared.loaded_hypernetworks:
            raise Refusal("a hypernetwork changes the attention")
        functions = getattr(sys.modules[type(unet).__module__], "th", None)
        if functions is not sd_hijack_unet.th:
            raise Refusal(f"{author(functions)} replaces PyTorch's functions in the UNet")
        refuse_global_hooks()
        if shared.cmd_opts.lowvram and lowvram.module_in_gpu is not None:
            # The UNet's first layer has a hook of the WebUI that would do this, but our forward does not call it.
            lowvram.send_everything_to_cpu()
        check_layers()

    # --- calls between images -------------------------------------------------------------------------------------

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call with random inputs through the checkpoint's apply_model, so that OneDiff makes the shape
        ready. Arguments and errors: see WebUI.warm. torch's random state stays as it is."""
        from modules import devices

        autocast = devices.without_autocast if devices.unet_needs_upcast else devices.autocast
        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=devices.dtype, device=devices.device)

        with random_state_kept(), torch.no_grad(), autocast():
            call = self.call_to_warm(width, height, batch, tokens, noise)
            context, *labels = call.prompt
            prompt = {"crossattn": context, "vector": labels[0]} if labels else {"c_crossattn": [context]}
            # The further channels of an inpainting model's input are the mask and the masked image.
            latent = call.latent[:, :4]
            masked = call.latent[:, 4:]
            self.checkpoint().apply_model(latent, call.timestep, {**prompt, "c_concat": [masked]})

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode one random latent, so that OneDiff makes the VAE's shape ready. The number of `images` does not
        matter, because the WebUI decodes one after the other. width, height: in pixels. A checkpoint must be loaded."""
        from modules import devices, sd_samplers_common

        with random_state_kept(), torch.no_grad():
            shape = 1, 4, height // LATENT_PIXEL, width // LATENT_PIXEL
            latent = torch.randn(shape, dtype=devices.dtype_vae, device=devices.device)
            sd_samplers_common.decode_first_stage(self.checkpoint(), latent)

    def call_shapes(self, images: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """(batch, tokens) of each kind of UNet call that CFGDenoiser may make in a step with the present options, the
        usual one first: (2 * images, tokens), unless "Batch cond/uncond" is off; (images, tokens) in any case; and
        (images, TOKENS) for a shorter negative prompt that is not padded, if tokens is more. images: how many are made
        at once. tokens: the prompt's context length."""
        from modules import shared

        # CFGDenoiser.forward calls with the prompt and the negative prompt together (both), unless an option is off.
        # At some steps it may skip the negative prompt: then the prompt's rows come alone. If prompt and negative
        # prompt differ in length and are not padded, each half comes alone, too; the shorter one is most often the
        # negative prompt, of TOKENS.
        both = ((2 * images, tokens),) if shared.opts.batch_cond_uncond else ()
        padded = shared.opts.pad_cond_uncond or shared.opts.pad_cond_uncond_v0
        shorter = ((images, TOKENS),) if tokens != TOKENS and not padded else ()
        return (*both, (images, tokens), *shorter)


def upcasts_attention() -> bool:
    """Whether the WebUI's option to compute attention scores in float32 (upcast_attn) is on."""
    from modules import shared

    return bool(shared.opts.upcast_attn)


def rows_of_prompts(step: Any, context: Tensor) -> slice:
    """The rows of the prompts in a call's batch: always the first half, slice(0, images). The second half has the
    negative prompts, in the same order of images. Raises Refusal, with the reason for users, for every other call.

    step: the CFGDenoiserParams of the WebUI's present step; None outside of a step, which is refused. context: the
        call's, (batch, tokens, width).

    CFGDenoiser calls with one row for each prompt, then one for each negative prompt. After its callback with `step`,
    it may still skip the negative prompts (NGMS), compute them in another call, or use three rows an image (edit
    models). So a call is refused unless there are as many prompts as negative prompts (AND makes more prompts), the
    batch has 2 * images rows, the first half of the context begins with the values of the step's prompts, and the
    second half with those of the negative prompts. Comparing values waits for the GPU.
    """
    if step is None:
        raise Refusal(NO_STEP)
    # SDXL's conditions are dictionaries with the label too.
    prompt, negative = (
        cond["crossattn"] if isinstance(cond, dict) else cond for cond in (step.text_cond, step.text_uncond)
    )
    images = negative.shape[0]
    batch = context.shape[0]
    if prompt.shape[0] != images:
        raise Refusal(SEVERAL_PROMPTS if batch != images else APART)
    if batch != 2 * images:
        raise Refusal(APART if batch == images else OTHER_ROWS)
    # This waits for the GPU, as reading the timestep has done before.
    if not begins_with(context[:images], prompt) or not begins_with(context[images:], negative):
        raise Refusal(OTHER_PROMPTS)
    return half_of(batch, is_first=True)


def begins_with(context: Tensor, prompt: Tensor) -> bool:
    """Whether the context equals the prompt in all tokens up to the shorter one's length. Context and prompt are (rows,
    tokens, width) with equally many rows. Tokens beyond are not compared, because the WebUI may have padded or cut a
    prompt to the length of the negative prompt, or the negative prompt to the prompt's."""
    tokens = min(context.shape[1], prompt.shape[1])
    return torch.equal(context[:, :tokens], prompt[:, :tokens].to(context.device, context.dtype))
