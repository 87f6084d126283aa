"""Our forward in the WebUIs of the Forge family, whose UNet a model patcher holds: below whatever another extension
sets on a UNet (an object patch, a forward of its own)."""
from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.call import Call, PromptRows
from ...core.guard import first_line, outcome_of
from ...core.key import LATENT_PIXEL
from ...core.origins import author, origin
from ...core.refusal import Refusal
from ...core.sampling import Sampling
from ...runtime.runtime import runtime
from ...weights.binding import BOUND_DTYPES, STORED_DTYPES, shares_storage
from ...weights.exact_copy import copy_of
from ...weights.scan import Casts, HostTraits, Yardstick, refuse_replaced
from ..changed_modules import ChangedModules, forward_above, is_brought, replaced_method
from ..contract import BYPASSED, NOT_IN_USE, Need, Result, WebUI, check_needs
from ..hooks import UNetHooks, VaeHooks, serve_call
from ..sampler_schedule import sampling_of
from .call import HostCall
from .image_prompts import image_prompts_of
from .networks import NETWORKS, HostNetwork
from .stored_weights import STORED_TYPES, StoredWeights, decoding_first
from .weight_functions import PLACED, LayerFunctions, cast_to_input


def release() -> str:
    """ "Forge 2.0.1v1.10.1" or "Forge Neo 2.26"."""
    version, number = version_and_release()
    return (f"Forge Neo {number}" if version == "neo" else f"Forge {version}").strip()


def version_and_release() -> tuple[str, str]:
    """What the host says of itself: its version, and its release where it tells one."""
    try:
        said = importlib.import_module("modules_forge.forge_version")
    except ImportError:
        return "", ""
    return str(getattr(said, "version", "")), str(getattr(said, "release", ""))


class Forge(WebUI):
    """The adapter; see contract.WebUI. Another host of the family overrides the first attributes and methods.

    networks: that we serve; the first is one that every release has. vae_module: of the VAE's Decoder and Encoder.
    memory, sampling: the modules of the memory management and of sampling_prepare.
    """

    name = "forge"
    networks: tuple[HostNetwork, ...] = NETWORKS
    vae_module = "backend.nn.vae"
    memory, sampling = "backend.memory_management", "backend.sampling.sampling_function"
    checkpoint_paths = (
        "forge_objects.unet.model", "forge_objects.unet.model_options", "forge_objects.unet.load_device",
        "forge_objects_original.unet", "forge_objects_after_applying_lora",
    )

    def selected_checkpoint(self) -> Any:
        """The checkpoint that the user has chosen; loads it."""
        from modules import sd_models

        return sd_models.forge_model_reload()[0]

    def vae_attention(self, decoder: Any) -> Any:
        """The function by which a decoder computes attention; its name has changed over time."""
        vae = importlib.import_module(type(decoder).__module__)
        older = getattr(vae, "attention_function_single_head_spatial", None)
        return getattr(vae, "attention_function_vae", older)

    @classmethod
    def needs(cls) -> tuple[Need, ...]:
        """What must be there before we hook anything."""
        return (
            *cls.networks[0].needs(),
            Need(cls.vae_module, "Decoder.forward", ("z",)), Need(cls.vae_module, "Encoder.forward", ("x",)),
            Need(cls.memory, "get_free_memory"), Need(cls.memory, "module_size"),
            Need(cls.sampling, "sampling_prepare"), Need(cls.sampling, "sampling_cleanup"),
            Need("modules.sd_models", "model_data"), Need("modules.call_queue", "queue_lock"),
            Need("modules.shared", "state"), Need("modules_forge.main_thread", "run_and_wait_result"),
        )

    def __init__(self, release: str) -> None:
        """Raises Refusal for a release that lacks something."""
        check_needs(release, self.needs())
        super().__init__(release)
        # Of its own: each remembers what it has found in this host.
        self._networks = [replace(one) for one in self.networks if one is self.networks[0] or one.is_there]
        self.network_classes = tuple(one.kind for one in self._networks)
        self.models = tuple(model for one in self._networks for model in one.models)
        traits = HostTraits(
            functions=LayerFunctions(), casts=Casts(cast_to_input), brought=is_brought, placed=PLACED,
            make_room=self._make_room,
        )
        self._traits: dict[type, HostTraits] = {}
        for one in self._networks:
            stored = StoredWeights(one.unrounded)
            self._traits[one.kind] = replace(traits, stored=stored, yardstick=yardstick_of(one))
        vae = importlib.import_module(self.vae_module)
        self._unets = UNetHooks((one.kind for one in self._networks), self._forward, self._why_bypassed)
        self._vae = VaeHooks([vae.Decoder, vae.Encoder], HostTraits(), self._check_vae)
        self.patches = self._unets, self._vae
        self._changed = ChangedModules()
        # Why each UNet that was called in this sampling is the host's; "" where it is ours.
        self._refusals: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._sampling = Sampling()
        # Images are made on one thread, settings and reloads come on others.
        self._lock = threading.RLock()

    # --- in and out -----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        with self._lock:
            super().serve()
            if self.checkpoint() is not None:
                self.model_loaded(self.checkpoint())

    def stop(self) -> None:
        with self._lock:
            super().stop()
            give_originals_storage_of_their_own(patcher_of(self.checkpoint()))
            self._refusals.clear()

    def checkpoint(self) -> Any:
        # Before the first there is a placeholder, and Classic throws one away before it loads the next.
        found = super().checkpoint()
        return None if getattr(found, "forge_objects", None) is None else found

    def network(self, checkpoint: Any) -> Any:
        return getattr(getattr(patcher_of(checkpoint), "model", None), "diffusion_model", None)

    # --- a generation ---------------------------------------------------------------------------------------------

    def before_sampling(self, p: Any) -> None:
        if not self.hooks():
            return
        vae = getattr(getattr(p.sd_model, "forge_objects", None), "vae", None)
        self._vae.begin_run(getattr(getattr(vae, "first_stage_model", None), "decoder", None))
        unet = self.adopt(p.sd_model)
        self._unets.begin_sampling(p, unet)
        if unet is not None:
            self._ask_for_room(p, unet)
        self._look_again(sampling_of(p))

    def _look_again(self, sampling: Sampling) -> None:
        """A sampling begins: each UNet is looked at when it is first called in it."""
        self._refusals.clear()
        self._sampling = sampling

    def _why_bypassed(self) -> str:
        patcher, unet = patcher_of(self.checkpoint()), self.unet_of(self.checkpoint())
        owner = None if unet is None else forward_above(unet, [patch.function for patch in self._unets.patches])
        if owner is not None:
            return f"another extension has replaced the UNet's forward ({owner})"
        owner = None if patcher is None else replaced_method(patcher.model, "apply_model")
        if owner is not None:
            return f"another extension has replaced what calls the UNet ({owner})"
        wrapper = None if patcher is None else patcher.model_options.get("model_function_wrapper")
        if wrapper is not None:
            return f"another extension runs the UNet in its own way ({author(wrapper)})"
        return BYPASSED

    # --- one call -------------------------------------------------------------------------------------------------

    def _forward(self, original: Callable[..., Tensor], unet: nn.Module, *arguments: Any, **named: Any) -> Tensor:
        """Stands in for a network's forward."""
        given = HostCall.of(self._loaded(unet).parameters, arguments, named)

        def prompt_rows() -> PromptRows:
            rows = given.prompt_rows()
            return PromptRows(rows, lambda: given.of_rows(rows).by(original, unet))

        return serve_call(unet, lambda: self._read(unet, given), lambda: given.by(original, unet), prompt_rows)

    def _read(self, unet: nn.Module, given: HostCall) -> Call:
        """A call as ours. Raises Refusal where it is the host's."""
        self._check(unet)
        given.refuse_no_tensors()
        network, changed = self._loaded(unet), self._changed.at_call(unet)
        # The host calls a module with a forward of its own in another way than image prompts would.
        prompts = () if changed else image_prompts_of(unet, given.options, given.x)
        upcasts = network.attention.upcasts(given.x.dtype)
        return network.call_of(unet, given, upcasts, network.names_read, prompts, changed)

    def _loaded(self, unet: Any) -> HostNetwork:
        """What is known of a network's kind; of the first one's for None."""
        return next((one for one in self._networks if isinstance(unet, one.kind)), self._networks[0])

    def _check(self, unet: nn.Module) -> None:
        """Raise Refusal where a UNet's calls are the host's now. The UNet is looked at once a sampling."""
        if unet not in self._refusals:
            refusal = ""
            try:
                self._unets.refuse_derived(unet)
                hook = next(patch for patch in self._unets.patches if type(unet) is patch.owner)
                refuse_replaced(type(unet), below=hook.original)
                check_storage(unet)
            except Refusal as found:
                refusal = str(found)
            self._changed.look_again(unet)
            runtime.adopt(unet, host_traits=self.host_traits(unet))
            runtime.begin_sampling(unet, self._sampling)
            # Not before: what fails here is looked at again at the next call.
            self._refusals[unet] = self.unmet or refusal
        if self._refusals[unet]:
            raise Refusal(self._refusals[unet])
        self._loaded(unet).check()

    def host_traits(self, unet: Any) -> HostTraits:
        return self._traits[self._loaded(unet).kind]

    def _make_room(self, unet: nn.Module, size: int) -> int:
        """See HostTraits. By what the host itself does when another model needs the room."""
        patcher = patcher_of(self.checkpoint())
        unload = getattr(patcher, "partially_unload", None)
        if unload is None or getattr(patcher.model, "diffusion_model", None) is not unet:
            return 0
        return int(unload(patcher.offload_device, size))

    def _ask_for_room(self, p: Any, unet: nn.Module) -> None:
        """Have the host leave the room that steps of this size have lacked before, when it loads the weights: to take
        them off the GPU between two steps costs a second. By a patcher for this sampling alone, as ControlNets do."""
        size = tuple(getattr(p, name, None) for name in ("width", "height", "batch_size", "is_hr_pass"))
        lacking, patcher = runtime.room_lacked(unet, size), patcher_of(p.sd_model)
        if lacking and hasattr(patcher, "add_extra_preserved_memory_during_sampling"):
            patcher = p.sd_model.forge_objects.unet = patcher.clone()
            patcher.add_extra_preserved_memory_during_sampling(lacking)

    def _check_vae(self, decoder: Any) -> None:
        """Raise Refusal where the host's VAE computes attention by a function that is not the host's own."""
        function = self.vae_attention(decoder)
        if origin(function) not in (self._networks[0].attention.functions, self.vae_module):
            raise Refusal(f"the attention of the WebUI's VAE was replaced by {author(function)}")

    # --- what users ask -------------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        if not self.hooks():
            return []
        unused = self._loaded(self.unet_of(self.checkpoint())).attention.unused()
        said = [] if unused is None else [
            f"{unused}, chosen for the WebUI, is not used where OneDiff computes: it uses the fastest exact "
            "attention of this GPU."
        ]
        model = getattr(patcher_of(self.checkpoint()), "model", None)
        if getattr(model, "_torch_compile_config", None) is not None:
            said.append("The WebUI's Torch Compile is on for this checkpoint: OneDiff computes instead of it.")
        return said

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        if not self.hooks():
            raise Refusal(NOT_IN_USE)
        try:
            checkpoint = self.selected_checkpoint()
        except Exception as error:
            raise Refusal(f"the checkpoint cannot be loaded: {first_line(error)}") from error
        self._look_again(Sampling())
        calls = runtime.call_stats.total
        # With the last generation's LoRAs; Classic keeps none where there were no LoRAs.
        patcher = (checkpoint.forge_objects_after_applying_lora or checkpoint.forge_objects_original).unet
        sampling, model = importlib.import_module(self.sampling), patcher.model
        computed = getattr(model, "computation_dtype", None) or getattr(model, "manual_cast_dtype", None)
        device, dtype = patcher.load_device, computed or patcher.model_dtype()
        generator = torch.Generator("cpu").manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

        with torch.inference_mode():
            call = self.call_to_warm(width, height, batch, tokens, noise)
            # The host plans memory for twice the images: the prompt and the negative prompt.
            sampling.sampling_prepare(patcher, call.latent[:(batch + 1) // 2])
            try:
                prompt = dict(zip(self._loaded(model.diffusion_model).prompt, call.prompt, strict=False))
                model.diffusion_model(call.latent, call.timestep, control=None, transformer_options={}, **prompt)
            finally:
                sampling.sampling_cleanup(patcher)
        if runtime.call_stats.total == calls:
            raise Refusal(self._why_bypassed())

    def warm_decode(self, width: int, height: int, images: int) -> None:
        checkpoint, memory = self.checkpoint(), importlib.import_module(self.memory)
        vae = checkpoint.forge_objects.vae
        latent = torch.randn(
            (images, vae.latent_channels, height // LATENT_PIXEL, width // LATENT_PIXEL),
            generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu",
        )
        needed = vae.memory_used_decode(latent.shape, vae.vae_dtype) + memory.module_size(vae.first_stage_model)
        # Not where the host would put the UNet aside for it, which would then lie elsewhere when it comes back.
        if needed < memory.get_free_memory(vae.device):
            with torch.inference_mode():
                checkpoint.decode_first_stage(latent)

    def exclusively(self, work: Callable[[], Result]) -> Result:
        from modules.call_queue import queue_lock
        from modules_forge import main_thread

        if threading.current_thread() is threading.main_thread():
            # Whoever holds the lock may be waiting for this very thread.
            if not queue_lock.acquire(blocking=False):
                raise Refusal("the WebUI is making an image")
            try:
                return work()
            finally:
                queue_lock.release()
        outcomes: list[Future[Result]] = []
        with queue_lock:
            # An exception would end in the log, and None would come back.
            main_thread.run_and_wait_result(lambda: outcomes.append(outcome_of(work)))
        return outcomes.pop().result()


def patcher_of(checkpoint: Any) -> Any:
    return getattr(getattr(checkpoint, "forge_objects", None), "unet", None)


def give_originals_storage_of_their_own(patcher: Any) -> None:
    """As runtime.release does for the parameters that stand in the UNet, for what the host has put aside under a merged
    LoRA: Forge in its loader, others in the patcher; Classic as mere tensors."""
    for holder in (getattr(getattr(patcher, "model", None), "lora_loader", None), patcher):
        backup = getattr(holder, "backup", None)
        for kept in list(backup.values()) if isinstance(backup, dict) else ():
            weight = getattr(kept, "weight", kept)
            if isinstance(weight, Tensor) and shares_storage(weight):
                with torch.inference_mode(weight.is_inference()):
                    weight.data = copy_of(weight)


def yardstick_of(kind: HostNetwork) -> Yardstick:
    """See HostTraits.yardstick: for networks of this kind."""
    return lambda host, network, decoded: decoding_first(kind.attention.exactly(host), network, decoded)


def check_storage(unet: Any) -> None:
    """Raise Refusal where the host casts a UNet's weights in a way that we do not know."""
    stored, computed = getattr(unet, "storage_dtype", None), getattr(unet, "computation_dtype", None)
    if stored != computed and not (stored in (*STORED_DTYPES, *STORED_TYPES) and computed in BOUND_DTYPES):
        stored, computed = (str(kind).removeprefix("torch.") for kind in (stored, computed))
        raise Refusal(
            f"the UNet is stored as {stored} and computed in {computed}: the WebUI casts its weights at every call"
        )
