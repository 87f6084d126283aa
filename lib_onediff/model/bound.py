"""One UNet module in our care: its layout, its bound parameters, and what it remembers between calls."""
from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Hashable

from torch import nn

from .binding import LAYERS_GONE, Binding
from .call import UNetCall
from .conditioning import PromptMemory
from .forward import Conditioning, condition
from .identity import UNCOUNTED, Edits, Sighting, Signature, digest_of_values
from .layout import UNetLayout, UnsupportedUNet
from .offload import OffloadedWeights
from .on_the_fly import News, OnTheFly
from .operators import Operators
from .patches import HostTraits, Structure, scan
from .read import read_layout
from .weights import Source, Weights

log = logging.getLogger("onediff")

SECONDS_WITHIN_A_SAMPLING = 0.1


class BoundUNet:
    """Keeps layout and binding true to a module that its host may change at any time. Holds no reference to it.

    generation: how often addresses have changed. What was captured under another generation must not be replayed.
    looks: how often everything was looked at again, because a sampling began or something moved.
    samplings: how many samplings were announced.
    channels_last: whether the convolutions' weights were laid out so.
    on_the_fly: what the host applies to the weights at each use.
    offloaded: the weights that are in the computer's memory for the time being.
    prompts: what was computed of prompts alone.
    last_call_ended: when the last call of the UNet ended, by time.perf_counter.
    """

    def __init__(self, unet: nn.Module, host_traits: HostTraits = HostTraits()) -> None:  # noqa: B008
        self._unet = weakref.ref(unet)
        self.host_traits = host_traits
        self._structure: Structure | None = None
        self._sampling_began = True
        self.last_call_ended = 0.0
        self._signature: Signature | None = None
        self._edits: Edits | None = None
        self._all_edits: Edits | None = None
        self.channels_last = False
        self._binding: Binding | None = None
        self._unreadable: str | None = None
        self._refusal: str | None = None
        self._last_prompt = Sighting()
        self.prompts = PromptMemory()
        self.generation = self.looks = 0
        self.on_the_fly = OnTheFly(host_traits.functions, host_traits.casts)
        self.offloaded = OffloadedWeights()
        # Counts the changes of addresses and of what is applied: at equal numbers, what was computed still holds.
        self._revision = 0
        self.samplings = 0
        self._lora: Hashable = None
        # With the number of looks and what the weights were then.
        self._checkpoint: tuple[int, tuple[int, Edits, int], str] | None = None

    @property
    def layout(self) -> UNetLayout:
        layout: UNetLayout = self.binding.layout
        return layout

    @property
    def architecture(self) -> str:
        return self.layout.architecture

    @property
    def module(self) -> nn.Module:
        unet = self._unet()
        if unet is None:
            raise UnsupportedUNet(LAYERS_GONE)
        return unet

    @property
    def has_binding(self) -> bool:
        """Whether it was bound, and its layers are still those."""
        return self._binding is not None

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise UnsupportedUNet("this UNet has not been bound yet")
        return self._binding

    def weights(self) -> Weights:
        """Every layer's tensors as the host computes with them, by path or name; see Binding.weights."""
        return self.on_the_fly.source(self.binding).weights()

    def drop_applied(self) -> None:
        """Give back the memory of what is applied on the fly; the next refresh makes it anew."""
        if self.on_the_fly.drop():
            self._note_moved()

    def weights_now(self) -> tuple[int, Edits]:
        """What the weights are: equal values as long as none was moved, exchanged or, where that can be seen, edited.
        A tenth of a millisecond."""
        known = self._all_edits
        if known is None or (UNCOUNTED not in known.counts and not known.still_true()):
            known = self._all_edits = self.binding.all_edits()
        return self._revision, known

    def weights_in_sampling(self) -> tuple[int, Edits, int]:
        """As weights_now; where edits cannot be seen, also another at every sampling."""
        revision, edits = self.weights_now()
        return revision, edits, self.samplings if UNCOUNTED in edits.counts else 0

    def checkpoint(self) -> str:
        """A digest that tells checkpoints of an architecture apart and is the same under any LoRA that leaves biases
        and norms as they are: only those are looked at. Copies 3 MB of SDXL's from the device and waits for it, when a
        sampling begins with other weights; where they are what they were, it is known."""
        known = self._checkpoint
        if known is None or known[0] != self.looks:
            state = self.weights_in_sampling()
            if known is not None and known[1] == state:
                digest = known[2]
            else:
                vectors = [parameter for parameter in self.binding.parameters() if parameter.dim() == 1]
                digest = digest_of_values(self.architecture, vectors)
            known = self._checkpoint = self.looks, state, digest
        return known[2]

    def begin_sampling(self) -> None:
        """The host says that a new sampling starts: look at everything again at the next call."""
        self._sampling_began = True
        self.samplings += 1
        self.prompts.forget()

    def layout_now(self) -> UNetLayout:
        """The layout as the module tree is now. Raises UnsupportedUNet with the reason."""
        refusal = self._look()
        if refusal is not None:
            raise UnsupportedUNet(refusal)
        return self.layout

    def refresh(
        self, call: UNetCall, by_content: bool, channels_last: bool = False, room: Callable[[], int] | None = None
    ) -> None:
        """Make the binding true for this call. Raises UnsupportedUNet with the reason if that is impossible.

        channels_last: how the weights of convolutions are to lie in memory. room: how many bytes copies of weights may
        take, to which the host applies functions; None: any number.

        The module tree is looked at when a sampling begins: announced by begin_sampling, or seen by a context tensor
        that was not there at the last call, or, where every call brings a new one (by_content), by a pause. Then every
        layer is asked for its parameters; at every other call those that were found are asked where they lie.
        """
        # Parameters that have moved within a sampling come with other changes: a LoRA that is applied at every call
        # from now on, say, because the host has put a part of the weights aside.
        goes_on = self._is_same_sampling(call, by_content) and self.unmoved()
        if not goes_on:
            if self.offloaded and not self.unmoved():
                # The host has moved or exchanged weights, and knows nothing of those that lie elsewhere.
                self._have_restored()
            self.looks += 1
            self._refusal = self._look()
            self._sampling_began = False
            self._last_prompt.remember((call.context, call.y))
        if self._refusal is not None:
            raise UnsupportedUNet(self._refusal)
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(self.binding.layers())
        is_same_lora = True
        if self.host_traits.wanted_lora is not None:
            before, self._lora = self._lora, self.host_traits.wanted_lora()
            is_same_lora = self._lora == before
        if not goes_on:
            self.binding.cast_to = self.on_the_fly.cast_to(self.binding, call.latent.dtype)
        if not (self._stands(goes_on) and channels_last == self.channels_last):
            began = time.perf_counter()
            try:
                copied = self.binding.bind(channels_last)
            except UnsupportedUNet as reason:
                # It stands for as long as they stay where they are.
                self._refusal, self._signature = str(reason), self.binding.signature()
                raise
            self._signature, self.channels_last = self.binding.signature(), channels_last
            self._note_moved()
            goes_on = False
            milliseconds = (time.perf_counter() - began) * 1e3
            log.debug("bound %s: %.0f MiB copied in %.0f ms", self.layout.model_name, copied / 2**20, milliseconds)
        # A LoRA that was merged just now has edited parameters where they lie.
        news = self.on_the_fly.refresh(self.binding, goes_on and is_same_lora, room)
        if news is News.MOVED:
            self._note_moved()
        elif news is News.CHANGED:
            self._revision += 1

    def offload(self, name: str) -> None:
        """Have the weight of a layer, by its path or fused layer's name, in the computer's memory until it is needed.
        Raises what OffloadedWeights.offload raises; note_offloaded has to follow the last."""
        self.binding.offloaded = self.offloaded
        self.offloaded.offload(name, self.binding.layers_of(name))

    def note_offloaded(self) -> None:
        """Graphs that know where the weights lay are of no use."""
        self._signature = self.binding.signature()
        self.generation += 1

    def restore(self) -> None:
        """Have all weights where the UNet is. Raises torch.cuda.OutOfMemoryError; the rest is still offloaded then."""
        if not self.offloaded:
            return
        self._signature = None
        self._note_moved()
        try:
            self.offloaded.restore(self._unet())
        finally:
            if self._binding is not None:
                with contextlib.suppress(UnsupportedUNet):
                    if not self.offloaded:
                        self._binding.bind(self.channels_last)
                    self._signature = self._binding.signature()

    def _have_restored(self) -> None:
        """As restore, by whoever has more to do with it."""
        if self.offloaded:
            self.offloaded.restore_all()
            self.restore()

    def _note_moved(self) -> None:
        """Some weights lie elsewhere now."""
        self.generation += 1
        self._revision += 1

    def goes_on(self, call: UNetCall, by_content: bool, reads_prompt: bool) -> bool:
        """Whether this call belongs to the sampling of the last one, over the same weights in the same places: what
        refresh found then still holds. 0.1 ms for SDXL. reads_prompt: what was computed of the prompt must hold too.

        Within a sampling, hosts move whole blocks: biases and norms go with the matrices beside them. What edits
        weights in place is seen by whoever reads them anew. A LoRA that is merged now is another wanted_lora; what
        makes a host's layers forget which one they hold, as loading a checkpoint does, comes between samplings.
        """
        if self._refusal is not None or self._signature is None or not self._is_same_sampling(call, by_content):
            return False
        if self.host_traits.wanted_lora is not None and self.host_traits.wanted_lora() != self._lora:
            return False
        if reads_prompt and self._edits is None:
            return False
        return self._signature.matrices_stand(self._edits if reads_prompt else None) and (
            not self.on_the_fly.is_asked or self.on_the_fly.stands(self.binding)
        )

    def _is_same_sampling(self, call: UNetCall, by_content: bool) -> bool:
        """Whether this call belongs to the sampling of the last one."""
        if self._sampling_began:
            return False
        if by_content:
            return time.perf_counter() - self.last_call_ended < SECONDS_WITHIN_A_SAMPLING
        return self._last_prompt.recognises((call.context, call.y))

    def unmoved(self) -> bool:
        """Whether the parameters that were bound lie where they lay; half a millisecond."""
        return self._signature is not None and self._signature.still_true()

    def _stands(self, goes_on: bool) -> bool:
        """Whether every parameter lies where it lay. Within a sampling, parameters move but are not exchanged."""
        if self._signature is None:
            return False
        if goes_on:
            # sync_lora may have given a layer another parameter.
            return self.host_traits.sync_lora is None or self._signature.still_true()
        self._edits = self._all_edits = None
        return self._signature == self.binding.signature()

    def _look(self) -> str | None:
        """Look through the module tree, and read it again if it has changed. Returns why it cannot be run, or None."""
        unet = self._unet()
        if unet is None:
            return "the host has unloaded this UNet"
        structure = scan(unet, self.host_traits)
        if structure.patched is not None:
            self.undo_channels_last()
            return structure.patched
        if structure != self._structure:
            self._read(unet, structure)
        return self._unreadable

    def _read(self, unet: nn.Module, structure: Structure) -> None:
        """Find out what the module tree is. Where others have only put something into it that calls bring as patches,
        or have taken that out, weights and graphs stay as they are."""
        layout, self._unreadable = None, None
        try:
            layout = read_layout(unet)
        except UnsupportedUNet as reason:
            self._unreadable = str(reason)
        if layout is not None and self._binding is not None and self._binding.follow(unet, layout):
            self._structure = structure
            return
        self._have_restored()
        self.undo_channels_last()
        self._structure, self._binding, self._signature = structure, None, None
        self._edits = self._all_edits = None
        self.drop_applied()
        if layout is not None:
            self._binding = Binding(unet, layout)

    def conditioning(
        self, ops: Operators, call: UNetCall, by_content: bool, precision: Hashable = (), source: Source | None = None
    ) -> Conditioning:
        """What depends on the prompt alone, computed only when prompt, weights or precision have changed.

        by_content: the host hands over new tensors at every call, so that no prompt is recognised. An inference tensor
        never is. source: whose weights are read, where they are others than the host computes with; precision must
        tell them apart.
        """
        weights = self.weights if source is None else source.weights
        compute = lambda: condition(self.layout, weights(), ops, call.context, call.y)  # noqa: E731
        if by_content or call.context.is_inference():
            return self.prompts.computed_anew(call.context, call.y, compute)
        if self._edits is None or not self._edits.still_true():
            self._edits = self.binding.edits()
        edits = (self._revision, self._edits, precision)
        return self.prompts.conditioning(call.context, call.y, edits, compute)

    def undo_channels_last(self) -> bool:
        """Let the host's own forward find the convolutions' weights as torch makes them. Returns whether they moved."""
        if not self.channels_last or self._binding is None:
            return False
        self._binding.turn_convolutions_back()
        self._signature, self.channels_last = None, False
        self._note_moved()
        return True

    def release(self) -> None:
        """Forget everything and leave ordinary parameters behind, with the same values."""
        self.restore()
        if self._binding is not None:
            self._binding.unbind()
        self._structure = self._signature = self._binding = None
        self._edits = self._all_edits = None
        self.channels_last = False
        self._sampling_began = True
        self.prompts = PromptMemory()
        self.drop_applied()
        self._note_moved()
