"""The adapter of WebUIs of the Forge family, in which a model patcher holds the UNet. Replaces the forwards of the
networks' classes, below object patches and forwards that extensions set on instances."""
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
from ...core.settings import OFF_IN_SETTINGS
from ...runtime.runtime import runtime
from ...weights.binding import BOUND_DTYPES, STORED_DTYPES
from ...weights.exact_copy import copy_of
from ...weights.joining import shares_storage
from ...weights.scan import Casts, HostTraits, Yardstick, refuse_replaced
from ..changed_modules import ChangedModules, forward_above, is_brought, replaced_method
from ..contract import BYPASSED, Need, Result, WebUI, check_needs
from ..hooks import UNetHooks, VaeHooks, serve_call
from ..sampler_schedule import sampling_of
from .call import HostCall
from .image_prompts import image_prompts_of
from .networks import NETWORKS, HostNetwork
from .stored_weights import STORED_TYPES, StoredWeights, decoding_first
from .weight_functions import PLACED, LayerFunctions, cast_to_input


def release() -> str:
    """The WebUI's name and version for users: "Forge 2.0.1v1.10.1" or "Forge Neo 2.26"."""
    version, number = version_and_release()
    return (f"Forge Neo {number}" if version == "neo" else f"Forge {version}").strip()


def version_and_release() -> tuple[str, str]:
    """(version, release) in the WebUI's Python module modules_forge.forge_version, such as ("neo", "2.26"). A value
    that the module lacks is "". ("", "") without the module."""
    try:
        module = importlib.import_module("modules_forge.forge_version")
    except ImportError:
        return "", ""
    return str(getattr(module, "version", "")), str(getattr(module, "release", ""))


class Forge(WebUI):
    """The adapter of Forge and Forge Neo; see contract.WebUI. Adapters of other WebUIs of the family override the
    attributes, selected_checkpoint and vae_attention.

    networks: the classes of networks that OneDiff serves. A release without the first class is refused. Any other class
        that the release lacks is left out.
    vae_module: the Python module with the VAE's Decoder and Encoder.
    memory: the Python module of the memory management.
    sampling: the Python module with sampling_prepare and sampling_cleanup.
    """

    name = "forge"
    networks: tuple[HostNetwork, ...] = NETWORKS
    vae_module = "backend.nn.vae"
    memory = "backend.memory_management"
    sampling = "backend.sampling.sampling_function"
    checkpoint_paths = (
        "forge_objects.unet.model", "forge_objects.unet.model_options", "forge_objects.unet.load_device",
        "forge_objects_original.unet", "forge_objects_after_applying_lora",
    )

    def selected_checkpoint(self) -> Any:
        """The checkpoint that the user has selected. If it is not loaded yet, loads it, which the WebUI does only with
        the first image; pre-warming needs it earlier. Raises the WebUI's exceptions."""
        from modules import sd_models

        return sd_models.forge_model_reload()[0]

    def vae_attention(self, decoder: Any) -> Any:
        """The function with which a VAE's decoder computes attention now; None if the release has it under a name that
        OneDiff does not know."""
        vae = importlib.import_module(type(decoder).__module__)
        older = getattr(vae, "attention_function_single_head_spatial", None)
        return getattr(vae, "attention_function_vae", older)

    @classmethod
    def needs(cls) -> tuple[Need, ...]:
        """Everything that OneDiff must find in the WebUI's Python modules to serve the first of `networks`. If anything
        is missing, OneDiff patches nothing."""
        return (
            *cls.networks[0].needs(),
            Need(cls.vae_module, "Decoder.forward", ("z",)), Need(cls.vae_module, "Encoder.forward", ("x",)),
            Need(cls.memory, "get_free_memory"), Need(cls.memory, "module_size"),
            Need(cls.sampling, "sampling_prepare"), Need(cls.sampling, "sampling_cleanup"),
            Need("modules.sd_models", "model_data"), Need("modules.call_queue", "queue_lock"),
            Need("modules.shared", "state"), Need("modules_forge.main_thread", "run_and_wait_result"),
        )

    def __init__(self, release: str) -> None:
        """release: the WebUI's name and version for users. Raises Refusal if this release lacks something that OneDiff
        needs (needs)."""
        check_needs(release, self.needs())
        super().__init__(release)
        # Copies, because a HostNetwork caches what it has found in this WebUI.
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
        # By UNet that was called in this sampling: why the host must compute its calls; "" if OneDiff serves them.
        self._refusals: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._sampling = Sampling()
        # The WebUI makes images in one thread, and changes settings and reloads scripts in others.
        self._lock = threading.RLock()

    # --- patching the classes -------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Patch the WebUI's classes, and adopt the checkpoint that is loaded already. Safe to call twice. See WebUI."""
        with self._lock:
            super().serve()
            if self.checkpoint() is not None:
                self.model_loaded(self.checkpoint())

    def stop(self) -> None:
        """Undo serve(), restore every network, and give the WebUI's backups of weights memory of their own
        (unshare_backups). Safe to call twice. See WebUI."""
        with self._lock:
            super().stop()
            unshare_backups(patcher_of(self.checkpoint()))
            self._refusals.clear()

    def checkpoint(self) -> Any:
        """The loaded checkpoint; None if none is loaded. Never loads one. See WebUI."""
        # Before the WebUI loads its first checkpoint, it has a placeholder without forge_objects. Classic deletes a
        # checkpoint before it loads the next one.
        found = super().checkpoint()
        return None if getattr(found, "forge_objects", None) is None else found

    def network(self, checkpoint: Any) -> Any:
        """The UNet or transformer of a checkpoint, of any class, served or not; None if the checkpoint has none, or is
        None. See WebUI."""
        return getattr(getattr(patcher_of(checkpoint), "model", None), "diffusion_model", None)

    # --- a generation ---------------------------------------------------------------------------------------------

    def before_sampling(self, p: Any) -> None:
        """Called before each sampling of the generation p: adopts its UNet and VAE, and tells the hooks that a sampling
        begins. Does nothing while OneDiff is off (hooks). See WebUI."""
        if not self.hooks():
            return
        vae = getattr(getattr(p.sd_model, "forge_objects", None), "vae", None)
        self._vae.begin_run(getattr(getattr(vae, "first_stage_model", None), "decoder", None))
        unet = self.adopt(p.sd_model)
        self._unets.begin_sampling(p, unet)
        if unet is not None:
            self._reserve_memory(p, unet)
        self._begin_sampling(sampling_of(p))

    def _begin_sampling(self, sampling: Sampling) -> None:
        """Note that this sampling begins, and forget the results of _check, so that each UNet is checked again at its
        first call. At that call, the runtime is told that the sampling begins (_check)."""
        self._refusals.clear()
        self._sampling = sampling

    def _why_bypassed(self) -> str:
        """Why the calls of the last sampling did not reach our forward, in one line for the user: names the extension
        that bypasses our forward, or is BYPASSED if no such extension is found. See UNetHooks."""
        patcher = patcher_of(self.checkpoint())
        unet = self.unet_of(self.checkpoint())
        owner = None if unet is None else forward_above(unet, [patch.function for patch in self._unets.patches])
        if owner is not None:
            return f"another extension has replaced the UNet's forward ({owner})"
        owner = None if patcher is None else replaced_method(patcher.model, "apply_model")
        if owner is not None:
            return f"another extension has replaced the WebUI's function that calls the UNet ({owner})"
        wrapper = None if patcher is None else patcher.model_options.get("model_function_wrapper")
        if wrapper is not None:
            return f"another extension calls the UNet in place of the WebUI ({author(wrapper)})"
        return BYPASSED

    # --- one call -------------------------------------------------------------------------------------------------

    def _forward(self, original: Callable[..., Tensor], unet: nn.Module, *arguments: Any, **named: Any) -> Tensor:
        """The output of a network's call, ours or the host's; replaces the forward of each class in network_classes.
        original: the host's forward. arguments, named: the host's, by position and by keyword. Raises TypeError, as
        the host's forward would, for arguments that it does not take."""
        given = HostCall.of(self._host_network(unet).parameters, arguments, named)

        def prompt_rows() -> PromptRows:
            rows = given.prompt_rows()
            return PromptRows(rows, lambda: given.of_rows(rows).run(original, unet))

        return serve_call(unet, lambda: self._read(unet, given), lambda: given.run(original, unet), prompt_rows)

    def _read(self, unet: nn.Module, given: HostCall) -> Call:
        """Our Call for this call of the host, with all that extensions do in it. Raises Refusal if only the host's
        forward can compute it, or if the host must compute all calls of this network (_check)."""
        self._check(unet)
        given.require_tensors()
        network = self._host_network(unet)
        changed = self._changed.at_call(unet)
        # Forwards that extensions set on modules may change where the host calls an IP-Adapter. So in a UNet with such
        # forwards, an IP-Adapter runs as a function of another extension.
        prompts = () if changed else image_prompts_of(unet, given.options, given.x)
        upcasts = network.attention.upcasts(given.x.dtype)
        return network.call_of(unet, given, upcasts, network.names_read, prompts, changed)

    def _host_network(self, unet: Any) -> HostNetwork:
        """The HostNetwork of a network's class, or of a base of that class; the first HostNetwork for any other object,
        and for None."""
        return next((one for one in self._networks if isinstance(unet, one.kind)), self._networks[0])

    def _check(self, unet: nn.Module) -> None:
        """Raise Refusal if the host must compute this UNet's calls now. Called at every call.

        At a UNet's first call in a sampling, its class and weights are checked and the result is kept; the UNet is
        adopted, and the runtime is told that the sampling begins. The WebUI's functions that the UNet uses are checked
        at every call.
        """
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
            # Noted last: if a line above raises, the next call checks again.
            self._refusals[unet] = self.unmet or refusal
        if self._refusals[unet]:
            raise Refusal(self._refusals[unet])
        self._host_network(unet).check()

    def host_traits(self, unet: Any) -> HostTraits:
        """How this WebUI treats the modules and weights of a network: one HostTraits for each class. See WebUI."""
        return self._traits[self._host_network(unet).kind]

    def _make_room(self, unet: nn.Module, size: int) -> int:
        """Let the WebUI move at least `size` bytes of this UNet's weights from the GPU to main memory, as it does to
        make room for another model. Returns the number of bytes that it has moved; 0 if the UNet is not the loaded
        checkpoint's, or the WebUI cannot move a part of the weights. See HostTraits.make_room."""
        patcher = patcher_of(self.checkpoint())
        unload = getattr(patcher, "partially_unload", None)
        if unload is None or getattr(patcher.model, "diffusion_model", None) is not unet:
            return 0
        return int(unload(patcher.offload_device, size))

    def _reserve_memory(self, p: Any, unet: nn.Module) -> None:
        """Make the WebUI leave more GPU memory free when it loads the weights for a sampling of the generation p: as
        much as the steps of earlier samplings at this size lacked. Otherwise, weights would be moved off the GPU
        between two steps, which takes a second. Does nothing if no memory was lacking, or the WebUI cannot do this.

        Replaces the model patcher (p.sd_model.forge_objects.unet) by a clone, which only this sampling uses, as
        ControlNets do.
        """
        size = tuple(getattr(p, name, None) for name in ("width", "height", "batch_size", "is_hr_pass"))
        lacking = runtime.room_lacked(unet, size)
        patcher = patcher_of(p.sd_model)
        if lacking and hasattr(patcher, "add_extra_preserved_memory_during_sampling"):
            patcher = p.sd_model.forge_objects.unet = patcher.clone()
            patcher.add_extra_preserved_memory_during_sampling(lacking)

    def _check_vae(self, decoder: Any) -> None:
        """Raise Refusal if an extension has replaced the function with which the WebUI's VAE computes attention: only
        the host calls it."""
        function = self.vae_attention(decoder)
        if origin(function) not in (self._networks[0].attention.functions, self.vae_module):
            raise Refusal(f"another extension has replaced the VAE's attention ({author(function)})")

    # --- notes, pre-warming ---------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Sentences for users on options of the WebUI that are set and have no effect where OneDiff computes: the
        WebUI's attention and its torch.compile. [] if no such option is set, or if OneDiff is off. See WebUI."""
        if not self.hooks():
            return []
        found = []
        unused = self._host_network(self.unet_of(self.checkpoint())).attention.unused()
        if unused is not None:
            found.append(
                f"{unused}, which is chosen for the WebUI, has no effect where OneDiff computes: OneDiff uses the "
                "fastest exact attention of this GPU."
            )
        model = getattr(patcher_of(self.checkpoint()), "model", None)
        if getattr(model, "_torch_compile_config", None) is not None:
            found.append(
                "The WebUI's Torch Compile is on for this checkpoint, but it has no effect where OneDiff computes."
            )
        return found

    def warm(self, width: int, height: int, batch: int, tokens: int) -> None:
        """Make one UNet call with random inputs, as the WebUI does in a step, so that OneDiff makes the shape ready.
        Loads the selected checkpoint if it is not loaded yet. Call it through exclusively(). See WebUI.

        Raises Refusal if OneDiff does not serve the checkpoint or is off, if the checkpoint cannot be loaded, or if the
        call did not reach our forward. Exceptions of the WebUI during the call are raised as they are.
        """
        if not self.hooks():
            raise Refusal(OFF_IN_SETTINGS)
        try:
            checkpoint = self.selected_checkpoint()
        except Exception as error:
            raise Refusal(f"the checkpoint cannot be loaded: {first_line(error)}") from error
        self._begin_sampling(Sampling())
        calls = runtime.call_stats.total
        # The patcher with the last generation's LoRAs. Classic has none if there were no LoRAs.
        patcher = (checkpoint.forge_objects_after_applying_lora or checkpoint.forge_objects_original).unet
        sampling = importlib.import_module(self.sampling)
        model = patcher.model
        computed = getattr(model, "computation_dtype", None) or getattr(model, "manual_cast_dtype", None)
        device = patcher.load_device
        dtype = computed or patcher.model_dtype()
        generator = torch.Generator("cpu").manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)

        with torch.inference_mode():
            call = self.call_to_warm(width, height, batch, tokens, noise)
            # sampling_prepare takes the latents of the images, and reserves memory for two rows each: the prompt's and
            # the negative prompt's.
            sampling.sampling_prepare(patcher, call.latent[:(batch + 1) // 2])
            try:
                prompt = dict(zip(self._host_network(model.diffusion_model).prompt, call.prompt, strict=False))
                model.diffusion_model(call.latent, call.timestep, control=None, transformer_options={}, **prompt)
            finally:
                sampling.sampling_cleanup(patcher)
        if runtime.call_stats.total == calls:
            raise Refusal(self._why_bypassed())

    def warm_decode(self, width: int, height: int, images: int) -> None:
        """Decode random latents of this many images, width x height pixels each, so that OneDiff makes the VAE's shape
        ready. Does nothing if GPU memory is short. A checkpoint must be loaded. Call it through exclusively(). See
        WebUI."""
        checkpoint = self.checkpoint()
        memory = importlib.import_module(self.memory)
        vae = checkpoint.forge_objects.vae
        latent = torch.randn(
            (images, vae.latent_channels, height // LATENT_PIXEL, width // LATENT_PIXEL),
            generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu",
        )
        needed = vae.memory_used_decode(latent.shape, vae.vae_dtype) + memory.module_size(vae.first_stage_model)
        # If memory is short, the WebUI would move the UNet off the GPU, and later back to other addresses. So nothing
        # is decoded then.
        if needed < memory.get_free_memory(vae.device):
            with torch.inference_mode():
                checkpoint.decode_first_stage(latent)

    def exclusively(self, work: Callable[[], Result]) -> Result:
        """The result of work(), which runs in the WebUI's main thread, where the WebUI makes images, while it makes
        none. Waits for the image in progress. The main thread itself must not wait: if called there, raises Refusal
        while an image is in progress. Exceptions of work() are raised here. See WebUI."""
        from modules.call_queue import queue_lock
        from modules_forge import main_thread

        if threading.current_thread() is threading.main_thread():
            # Waiting could be a deadlock: the thread that has the lock may be waiting for this one.
            if not queue_lock.acquire(blocking=False):
                raise Refusal("the WebUI is making an image: try again when it is done")
            try:
                return work()
            finally:
                queue_lock.release()
        outcomes: list[Future[Result]] = []
        with queue_lock:
            # run_and_wait_result logs an exception and returns None, so the outcome comes back in a list.
            main_thread.run_and_wait_result(lambda: outcomes.append(outcome_of(work)))
        return outcomes.pop().result()


def patcher_of(checkpoint: Any) -> Any:
    """The model patcher of a checkpoint's UNet; None if the checkpoint has none, or is None."""
    return getattr(getattr(checkpoint, "forge_objects", None), "unet", None)


def unshare_backups(patcher: Any) -> None:
    """Give the WebUI's backups of weights, which it made before it merged LoRAs, memory of their own where they are
    views of our tensors, so that our tensors can be freed. Changes the backups' tensors in place. patcher: a model
    patcher; does nothing for None. Called when OneDiff stops; Runtime.release does the same for the UNet's
    parameters."""
    # Forge keeps these weights in its LoRA loader, the others in the patcher.
    for holder in (getattr(getattr(patcher, "model", None), "lora_loader", None), patcher):
        backup = getattr(holder, "backup", None)
        for kept in list(backup.values()) if isinstance(backup, dict) else ():
            # Classic keeps the tensor itself.
            weight = getattr(kept, "weight", kept)
            if isinstance(weight, Tensor) and shares_storage(weight):
                with torch.inference_mode(weight.is_inference()):
                    weight.data = copy_of(weight)


def yardstick_of(kind: HostNetwork) -> Yardstick:
    """The HostTraits.yardstick of networks of this kind: a function (host, network, decoded) that returns the host's
    forward without the host's approximations, to compare our output with its output. Attention is exact, and weights in
    few bits are decoded before they are multiplied. decoded: see decoding_first."""
    return lambda host, network, decoded: decoding_first(kind.attention.exactly(host), network, decoded)


def check_storage(unet: Any) -> None:
    """Raise Refusal if the host stores a UNet's weights in another dtype than it computes in, unless OneDiff supports
    storing in the one and computing in the other."""
    stored = getattr(unet, "storage_dtype", None)
    computed = getattr(unet, "computation_dtype", None)
    if stored != computed and not (stored in (*STORED_DTYPES, *STORED_TYPES) and computed in BOUND_DTYPES):
        stored, computed = (str(kind).removeprefix("torch.") for kind in (stored, computed))
        raise Refusal(
            f"the UNet is stored as {stored} and computed in {computed}, which OneDiff does not support: set "
            f"'Diffusion in Low Bits' to Automatic, or use another file if this one is in {stored} itself"
        )
