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

# How often the host may be asked in one sampling to move weights off the GPU: for 8-bit weights, for a graph, and once
# more for either.
MOST_ASKED = 3
EIGHT_BITS = " (the options Low-bit and Low-bit only keep most of them on the GPU, in 8 bits)"


class Network:
    """A module that OneDiff serves, with everything derived from it.

    bound: its layout, weights and epoch, and the search for changes.
    settings: those given with the network, in place of the runtime's; None: the runtime's apply.
    plans: plan.Plan by Call.signature, for calls like earlier ones of this sampling.
    runners: CachedRunner by shape; see runner.
    step_memories: the memories of step policies, by their names.
    sampling: the sampling in progress that was announced for this network alone; None if there is none.
    samplings: the number of samplings that its host has announced.
    in_sampling: whether an announced sampling is in progress.
    weights: the result of the last identity(); "" before.
    low_bit: its 8-bit weights; None if none are in use.
    low_bit_choice: the classes of layers that use them, once their errors were measured.
    served_last: whether we have served the last call of this sampling; outside of samplings, the last call.
    no_room_for_low_bit: whether GPU memory was too small in this sampling for 8-bit weights.
    asked_for_room: how often the host was asked in this sampling to move weights off the GPU.
    """

    def __init__(
        self, unet: nn.Module, settings: Settings | None, host_traits: HostTraits, bound: BoundNetwork | None = None,
        families: Families = FAMILIES,
    ) -> None:
        """unet: the host's module, of any family. host_traits: its adapter's. bound: by default a BoundNetwork of the
        module; the second GPU's copy has a MirrorNetwork. families: those that may serve it."""
        self._families = families
        self.settings = settings
        self.bound = bound or BoundNetwork(unet, families.read, host_traits, families.units)
        self.served_last = False
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
        self.asked_for_room = 0
        self.runners: dict[ShapeKey, CachedRunner] = {}
        # By image size: bytes of GPU memory beside the weights that the steps of earlier samplings needed.
        self._bytes_needed: dict[Hashable, int] = {}
        # The image size of this sampling, and the bytes beside the weights that its steps have.
        self._image_size: Hashable = None
        self._bytes_had = 0

    def begin_sampling(self) -> None:
        """Begin a sampling that the host has announced: drop the plans, and allow another try of what has failed in the
        last sampling (reading the network, room for 8-bit weights, asking the host for room)."""
        self.served_last = False
        self.no_room_for_low_bit = False
        self.asked_for_room = 0
        self.plans.clear()
        self.samplings += 1
        self.in_sampling = True
        self.bound.retry()

    def end_sampling(self) -> None:
        """End the sampling: drop the memories of step policies."""
        self.sampling = None
        self.step_memories.clear()
        self.in_sampling = False

    @property
    def sampling_now(self) -> int | None:
        """The number of the sampling in progress; None if there is none."""
        return self.samplings if self.in_sampling else None

    def identity(self) -> str:
        """A digest of the weights, by which verdicts are stored: of the weights as they are now, or, in an announced
        sampling, as they were at its first call. Also sets `weights`. See BoundNetwork.identity."""
        self.weights = self.bound.identity(self.sampling_now)
        return self.weights

    def checkpoint(self) -> str:
        """A digest of the checkpoint, by which measured errors of Low-bit are stored. LoRAs do not change it; see
        BoundNetwork.checkpoint."""
        return self.bound.checkpoint(self.sampling_now)

    @property
    def architecture(self) -> str | None:
        """The name of the architecture in a ShapeKey; None before the first call."""
        return str(self.bound.layout.architecture) if self.bound.has_binding else None

    def refuse_call(self, call: Call) -> None:
        """Raise Refusal, with the reason, if a call's inputs do not fit the bound network."""
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
        """Quantize the present weights of these layers to eight bits, and keep them.

        Layers are quantized one after the other, so that at most one weight from main memory is on the GPU at a time.
        round_rows: rounds rows of a weight to eight bits. wanted: the format of each layer, by its name. left_out,
        are_alone: see LowBitWeights. Raises torch.cuda.OutOfMemoryError.
        """
        if self.low_bit is None or self.low_bit.layout != self.bound.layout:
            self.low_bit = LowBitWeights(self.bound.layout, round_rows, left_out, are_alone)
        operand_of = partial(merged_operand, self.bound.binding, self.bound.on_the_fly)
        self.low_bit.fit(self._low_bit_state, operand_of, wanted)
        self.bound.watch_contents(whole=False)

    def _low_bit_state(self) -> object:
        """A value that changes when the weights that were quantized change: the epoch's values, and a checksum over the
        first rows of weights in main memory, because torch does not count all edits of these."""
        streaming = self.bound.streaming
        low_bit = self.low_bit
        uncounted = 0 if streaming is None or low_bit is None else streaming.content(sorted(low_bit.names()))
        return self.bound.epoch.values, uncounted

    def low_bit_is_unchanged(self) -> bool:
        """Whether there are 8-bit weights, and the weights have not changed since they were quantized."""
        return self.low_bit is not None and self.low_bit.fitted_to == self._low_bit_state()

    def source(self, lossy: Lossy, call: Call, layers: Collection[str] | None = None) -> Source:
        """The weights for a call, with 8-bit weights if lossy names some.

        layers: the names of the layers that use their 8-bit weights; None: all that have some.
        """
        bound = self.bound
        low_bit = self.low_bit
        if not lossy.low_bit or low_bit is None:
            return source_of(bound, call)
        alone = self._alone(lossy) if layers is None else frozenset[str]()
        kept = low_bit.kept(KINDS_OF[lossy.low_bit], layers)
        return source_of(bound, call, WithLowBit(kept, low_bit.gated_scales, bound.binding.dtype, alone))

    def _alone(self, lossy: Lossy) -> frozenset[str]:
        """The names of the layers with only their 8-bit weight on the GPU. Their own weight stays in main memory, and
        is not copied for a call."""
        bound = self.bound
        low_bit = self.low_bit
        if not lossy.low_bit or low_bit is None:
            return frozenset()
        return low_bit.linear_names(KINDS_OF[lossy.low_bit]) & bound.binding.away

    def streamed(self, lossy: Lossy, settings: Settings) -> str:
        """How much of the weights is copied at every call, as a sentence for the user; "" for nothing."""
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
        for users; () if nothing. As of the last refresh; see OnTheFly.marks."""
        return self.bound.on_the_fly.marks(self.bound.binding)

    def runner(self, key: ShapeKey, cut: Cut | None = None) -> Runner | None:
        """The runner of a shape, which replays its graph. None if there is none, or if the weights or the memory of its
        cut have moved since it was made: then it is dropped. cut: of the call, if it computes only a part."""
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
        """Keep a new runner for a shape, and drop the runners of all shapes that were made at other addresses of the
        weights."""
        addresses = self.bound.epoch.addresses
        runners = {other: kept for other, kept in self.runners.items() if kept.addresses == addresses}
        runners[key] = CachedRunner(addresses, runner)
        self._keep_runners(runners)

    def keep_plan(self, signature: Hashable, plan: Any) -> None:
        """Keep a plan for later calls of this signature, and drop plans made under other settings."""
        plans = {one: kept for one, kept in self.plans.items() if kept.settings is plan.settings}
        plans[signature] = plan
        self.plans = plans

    def _keep_runners(self, runners: dict[ShapeKey, CachedRunner]) -> None:
        """Replace all runners by these, and drop the plans whose runner is not among them."""
        self.runners = runners
        alive = {id(kept.runner) for kept in runners.values()}
        self.plans = {signature: plan for signature, plan in self.plans.items() if id(plan.runner) in alive}

    def cut_memory(self, shape: Hashable) -> CutMemory:
        """The memory in which a full pass of a cut network leaves hidden states for cached passes; see CutMemory. The
        same object is returned for a shape as long as anything, such as a graph, refers to it; then a new one."""
        memory = self._cut_memories.get(shape)
        if memory is None:
            memory = self._cut_memories[shape] = CutMemory()
        return memory

    def deepest(self) -> int:
        """The largest depth at which the network can be cut in two, see core.call.Cut; 0 if it cannot. Raises Refusal
        if the network's modules cannot be read."""
        layout = self.bound.layout if self.bound.has_binding else self.bound.layout_now()
        return self._families.of(layout).deepest(layout)

    def schedule(self) -> str:
        """The name of DeepCache's schedule for this network; see core.family.Family.schedule. Raises Refusal if the
        network's modules cannot be read."""
        layout = self.bound.layout if self.bound.has_binding else self.bound.layout_now()
        return self._families.of(layout).schedule

    def drop_runners(self, keys: Collection[ShapeKey] | None = None) -> None:
        """Drop the graphs of these shapes, and the plans that replay them. None: drop all, with the memories of step
        policies, 8-bit weights and what BoundNetwork.drop_applied frees."""
        kept = {} if keys is None else {key: one for key, one in self.runners.items() if key not in keys}
        self._keep_runners(kept)
        if keys is None:
            self.step_memories.clear()
            self.low_bit = None
            self.bound.drop_applied()

    def make_room(self, byte_count: int, is_urgent: bool = False) -> bool:
        """Ask the host to move so many bytes of weights off the GPU. Returns whether it has moved any.

        The host is asked only if it keeps a part of the weights in main memory anyway, or if is_urgent: the host itself
        has run out of memory. It is asked at most MOST_ASKED times in a sampling; after that, returns False.
        """
        if (self.bound.streaming is None and not is_urgent) or self.asked_for_room >= MOST_ASKED:
            return False
        self.asked_for_room += 1
        unet = self.bound.module
        # In the inference mode that the parameters were created in, so that the moved ones are of the same kind.
        with torch.no_grad(), torch.inference_mode(next(unet.parameters()).is_inference()):
            freed = self.bound.host_traits.make_room(unet, byte_count)
        self._bytes_had += freed
        if freed and self.bound.streaming is not None:
            self._bytes_needed[self._image_size] = self._bytes_had
        return freed > 0

    def room_lacked(self, image_size: Hashable) -> int:
        """Bytes of GPU memory that the host should leave free before a sampling: those that the steps of earlier
        samplings at this image size needed beside the weights, minus those that OneDiff has allocated already; 0 if
        none are known. Called once before a sampling, because the bytes are remembered for note_left_over() and
        make_room().

        The memory of graphs does not count as allocated, because hosts count it as free.
        """
        allocated = self.bound.bytes + (0 if self.low_bit is None else self.low_bit.bytes)
        lacking = max(0, self._bytes_needed.get(image_size, 0) - allocated)
        self._image_size = image_size
        self._bytes_had = allocated + lacking
        return lacking

    def note_left_over(self, byte_count: int) -> None:
        """Note how many bytes more than necessary are free after a capture (negative: lacking). Before the next
        sampling at this image size, room_lacked() returns so many fewer.

        Ignored if no weights are streamed, or if the host was asked for room in this sampling, which counts them
        itself.
        """
        if self.bound.streaming is not None and not self.asked_for_room:
            self._bytes_needed[self._image_size] = self._bytes_had - byte_count

    def let_go_if_moved(self) -> None:
        """Drop graphs, and everything else of ours that takes GPU memory, if the weights are no longer where they were
        at the last call, as when the host has moved the network off the GPU. Takes half a millisecond."""
        holds = (
            self.runners or self.low_bit is not None or self.bound.bytes
            or any(memory.keeps_tensors for memory in self.step_memories.values())
        )
        if holds and not self.bound.unmoved():
            self.drop_runners()
