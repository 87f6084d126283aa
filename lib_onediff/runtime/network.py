"""The runtime's record of one network: its binding, plans, runners and sampling."""
from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.call import Call, Cut, CutMemory
from ..core.device import CachedRunner, Runner
from ..core.key import Lossy, ShapeKey
from ..core.layer_weights import Source
from ..core.policy import StepMemory
from ..core.precision import autocast_dtype
from ..core.refusal import Refusal
from ..core.sampling import Sampling
from ..core.settings import Settings
from ..core.units import MEBIBYTE
from ..families.registry import FAMILIES, Families
from ..weights.bound import BoundNetwork
from ..weights.low_bit import KINDS_OF, LowBitWeights, Round, WantedKinds
from ..weights.operands import WithLowBit, merged_operand, source_of
from ..weights.scan import HostTraits
from .low_bit_errors import Choice

# How often the host may be asked in one sampling to move weights off the GPU: for 8-bit weights, for calls that ran out
# of memory (FullGpu), and for a graph.
MOST_ASKED = 3
# A hint for users, at the end of Network.streamed.
EIGHT_BITS = " (the options Low-bit and Low-bit only keep most of them on the GPU, in 8 bits)"


class Network:
    """A module that OneDiff serves, with everything derived from it.

    bound: the module's layout, its weights and epoch, and the search for changes.
    settings: the settings given with the network, in place of the runtime's; None: the runtime's apply.
    plans: plan.Plan by Call.signature, for calls like earlier ones of this sampling.
    runners: CachedRunner by shape; see runner().
    step_memories: the memories of step policies, by the policies' names.
    sampling: the sampling in progress that was announced for this network alone; None if there is none.
    samplings: the number of samplings that the host has announced for this network.
    in_sampling: whether an announced sampling is in progress.
    weights: the result of the last identity(); "" before.
    low_bit: the 8-bit weights that were quantized for the option Low-bit; None if there are none.
    low_bit_choice: which classes of layers are in eight bits, by their measured errors; None if errors were not
        measured, and if they do not matter ("Low-bit only", or no budget).
    has_served: in an announced sampling, whether OneDiff, and not the host, has served a call of it; outside of
        samplings, whether it has served the last call that had no plan.
    no_room_for_low_bit: whether GPU memory was too small in this sampling for 8-bit weights.
    no_room: the calls of this sampling that ran out of GPU memory: by Call.signature, the bytes that could be allocated
        for them, which were not enough. Empty again after the host has moved weights.
    asked_for_room: how often the host was asked in this sampling to move weights off the GPU.
    """

    def __init__(
        self, unet: nn.Module, settings: Settings | None, host_traits: HostTraits, bound: BoundNetwork | None = None,
        families: Families = FAMILIES,
    ) -> None:
        """unet: the host's module, of any family. host_traits: the HostTraits of the host's adapter. bound: None for a
        new BoundNetwork of the module; the copy on a second GPU has a MirrorNetwork. families: the families that may
        serve the module."""
        self._families = families
        self.settings = settings
        self.bound = bound or BoundNetwork(unet, families.read, host_traits, families.units)
        self.has_served = False
        self.plans: dict[Hashable, Any] = {}
        self.step_memories: dict[str, StepMemory] = {}
        self._cut_memories: weakref.WeakValueDictionary[Hashable, CutMemory] = weakref.WeakValueDictionary()
        self.sampling: Sampling | None = None
        self.samplings = 0
        self.in_sampling = False
        self.weights = ""
        self.low_bit: LowBitWeights | None = None
        self.low_bit_choice: Choice | None = None
        self.no_room_for_low_bit = False
        self.no_room: dict[Hashable, int] = {}
        self.asked_for_room = 0
        self.runners: dict[ShapeKey, CachedRunner] = {}
        # By image size: bytes of GPU memory beside the weights that the steps of earlier samplings needed.
        self._bytes_needed: dict[Hashable, int] = {}
        # The image size of this sampling, and the bytes beside the weights that its steps have.
        self._image_size: Hashable = None
        self._bytes_had = 0

    def begin_sampling(self) -> None:
        """Begin a sampling that the host has announced: drop the plans, and let the calls try again to read the
        network, to compute, to make 8-bit weights, and to ask the host for room, if one of these has failed in the last
        sampling."""
        self.has_served = False
        self.no_room_for_low_bit = False
        self.no_room.clear()
        self.asked_for_room = 0
        self.plans.clear()
        self.samplings += 1
        self.in_sampling = True
        self.bound.retry()

    def end_sampling(self) -> None:
        """End the sampling: drop the memories of step policies, and let calls be tried that ran out of GPU memory."""
        self.sampling = None
        self.no_room.clear()
        self.step_memories.clear()
        self.in_sampling = False

    @property
    def sampling_now(self) -> int | None:
        """The number of the sampling in progress; None if there is none."""
        return self.samplings if self.in_sampling else None

    def identity(self) -> str:
        """A digest of the weights, by which verdicts are stored. In an announced sampling, it is the digest of the
        weights as they were at the sampling's first call; otherwise, of the weights as they are now. Also sets
        `weights`."""
        self.weights = self.bound.identity(self.sampling_now)
        return self.weights

    def checkpoint(self) -> str:
        """A digest of the checkpoint, by which measured errors of Low-bit are stored. LoRAs do not change the digest;
        see BoundNetwork.checkpoint."""
        return self.bound.checkpoint(self.sampling_now)

    @property
    def architecture(self) -> str | None:
        """The name of the architecture in a ShapeKey; None before the first call."""
        return str(self.bound.layout.architecture) if self.bound.has_binding else None

    def refuse_call(self, call: Call) -> None:
        """Raise Refusal, with the reason for users, if the host must compute a call: because its inputs do not fit the
        bound network, because the latent's dtype or autocast's is not the weights', or because other extensions have
        replaced parts of the network and the call has neither patches nor additions."""
        binding = self.bound.binding
        self._families.of(binding.layout).refuse_call(binding.layout, call)
        if binding.layout.foreign and call.patches is None and not call.additions:
            raise Refusal(f"other extensions have replaced parts of the UNet: {', '.join(binding.layout.foreign)}")
        autocast = autocast_dtype(call.latent.device.type)
        # If the host casts its weights at each use, autocast casts inputs of any dtype to the same one.
        casts_inputs = binding.cast_to is not None and autocast == binding.cast_to
        if call.latent.dtype != binding.dtype and not casts_inputs:
            raise Refusal(f"the latent is in {call.latent.dtype}, but the model's weights are in {binding.dtype}")
        if autocast not in (None, binding.dtype):
            raise Refusal(f"PyTorch's autocast computes in {autocast}, but the model's weights are in {binding.dtype}")

    def fit_low_bit(
        self, round_rows: Round, wanted: WantedKinds, left_out: frozenset[str] = frozenset(), are_alone: bool = False
    ) -> None:
        """Quantize the present weights of these layers to eight bits, and keep the 8-bit weights in `low_bit`. Layers
        with 8-bit weights of the present weights are not quantized again, and other layers' 8-bit weights stay.

        Layers are quantized one after the other, so that at most one weight from main memory is on the GPU at a time.
        round_rows: rounds rows of a weight to eight bits. wanted: the format of each layer, by the layer's name.
        left_out, are_alone: see LowBitWeights; they have no effect if the network has 8-bit weights already. Raises
        torch.cuda.OutOfMemoryError.
        """
        if self.low_bit is None or self.low_bit.layout != self.bound.layout:
            self.low_bit = LowBitWeights(self.bound.layout, round_rows, left_out, are_alone)
        operand_of = partial(merged_operand, self.bound.binding, self.bound.on_the_fly)
        self.low_bit.fit(self._low_bit_state, operand_of, wanted)
        self.bound.watch_contents(whole=False)

    def _low_bit_state(self) -> object:
        """A value that differs after a change of the weights that were quantized: the epoch's values, and a checksum
        over the first rows of weights in main memory, because torch does not count all edits of these."""
        streaming = self.bound.streaming
        low_bit = self.low_bit
        uncounted = 0 if streaming is None or low_bit is None else streaming.content(sorted(low_bit.names()))
        return self.bound.epoch.values, uncounted

    def low_bit_is_unchanged(self) -> bool:
        """Whether there are 8-bit weights, and the host's weights have not changed since these were quantized. False if
        there are none."""
        return self.low_bit is not None and self.low_bit.fitted_to == self._low_bit_state()

    def source(self, lossy: Lossy, call: Call, layers: Collection[str] | None = None) -> Source:
        """The weights for a call. Layers with 8-bit weights in the formats of lossy.low_bit use them; none does if
        lossy.low_bit is "" or the network has no 8-bit weights.

        layers: the names of the only layers that may use their 8-bit weights; None: all layers.
        """
        bound = self.bound
        low_bit = self.low_bit
        if not lossy.low_bit or low_bit is None:
            return source_of(bound, call)
        alone = self._alone(lossy) if layers is None else frozenset[str]()
        kept = low_bit.kept(KINDS_OF[lossy.low_bit], layers)
        return source_of(bound, call, WithLowBit(kept, low_bit.gated_scales, bound.binding.dtype, alone))

    def _alone(self, lossy: Lossy) -> frozenset[str]:
        """The names of the layers that have an 8-bit weight on the GPU in a format of lossy.low_bit, and their own
        weight in main memory: it is not copied for a call."""
        bound = self.bound
        low_bit = self.low_bit
        if not lossy.low_bit or low_bit is None:
            return frozenset()
        return low_bit.linear_names(KINDS_OF[lossy.low_bit]) & bound.binding.away

    def streamed(self, lossy: Lossy, settings: Settings) -> str:
        """How much of the weights is copied from main memory at every call, as a sentence for the user; "" if nothing
        is copied."""
        streaming = self.bound.streaming
        copied = 0 if streaming is None else streaming.copied(self._alone(lossy))
        if not copied:
            return ""
        hint = "" if settings.low_bit_only or self.bound.binding.dtype == torch.float32 else EIGHT_BITS
        return f"{copied / MEBIBYTE:.0f} MiB of its weights are copied from main memory at every step{hint}"

    @property
    def has_wide_norms(self) -> bool:
        """Whether the host computes norms in float32, at the last refresh; see OnTheFly.has_wide_norms."""
        return self.bound.on_the_fly.has_wide_norms(self.bound.binding)

    @property
    def weight_marks(self) -> tuple[str, ...]:
        """A phrase for each thing that the host does to its weights at each use, such as a cast, for a shape's key and
        for users; () if it does nothing. As of the last refresh; see OnTheFly.marks."""
        return self.bound.on_the_fly.marks(self.bound.binding)

    def runner(self, key: ShapeKey, cut: Cut | None = None) -> Runner | None:
        """The runner of a shape, which replays the shape's graph. None if there is none, or if the weights have moved
        since the runner was made, or it was made for another cut memory than the call's: then the runner is dropped.
        cut: the call's cut; None if the call computes the whole network at once."""
        kept = self.runners.get(key)
        if kept is None:
            return None
        own = kept.runner.inputs.cut
        own_memory = None if own is None else own.memory
        cut_memory = None if cut is None else cut.memory
        if kept.addresses == self.bound.epoch.addresses and own_memory is cut_memory:
            return kept.runner
        self._keep_runners({other: one for other, one in self.runners.items() if other != key})
        return None

    def keep(self, key: ShapeKey, runner: Runner) -> None:
        """Keep a new runner for a shape, and drop all runners that were made when the weights were at other
        addresses."""
        addresses = self.bound.epoch.addresses
        runners = {other: kept for other, kept in self.runners.items() if kept.addresses == addresses}
        runners[key] = CachedRunner(addresses, runner)
        self._keep_runners(runners)

    def keep_plan(self, signature: Hashable, plan: Any) -> None:
        """Keep a plan for later calls of this signature, and drop all plans made under another Settings object."""
        plans = {one: kept for one, kept in self.plans.items() if kept.settings is plan.settings}
        plans[signature] = plan
        self.plans = plans

    def _keep_runners(self, runners: dict[ShapeKey, CachedRunner]) -> None:
        """Replace all runners by these, and drop the plans whose runner is not among them."""
        self.runners = runners
        alive = {id(kept.runner) for kept in runners.values()}
        self.plans = {signature: plan for signature, plan in self.plans.items() if id(plan.runner) in alive}

    def cut_memory(self, shape: Hashable) -> CutMemory:
        """The memory in which a full pass of a cut network leaves hidden states for cached passes; see CutMemory. While
        anything, such as a graph, refers to a shape's memory, the same object is returned for the shape; otherwise a
        new one."""
        memory = self._cut_memories.get(shape)
        if memory is None:
            memory = self._cut_memories[shape] = CutMemory()
        return memory

    def deepest(self) -> int:
        """The largest depth at which the network can be cut in two (core.call.Cut); 0 if it cannot be cut. Raises
        Refusal if the network's modules cannot be read."""
        layout = self.bound.layout if self.bound.has_binding else self.bound.layout_now()
        return self._families.of(layout).deepest(layout)

    def schedule(self) -> str:
        """The name of DeepCache's schedule for this network; see core.family.Family.schedule. Raises Refusal if the
        network's modules cannot be read."""
        layout = self.bound.layout if self.bound.has_binding else self.bound.layout_now()
        return self._families.of(layout).schedule

    def drop_runners(self, keys: Collection[ShapeKey] | None = None) -> None:
        """Drop the graphs of these shapes, and the plans that replay them. keys None: drop all graphs and plans, the
        memories of step policies, the 8-bit weights, and the tensors that BoundNetwork.drop_applied frees."""
        kept = {} if keys is None else {key: one for key, one in self.runners.items() if key not in keys}
        self._keep_runners(kept)
        if keys is None:
            self.step_memories.clear()
            self.low_bit = None
            self.bound.drop_applied()

    def make_room(self, byte_count: int, is_urgent: bool = False) -> bool:
        """Ask the host to move byte_count bytes of weights off the GPU. Returns whether it has moved any weights.

        The host is asked only if it keeps a part of the weights in main memory anyway, or if is_urgent: the host itself
        has run out of memory. It is asked at most MOST_ASKED times in a sampling. Returns False if it is not asked.
        """
        is_streamed = self.bound.is_partly_away
        if not (is_streamed or is_urgent) or self.asked_for_room >= MOST_ASKED:
            return False
        self.asked_for_room += 1
        unet = self.bound.module
        # In the inference mode that the parameters were created in, so that the moved ones are of the same kind.
        with torch.no_grad(), torch.inference_mode(next(unet.parameters()).is_inference()):
            freed = self.bound.host_traits.make_room(unet, byte_count)
        self._bytes_had += freed
        if freed:
            self.no_room.clear()
        if freed and is_streamed:
            self._bytes_needed[self._image_size] = self._bytes_had
        return freed > 0

    def room_lacked(self, image_size: Hashable) -> int:
        """Bytes of GPU memory that the host should leave free before a sampling: the bytes beside the weights that the
        steps of earlier samplings at this image size needed, minus the bytes that OneDiff has allocated already; 0 if
        there was no such sampling. Called once before a sampling, because note_left_over() and make_room() correct the
        remembered bytes for this image size.

        The memory of graphs does not count as allocated, because hosts count it as free.
        """
        allocated = self.bound.bytes + (0 if self.low_bit is None else self.low_bit.bytes)
        lacking = max(0, self._bytes_needed.get(image_size, 0) - allocated)
        self._image_size = image_size
        self._bytes_had = allocated + lacking
        return lacking

    def note_left_over(self, byte_count: int) -> None:
        """Note how many bytes more than necessary are free after a capture (negative: lacking), so that room_lacked()
        returns that many fewer before the next sampling at this image size.

        Does nothing if no weights are streamed, or if the host was asked for room in this sampling: then make_room()
        has noted the bytes.
        """
        if self.bound.streaming is not None and not self.asked_for_room:
            self._bytes_needed[self._image_size] = self._bytes_had - byte_count

    def let_go_if_moved(self) -> None:
        """Drop graphs, and everything else of ours that takes GPU memory, if the weights have moved since the last
        call, for example because the host has moved the network off the GPU. Takes half a millisecond."""
        holds = (
            self.runners or self.low_bit is not None or self.bound.bytes
            or any(memory.keeps_tensors for memory in self.step_memories.values())
        )
        if holds and not self.bound.unmoved():
            self.drop_runners()
