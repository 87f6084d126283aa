"""One UNet module in our care: its layout and its bound parameters, true to what the host has made of it."""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

from ..core.call import Call
from ..core.epoch import Epoch
from ..core.origins import package
from ..core.refusal import Refusal
from .binding import Binding
from .contents import PART, Contents, ContentsReader, MemorySpan
from .digests import WeightsDigest, digest_of_values
from .main_memory import MainMemory
from .module_tree import Tree
from .on_the_fly import OnTheFly
from .parameters import Parameters
from .reached import Reached
from .scan import (
    APPLIED_AT_CALL,
    HostTraits,
    foreign_parts,
    has_unseen_state,
    refuse_foreign_code,
    stand_ins,
    told,
)
from .streaming import Streaming, Units, streaming_of
from .values import Tokens

log = logging.getLogger("onediff")
Result = TypeVar("Result")
# How many digests of the code that a network calls are remembered.
MOST_MET = 64
# How many unknown ones may follow each other: each costs a check against the host. After more, the network is refused.
MOST_NEW = 8


class BoundUNet:
    """Keeps layout and binding true to a module that its host may change at any time. Holds no reference to it.

    Two answers to "is it still the same?":
    epoch: counts the changes that were found within this process. What was made at another epoch may be void.
    identity(): a digest, the same in any process, of weights and sources. Verdicts belong to it.

    samplings: how many samplings the host has announced. in_sampling: whether one goes on.
    channels_last: whether the convolutions' weights were laid out so.
    on_the_fly: what the host applies to the weights at each use.
    streaming: brings the weights that are in main memory to the device that computes; None where all are on that.
    reader: reads the contents of weights, where there is something better than torch's operators.
    replaced: who has replaced which functions that the network calls, for users.
    """

    def __init__(
        self, unet: nn.Module, read: Callable[[nn.Module], Any], host_traits: HostTraits = HostTraits(),  # noqa: B008
        units_of: Callable[[Any, Call], Units] | None = None,
    ) -> None:
        """read, units_of: read the layout of a module, and give the order of its weights; see Families. None: weights
        that are away are refused."""
        self._read_layout, self._units_of = read, units_of
        self._unet = weakref.ref(unet)
        self.host_traits = host_traits
        self.reader: ContentsReader | None = None
        self._tree: Tree | None = None
        self._tokens = Tokens()
        # The facts of the host's code when the network was seen first.
        self._first: dict[str, str] | None = None
        # The digests of code that were met, and how many new ones in a row.
        self._met: dict[str, None] = {}
        self._new_ones = 0
        # The facts of the code that graphs and copies of weights were made under, and how often those have changed.
        self._code: Mapping[str, str] = {}
        self.code_changes = 0
        # Whether OneDiff itself has failed to read the tree.
        self._has_failed = False
        self.replaced: tuple[str, ...] = ()
        # The code that was judged last, and who has put a function there whose state cannot be seen.
        self._judged: Reached | None = None
        self._unseen = ""
        self._parameters: Parameters | None = None
        # How often each parameter had been edited in place at the last look.
        self._edits: list[int] | None = None
        self._contents: Contents | None = None
        # One in so many parts of the contents is watched; 0: contents are not watched.
        self._part = 0
        self.channels_last = False
        self._binding: Binding | None = None
        self._refusal: str | None = None
        self.epoch = Epoch()
        # epoch.values at the last refresh: what was copied from the weights is of these values.
        self._refreshed: int | None = None
        self.on_the_fly = OnTheFly(host_traits.functions, host_traits.casts)
        self.streaming: Streaming | None = None
        self._memory = MainMemory()
        self.samplings = 0
        self.in_sampling = False
        self._lora: Hashable = None
        self._checkpoint: tuple[Hashable, str] = None, ""
        self._identity: tuple[Hashable, str] = None, ""
        # What identity reads, and the version of the addresses that it was made for.
        self._digest: WeightsDigest | None = None
        self._digested: Hashable = None

    @property
    def layout(self) -> Any:
        return self.binding.layout

    @property
    def module(self) -> nn.Module:
        unet = self._unet()
        if unet is None:
            raise Refusal("the host has unloaded this network")
        return unet

    @property
    def has_binding(self) -> bool:
        """Whether it was bound, and its layers are still those."""
        return self._binding is not None

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise Refusal("this UNet has not been bound yet")
        return self._binding

    def streaming_now(self) -> Streaming | None:
        """What copies the weights that are in main memory; None where all are on the device that computes. Raises
        Refusal where its memory was freed."""
        if self.binding.away and self.streaming is None:
            raise Refusal("the buffers for copied weights were freed with the graphs' memory")
        return self.streaming

    def units(self, call: Call) -> Units:
        """The layers in the order in which the forward of a call reads them. Raises Refusal for a network of which that
        is unknown."""
        if self._units_of is None:
            raise Refusal("a part of its weights is in main memory")
        return self._units_of(self.binding.layout, call)

    def drop_applied(self) -> None:
        """Free the copies of weights that the host's functions were applied to, and the buffers for streamed weights;
        the next refresh makes them anew."""
        if self.streaming is not None:
            self.streaming = self._parameters = None
        if self.on_the_fly.drop():
            self._note_moved()

    @property
    def bytes(self) -> int:
        """Memory of the device that computes, beside the host's own weights."""
        return self.on_the_fly.bytes + (0 if self.streaming is None else self.streaming.bytes)

    def begin_sampling(self) -> None:
        """The host says that a new sampling starts."""
        self.samplings += 1
        self.in_sampling = True
        if self._has_failed:
            # Another image may go well.
            self._has_failed = False
            self._tree = None
            self._refusal = None

    def end_sampling(self) -> None:
        """The host says that it is over."""
        self.in_sampling = False

    # --- has anything changed? ------------------------------------------------------------------------------------

    def during(self, work: Callable[[], Result]) -> Result | None:
        """Runs work, which launches a replay, and looks for changes while the GPU computes. Returns what work returns;
        None where that must be dropped, or where work was not run.

        It is not run where addresses, or the LoRAs that the host wants, have changed. Its result is dropped where the
        modules, their code, the parameter objects or what the host applies on the fly have changed. An edit of values
        in place raises epoch.values. Its result is dropped then, too, but for one case: within a sampling, where
        nothing was copied from the weights, because the graph itself has read the edited values.
        """
        parameters = self._parameters
        tree = self._tree
        unet = self._unet()
        lora = self.host_traits.wanted_lora
        if self._refusal is not None or parameters is None or tree is None or unet is None:
            return None
        if lora is not None and lora() != self._lora:
            return None
        on_the_fly = self.on_the_fly
        applied = on_the_fly.begin_contents() if on_the_fly.is_asked else None
        found = parameters.lie_still()
        if found is None:
            return None
        changed = None if self._contents is None else self._contents.begin(are_alive=True)
        result = work()
        if not tree.stands(unet):
            return None
        have_changed = changed is not None and changed()
        # Last, and noted at once: each edit is reported once.
        edits = parameters.edits(found)
        if edits is None:
            return None
        were_edited = edits != self._edits
        self._edits = edits
        if were_edited or have_changed:
            self._raise(values=1)
        # A graph reads weights as they were edited in place, but copies of weights are of the values before.
        if self.epoch.values != self._refreshed and (on_the_fly.copies or not self.in_sampling):
            return None
        return result if applied is None or (applied() and on_the_fly.stands(self.binding)) else None

    def _look_for_edits(self) -> bool:
        """Raise epoch.values if values were edited since the last look. Returns True, whether edited or not; False, and
        no edit is counted, where the parameters are others or lie elsewhere: they must be bound again."""
        changed = self._contents is not None and self._contents.begin()()
        # Last, and noted at once: each edit is reported once.
        edits = None if self._parameters is None else self._parameters.edits()
        if edits is None:
            return False
        were_edited = edits != self._edits
        self._edits = edits
        if were_edited or changed:
            self._raise(values=1)
        return True

    def values_now(self) -> int:
        """epoch.values after a look for edits; where weights lie elsewhere by now, the next version, which no call has
        had."""
        return self.epoch.values if self._look_for_edits() else self.epoch.values + 1

    def watch_contents(self, whole: bool) -> None:
        """From now on, compare the contents of weights, so that edits are found that torch does not count: something
        that was made from the values is kept. whole: every number; otherwise one part in contents.PART."""
        part = 1 if whole else PART
        if self._contents is None or part < self._part:
            self._part = min(part, self._part or part)
            self._watch_parameters()

    def _watch_parameters(self) -> None:
        """Note where the bound parameters lie and how often they were edited; and their contents, where _part says so.
        Later looks compare with this."""
        binding = self.binding
        self._parameters = Parameters(binding.layers(), binding.reader)
        self._edits = self._parameters.edits()
        spans = [
            MemorySpan.of(parameter) for name in binding.groups if self._part and name not in binding.away
            for parameter in chain(*binding.parts(name))
        ]
        self._contents = Contents(spans, self._part, self.reader) if self._part else None

    def checkpoint(self) -> str:
        """The key of measurements: a digest that tells checkpoints of an architecture apart and is the same under any
        LoRA, as far as that leaves biases and norms as they are: only those are read. Copies 3 MB of SDXL's from the
        device and waits for it, where the weights may be others than at the last call of this method."""
        state = self._state()
        if self._checkpoint[0] != state:
            vectors = self.binding.vectors()
            self._checkpoint = state, digest_of_values(self.layout.architecture, vectors)
        return self._checkpoint[1]

    def identity(self) -> str:
        """The key of verdicts: a digest of every number of these weights, of what is applied to them, and of the
        sources of the host's forward.

        Read when a sampling begins, and outside of samplings whenever a change was seen. All numbers count, which takes
        13 ms for SDXL on an H200, waits for the device, and takes seconds for one on a CPU. Of weights in main memory
        that another device computes with, one part in contents.PART is read.
        """
        state = self._state()
        if self._identity[0] != state:
            label = f"{self.layout.architecture} {self.sources()} {self.on_the_fly.identity()}"
            found = self.binding.parameters()
            if self._digest is None or self._digested != self.epoch.addresses:
                self._digested = self.epoch.addresses
                self._digest = WeightsDigest(found, self.binding.device, self.reader)
            self._identity = state, self._digest.read(label, found)
        return self._identity[1]

    def sources(self) -> str:
        """What tells the host's own forward from those of other sources; see Tree.digest."""
        return "" if self._tree is None else self._tree.digest

    @property
    def last_identity(self) -> str:
        """As it was when it was asked for last; "" before that."""
        return self._identity[1]

    def _state(self) -> Hashable:
        """Equal as long as identity() and checkpoint() need not be computed anew. Outside of samplings: the versions of
        the structure and of the values. Within one: the structure's and the sampling's number, so that both digests
        hold for the whole sampling, although scheduled LoRAs may edit values at each step. (_bind forgets both
        digests.)"""
        structure = self.epoch.structure
        return (structure, self.samplings) if self.in_sampling else (structure, -1, self.epoch.values)

    # --- made true for a call -------------------------------------------------------------------------------------

    def layout_now(self) -> Any:
        """The layout as the module tree is now. Raises Refusal with the reason."""
        self._look()
        return self.layout

    def refresh(
        self, call: Call, channels_last: bool = False, room: Callable[[], int] | None = None
    ) -> None:
        """Make the binding true for this call. Raises Refusal with the reason if that is impossible.

        channels_last: how the weights of convolutions are to lie in memory. room: how many bytes copies of weights may
        take, to which the host applies functions; None: any number.
        """
        device = call.latent.device
        self._look()
        traits = self.host_traits
        binding = self.binding
        if traits.sync_lora is not None:
            traits.sync_lora(binding.layers())
            # It notes on the layers what it has merged: no news at the next call.
            if self._tree is not None and not self._tree.stands(self.module):
                self._tree = self._tree_now()
        if traits.wanted_lora is not None:
            self._lora = traits.wanted_lora()
        cast_before = binding.cast_to
        binding.cast_to = self.on_the_fly.cast_to(binding, call.latent.dtype)
        stays = channels_last == self.channels_last and binding.cast_to == cast_before and device == binding.device
        is_bound = self.unmoved() and stays and self._look_for_edits()
        if not is_bound:
            self._bind(channels_last, call)
        moved = self.on_the_fly.refresh(binding, self.epoch.values == self._refreshed, room, self.reader)
        if moved is not None:
            self._raise(addresses=int(moved), values=1)
        self._refreshed = self.epoch.values
        if self.on_the_fly.copies:
            self.watch_contents(whole=self.on_the_fly.copies_matrices)

    def refresh_in_place(self) -> None:
        """As refresh, for a call that reads the weights where and as the host laid them out: no parameter is
        re-pointed.

        Edits of values, and weights that lie elsewhere by now, count for identity(). Edits that torch does not count
        are found in the contents at each call, where a reader makes that one launch, or no parameter has a version;
        elsewhere at the next change. Raises Refusal with the reason if the network cannot be run.
        """
        self._look()
        binding = self.binding
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(binding.layers())
        parameters = binding.parameters()
        binding.device = parameters[0].device
        binding.look_for_stored()
        binding.refuse_mixture()
        is_read_each_time = self.reader is not None or any(map(Tensor.is_inference, parameters))
        self._part = 1 if is_read_each_time else 0
        had_contents = self._contents is not None
        if had_contents is not is_read_each_time or not self.unmoved() or not self._look_for_edits():
            self._watch_parameters()
            self._note_moved()

    def _bind(self, channels_last: bool, call: Call | None = None) -> None:
        """Bind the weights, and watch them where they lie then. call: the device of its latent computes; None: all
        weights are where they are needed."""
        began = time.perf_counter()
        binding = self.binding
        self._parameters = None
        self.streaming = None
        # Both digests are computed anew; see _state. The last ones stay for last_identity.
        self._checkpoint = (None, self._checkpoint[1])
        self._identity = (None, self._identity[1])
        copied = binding.bind(channels_last, None if call is None else call.latent.device)
        self.channels_last = channels_last
        if binding.away and call is not None:
            self.streaming = streaming_of(binding, self.units(replace(call, cut=None)), self._memory)
        self._watch_parameters()
        self._note_moved()
        milliseconds = (time.perf_counter() - began) * 1e3
        log.debug("bound %s: %.0f MiB copied in %.0f ms", self.layout.model_name, copied / 2**20, milliseconds)

    def bind_anew(self) -> None:
        """Forget what was read and bound, so that the next call reads and binds everything again: something failed over
        these weights."""
        self._tree = None
        self._parameters = None
        self._contents = None
        self.streaming = None

    def _note_moved(self) -> None:
        """Some weights lie elsewhere now."""
        self._raise(addresses=1, values=1)

    def _raise(self, structure: int = 0, addresses: int = 0, values: int = 0) -> None:
        """Add these to the versions of the epoch. (It raises no exception.)"""
        now = self.epoch
        self.epoch = Epoch(now.structure + structure, now.addresses + addresses, now.values + values)

    def unmoved(self) -> bool:
        """Whether the parameters are the very ones that were bound, at the same addresses and in the same layout. Takes
        a millisecond."""
        return self._parameters is not None and self._parameters.stand()

    def _look(self) -> None:
        """See whether the module tree computes as it did, and read it again if not. Raises Refusal where it cannot be
        run."""
        unet = self.module
        if self._tree is not None and self._tree.stands(unet):
            self._new_ones = 0
        else:
            self._raise(structure=1)
            tree = self._tree_now()
            self._tree = None
            self._refusal = None
            try:
                self._read(unet, tree)
            except Refusal as refusal:
                # Its text alone: an exception keeps the UNet alive.
                self._refusal = str(refusal)
            except Exception as error:
                # A fault of ours. The same tree is not read again within this image.
                self._tree = tree
                self._refusal = f"OneDiff has failed to read this network: {error}"
                self._has_failed = True
                self._drop_binding()
                raise
            self._tree = tree
            facts = tree.reached.facts_of_ours
            if self._code and facts != self._code:
                # Our operators call torch's functions by name too: what was captured or made of the weights while
                # others stood there is of those.
                self.code_changes += 1
                self._note_moved()
            self._code = facts
            self._new_ones = 0 if tree.reached.digest in self._met else self._new_ones + 1
            self._met[tree.reached.digest] = None
            while len(self._met) > MOST_MET:
                del self._met[next(iter(self._met))]
        if self._refusal is not None:
            raise Refusal(self._refusal)
        if self._new_ones > MOST_NEW:
            # Each would be checked against the host: that takes longer than the host alone.
            raise Refusal(f"{self.replaced[0] if self.replaced else 'its code'}, and changes with every call")

    def _tree_now(self) -> Tree:
        traits = self.host_traits
        ignored = traits.written.union(APPLIED_AT_CALL)
        return Tree(self.module, ignored, traits.placed, self._tokens, self._tree, traits.synced)

    def _read(self, unet: nn.Module, tree: Tree) -> None:
        """Find out what the module tree is. Where layers and layout are what they were, weights and graphs stay as they
        are. Raises Refusal."""
        try:
            refuse_foreign_code(unet, self.host_traits)
            self._refuse_stand_ins(tree)
        except Refusal:
            self.undo_channels_last()
            raise
        try:
            layout = self._read_layout(unet)
        except Refusal:
            self._drop_binding()
            raise
        if self._binding is None or not self._binding.follow(unet, layout):
            self._drop_binding()
            self._binding = Binding(unet, layout, self.host_traits.stored)

    def _refuse_stand_ins(self, tree: Tree) -> None:
        """Note who has replaced functions that the network calls. Raises Refusal for one on which no check says
        anything of the next call."""
        reached = tree.reached
        trusted = self.host_traits.trusted
        if reached is not self._judged:
            self._first = reached.facts if self._first is None else self._first
            found = stand_ins(reached, tree.hosts, self._first, trusted)
            known = {*trusted, *map(package, trusted), *tree.hosts}
            foreign = (one for one in found if foreign_parts(one, known))
            self.replaced = tuple(dict.fromkeys(map(told, found)))
            self._unseen = next((told(one) for one in foreign if has_unseen_state(one, tree.hosts)), "")
            self._judged = reached
        if self._unseen:
            raise Refusal(f"{self._unseen}, and OneDiff cannot see on what it depends")

    def _drop_binding(self) -> None:
        self.undo_channels_last()
        self._binding = None
        self._parameters = None
        self._contents = None
        self.streaming = None
        self.drop_applied()

    def undo_channels_last(self) -> bool:
        """Let the host's own forward find the convolutions' weights as torch makes them. Returns whether they moved."""
        if not self.channels_last or self._binding is None:
            return False
        self._binding.turn_convolutions_back()
        self._parameters = None
        self.channels_last = False
        self._note_moved()
        return True

    def release(self) -> None:
        """Forget everything and leave ordinary parameters behind, with the same values."""
        self._memory = MainMemory()
        if self._binding is not None:
            self._binding.unbind()
        self._tree = None
        self._parameters = None
        self._contents = None
        self._binding = None
        self.streaming = None
        self._refusal = None
        self._digest = None
        self.channels_last = False
        self.in_sampling = False
        self._part = 0
        self.drop_applied()
        self._note_moved()
