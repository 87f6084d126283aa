"""What the runtime keeps for one network in care: its binding, plans, runners and sampling."""
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
from ..weights.bound import BoundUNet
from ..weights.low_bit import KINDS_OF, LowBitWeights, Round, WantedKinds
from ..weights.operands import WithLowBit, merged_operand, source_of
from ..weights.scan import HostTraits
from .low_bit_errors import Choice

# How often the host is asked in one sampling to take weights off the GPU: for weights in eight bits, for a graph, and
# once more for either.
MOST_ASKED = 3
EIGHT_BITS = " (Low-bit and Low-bit only keep most of them on the GPU, in 8 bits)"


class Network:
    """A module in our care, with everything that was derived from it.

    bound: its layout, its weights, the look for changes, and the epoch. settings: its own; None: the runtime's.
    plans: how calls are computed that are like earlier ones of this sampling, each a plan.Plan, by Call.signature.
    runners: by shape; see runner.
    step_memories: what step policies keep of its calls, by their names.
    sampling: what its own host says of the sampling in progress; None where that host says nothing.
    samplings: how many samplings its host has announced. in_sampling: whether one goes on.
    weights: the digest of the weights of the last call; see identity.
    low_bit: the weights in eight bits, while they are used.
    low_bit_choice: the classes of layers that use them, once that was measured.
    served_last: whether we have served the last call, in this sampling where its host announces them.
    no_room_for_low_bit: whether memory was too short in this sampling for the weights in eight bits.
    asked_for_room: how often the host was asked in this sampling to take weights off the GPU.
    """

    def __init__(
        self, unet: nn.Module, settings: Settings | None, host_traits: HostTraits, bound: BoundUNet | None = None,
        families: Families = FAMILIES,
    ) -> None:
        """bound: the UNet, where it is bound in another way than a host's."""
        self._families = families
        self.settings = settings
        self.bound = bound or BoundUNet(unet, families.read, host_traits, families.units)
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
        # GPU memory that the steps of earlier samplings have needed beside the weights, in bytes by image size.
        self._bytes_needed: dict[Hashable, int] = {}
        # The image size of this sampling, and the bytes that its steps have beside the weights.
        self._image_size: Hashable = None
        self._bytes_had = 0

    def begin_sampling(self) -> None:
        """The host announces a sampling: what the last one has found out is looked at anew."""
        self.served_last = False
        self.no_room_for_low_bit = False
        self.asked_for_room = 0
        self.plans.clear()
        self.samplings += 1
        self.in_sampling = True
        self.bound.retry()

    def end_sampling(self) -> None:
        """The host says that the sampling is over."""
        self.sampling = None
        self.step_memories.clear()
        self.in_sampling = False

    @property
    def sampling_now(self) -> int | None:
        """The number of the sampling in progress; None outside of any."""
        return self.samplings if self.in_sampling else None

    def identity(self) -> str:
        """The key of verdicts over the weights as they are now, or were at the first call of this sampling; see
        BoundUNet.identity."""
        self.weights = self.bound.identity(self.sampling_now)
        return self.weights

    def checkpoint(self) -> str:
        """The key of measurements; see BoundUNet.checkpoint."""
        return self.bound.checkpoint(self.sampling_now)

    @property
    def architecture(self) -> str | None:
        """The architecture of the UNet; None before its first call."""
        return str(self.bound.layout.architecture) if self.bound.has_binding else None

    def refuse_call(self, call: Call) -> None:
        """Raise Refusal with the reason where the inputs of a call do not fit the bound UNet."""
        binding = self.bound.binding
        self._families.of(binding.layout).refuse_call(binding.layout, call)
        if binding.layout.foreign and call.patches is None and not call.additions:
            raise Refusal(f"other extensions have replaced parts of the UNet: {', '.join(binding.layout.foreign)}")
        autocast = autocast_dtype(call.latent.device.type)
        # Where the host casts its weights at each use, autocast takes inputs of any type to the same.
        casts_inputs = binding.cast_to is not None and autocast == binding.cast_to
        if call.latent.dtype != binding.dtype and not casts_inputs:
            raise Refusal(f"the UNet's weights are {binding.dtype}, the latent is {call.latent.dtype}")
        if autocast not in (None, binding.dtype):
            raise Refusal(f"autocast to {autocast} is on, but the UNet's weights are {binding.dtype}")

    def fit_low_bit(
        self, round_rows: Round, wanted: WantedKinds, left_out: frozenset[str] = frozenset(), are_alone: bool = False
    ) -> None:
        """Keep these layers' weights in eight bits, rounded from what they are now; layer by layer, so that no more
        than one of those in main memory is on the GPU at a time. left_out, are_alone: see LowBitWeights. Raises
        torch.cuda.OutOfMemoryError."""
        if self.low_bit is None or self.low_bit.layout != self.bound.layout:
            self.low_bit = LowBitWeights(self.bound.layout, round_rows, left_out, are_alone)
        operand_of = partial(merged_operand, self.bound.binding, self.bound.on_the_fly)
        self.low_bit.fit(self._low_bit_state, operand_of, wanted)
        self.bound.watch_contents(whole=False)

    def _low_bit_state(self) -> object:
        """What the weights in eight bits are rounded from, to compare later: the version of the values, and a
        checksum of the first rows of those in main memory, whose edits are not all counted."""
        streaming = self.bound.streaming
        low_bit = self.low_bit
        uncounted = 0 if streaming is None or low_bit is None else streaming.content(sorted(low_bit.names()))
        return self.bound.epoch.values, uncounted

    def low_bit_stands(self) -> bool:
        """Whether the weights in eight bits are still those that were rounded."""
        return self.low_bit is not None and self.low_bit.fitted_to == self._low_bit_state()

    def source(self, lossy: Lossy, call: Call, layers: Collection[str] | None = None) -> Source:
        """The weights for a call, those in eight bits among them where they are wanted. layers: the names of the layers
        that take their weights in eight bits; None: all that have them."""
        bound = self.bound
        low_bit = self.low_bit
        if not lossy.low_bit or low_bit is None:
            return source_of(bound, call)
        alone = self._alone(lossy) if layers is None else frozenset[str]()
        kept = low_bit.kept(KINDS_OF[lossy.low_bit], layers)
        return source_of(bound, call, WithLowBit(kept, low_bit.gated_scales, bound.binding.dtype, alone))

    def _alone(self, lossy: Lossy) -> frozenset[str]:
        """Names of the layers of which the GPU has the 8-bit weight alone. Their own weight is in main memory, and is
        not copied for a call."""
        bound = self.bound
        low_bit = self.low_bit
        if not lossy.low_bit or low_bit is None:
            return frozenset()
        return low_bit.linear_names(KINDS_OF[lossy.low_bit]) & bound.binding.away

    def streamed(self, lossy: Lossy, settings: Settings) -> str:
        """What of the weights is copied at every call, in words for the user; "" for nothing."""
        streaming = self.bound.streaming
        copied = 0 if streaming is None else streaming.copied(self._alone(lossy))
        if not copied:
            return ""
        hint = "" if settings.low_bit_only or self.bound.binding.dtype == torch.float32 else EIGHT_BITS
        return f"{copied / MEBIBYTE:.0f} MiB of its weights are copied from main memory at every step{hint}"

    @property
    def has_wide_norms(self) -> bool:
        """See OnTheFly.has_wide_norms; of the last refresh."""
        return self.bound.on_the_fly.has_wide_norms(self.bound.binding)

    @property
    def weight_marks(self) -> tuple[str, ...]:
        """How the host computes with its weights where it does not take them as they are, in words for a shape's key,
        by the last refresh; see OnTheFly.marks."""
        return self.bound.on_the_fly.marks(self.bound.binding)

    def runner(self, key: ShapeKey, cut: Cut | None = None) -> Runner | None:
        """The runner for a shape, unless weights or the memory of its cut have moved since it was made."""
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
        """Keep a runner that was made just now; those that weights have moved away from go."""
        addresses = self.bound.epoch.addresses
        runners = {other: kept for other, kept in self.runners.items() if kept.addresses == addresses}
        runners[key] = CachedRunner(addresses, runner)
        self._keep_runners(runners)

    def keep_plan(self, signature: Hashable, plan: Any) -> None:
        """Compute later calls of this signature by a plan. Plans that were made under other settings go."""
        plans = {one: kept for one, kept in self.plans.items() if kept.settings is plan.settings}
        plans[signature] = plan
        self.plans = plans

    def _keep_runners(self, runners: dict[ShapeKey, CachedRunner]) -> None:
        """Keep these runners alone: the plans that replay others go with them."""
        self.runners = runners
        alive = {id(kept.runner) for kept in runners.values()}
        self.plans = {signature: plan for signature, plan in self.plans.items() if id(plan.runner) in alive}

    def cut_memory(self, shape: Hashable) -> CutMemory:
        """The memory of a cut at a shape, the same as long as a graph or anybody else holds it."""
        memory = self._cut_memories.get(shape)
        if memory is None:
            memory = self._cut_memories[shape] = CutMemory()
        return memory

    def deepest(self) -> int:
        """The largest depth at which the UNet can be cut in two. Raises Refusal."""
        layout = self.bound.layout if self.bound.has_binding else self.bound.layout_now()
        return self._families.of(layout).deepest(layout)

    def drop_runners(self, keys: Collection[ShapeKey] | None = None) -> None:
        """Drop the graphs of these shapes; None: of all. With the last one goes their memory."""
        kept = {} if keys is None else {key: one for key, one in self.runners.items() if key not in keys}
        self._keep_runners(kept)
        if keys is None:
            self.step_memories.clear()
            self.low_bit = None
            self.bound.drop_applied()

    def make_room(self, byte_count: int, is_urgent: bool = False) -> bool:
        """Have the host take so many bytes of weights off the GPU, where it keeps a part of them in main memory anyway.
        is_urgent: or else the host itself would run out of memory. Returns whether it has taken any."""
        if (self.bound.streaming is None and not is_urgent) or self.asked_for_room >= MOST_ASKED:
            return False
        self.asked_for_room += 1
        unet = self.bound.module
        # In the inference mode that the parameters were made in: the host moves them so, and they keep it.
        with torch.no_grad(), torch.inference_mode(next(unet.parameters()).is_inference()):
            freed = self.bound.host_traits.make_room(unet, byte_count)
        self._bytes_had += freed
        if freed and self.bound.streaming is not None:
            self._bytes_needed[self._image_size] = self._bytes_had
        return freed > 0

    def room_lacked(self, image_size: Hashable) -> int:
        """Bytes to ask of the host before a sampling: what the steps have needed before for images of this size, less
        what we hold already. Graphs are not counted as held: hosts count their memory as free. The account of this
        sampling begins with this call."""
        held = self.bound.bytes + (0 if self.low_bit is None else self.low_bit.bytes)
        lacking = max(0, self._bytes_needed.get(image_size, 0) - held)
        self._image_size = image_size
        self._bytes_had = held + lacking
        return lacking

    def note_left_over(self, byte_count: int) -> None:
        """Note that after a capture so many bytes more are free than have to be (less than 0: so many are lacking): at
        this image size, the host is asked for that much less before the next sampling. Counts only while weights are
        streamed, and where the host was not asked for room in this sampling."""
        if self.bound.streaming is not None and not self.asked_for_room:
            self._bytes_needed[self._image_size] = self._bytes_had - byte_count

    def let_go_if_moved(self) -> None:
        """Drop graphs and their memory where the weights are elsewhere by now, as when the host has taken the UNet off
        the GPU: half a millisecond."""
        holds = (
            self.runners or self.low_bit is not None or self.bound.bytes
            or any(memory.keeps_tensors for memory in self.step_memories.values())
        )
        if holds and not self.bound.unmoved():
            self.drop_runners()
