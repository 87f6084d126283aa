"""One UNet module in our care: its layout and its bound parameters, true to what the host has made of it."""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..core.call import Call
from ..core.epoch import Epoch
from ..core.origins import package
from ..core.refusal import Refusal
from .binding import Binding
from .contents import PART, Contents, ContentsReader, MemorySpan
from .digests import WeightsDigest, digest_of_values
from .main_memory import MainMemory
from .module_tree import Baseline, Parameters, Tree
from .on_the_fly import OnTheFly
from .reached import Reached
from .scan import (
    APPLIED_AT_CALL,
    HostTraits,
    foreign_parts,
    has_unseen_state,
    reason_of,
    refuse_foreign_code,
    replaced_names,
)
from .streaming import Streaming, Units, streaming_of
from .values import Tokens

log = logging.getLogger("onediff")
# How many digests of the code that a network calls are remembered.
MOST_MET = 64
# How many unknown ones may follow each other: each costs a check against the host. After more, the network is refused.
MOST_NEW = 8


class BoundUNet:
    """Keeps layout and binding true to a module that its host may change at any time. Holds no reference to it.

    Two answers to "is it still the same?":
    epoch: counts the changes that were found within this process. What was made at another epoch may be void.
    identity(): a digest, the same in any process, of weights and sources. Verdicts belong to it.

    is_copy: whether the module is a copy of ours on another device, which nobody else changes.
    baseline: what the network was at the last look; a replay is compared with it.
    refreshed: the epoch at the last refresh: what is computed, captured or copied after it holds for this one.
    channels_last: whether the convolutions' weights were laid out so.
    on_the_fly: what the host applies to the weights at each use.
    streaming: brings the weights that are in main memory to the device that computes; None where all are on that.
    reader: reads the contents of weights, where there is something better than torch's operators.
    replaced: who has replaced which functions that the network calls, for users.
    """

    def __init__(
        self, unet: nn.Module, read: Callable[[nn.Module], Any], host_traits: HostTraits = HostTraits(),  # noqa: B008
        units_of: Callable[[Any, Call], Units] | None = None, is_copy: bool = False,
    ) -> None:
        """read, units_of: read the layout of a module, and give the order of its weights; see Families. None: weights
        that are away are refused."""
        self._read_layout = read
        self._units_of = units_of
        self._unet = weakref.ref(unet)
        self.host_traits = host_traits
        self.is_copy = is_copy
        self.baseline = Baseline(unet, host_traits.wanted_lora, is_copy)
        self.refreshed = self.baseline.epoch
        self.reader: ContentsReader | None = None
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
        # One in so many parts of the contents is watched; 0: contents are not watched.
        self._part = 0
        self.channels_last = False
        self._binding: Binding | None = None
        self._refusal: str | None = None
        self.on_the_fly = OnTheFly(host_traits.functions, host_traits.casts)
        self.streaming: Streaming | None = None
        self._memory = MainMemory()
        # The digests that were computed last, each with what it holds for; see _holds_for.
        self._checkpoint: tuple[Hashable, str] = (None, "")
        self._identity: tuple[Hashable, str] = (None, "")
        # What identity reads, and the version of the addresses that it was made for.
        self._digest: WeightsDigest | None = None
        self._digested: Hashable = None

    @property
    def epoch(self) -> Epoch:
        """See Baseline."""
        return self.baseline.epoch

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

    def exactly(self, host: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The host's forward of a call, with its approximations computed exactly; see HostTraits.yardstick."""
        yardstick = self.host_traits.yardstick
        return host if yardstick is None else yardstick(host, self.module, self.binding.decoded_layers())

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
        apart = self.binding.apart
        units = self._units_of(self.binding.layout, call)
        return [[path for name in unit for path in apart.get(name, [name])] for unit in units]

    def drop_applied(self) -> None:
        """Free the copies of weights that the host's functions were applied to, and the buffers for streamed weights;
        the next refresh makes them anew."""
        if self.streaming is not None:
            self.streaming = None
            self.baseline.parameters = None
        if self.on_the_fly.drop():
            self._note_moved()

    @property
    def bytes(self) -> int:
        """Memory of the device that computes, beside the host's own weights."""
        return self.on_the_fly.bytes + (0 if self.streaming is None else self.streaming.bytes)

    def retry(self) -> None:
        """Read the network again at the next call where OneDiff itself has failed to: another image may go well."""
        if self._has_failed:
            self._has_failed = False
            self._refusal = None
            self.baseline.tree = None

    # --- has anything changed? ------------------------------------------------------------------------------------

    def values_now(self) -> int:
        """epoch.values after a look for edits; where weights lie elsewhere by now, the next version, which no call has
        had."""
        return self.epoch.values if self.baseline.look_for_edits() else self.epoch.values + 1

    def watch_contents(self, whole: bool) -> None:
        """From now on, compare the contents of weights, so that edits are found that torch does not count: something
        that was made from the values is kept. whole: every number; otherwise one part in contents.PART."""
        part = 1 if whole else PART
        if self.baseline.contents is None or part < self._part:
            self._part = min(part, self._part or part)
            self._watch_parameters()

    def _watch_parameters(self) -> None:
        """Note where the bound parameters lie and how often they were edited; and their contents, where _part says so.
        Later looks compare with this."""
        binding = self.binding
        self.baseline.parameters = Parameters(binding.layers(), binding.reader if binding.formats else None)
        self.baseline.contents = None
        if self._part:
            spans: list[MemorySpan] = []
            for name in binding.groups:
                if name in binding.away:
                    continue
                for tensors in binding.parts(name):
                    spans += map(MemorySpan.of, tensors)
            self.baseline.contents = Contents(spans, self._part, self.reader)

    def checkpoint(self, sampling: Hashable = None) -> str:
        """The key of measurements: a digest that tells checkpoints of an architecture apart and is the same under any
        LoRA, as far as that leaves biases and norms as they are: only those are read. Copies 3 MB of SDXL's from the
        device and waits for it, where the weights may be others than at the last call of this method. sampling: see
        identity."""
        state = self._holds_for(sampling)
        if self._checkpoint[0] != state:
            vectors = self.binding.vectors()
            self._checkpoint = (state, digest_of_values(self.layout.architecture, vectors))
        return self._checkpoint[1]

    def identity(self, sampling: Hashable = None) -> str:
        """The key of verdicts: a digest of every number of these weights, of what is applied to them, and of the
        sources of the host's forward.

        sampling: the number of the sampling in progress, within which the digest holds whatever is edited; None:
        outside of samplings, where it is computed whenever a change was seen. All numbers count, which takes 13 ms for
        SDXL on an H200, waits for the device, and takes seconds for one on a CPU. Of weights in main memory that
        another device computes with, one part in contents.PART is read.
        """
        state = self._holds_for(sampling)
        if self._identity[0] != state:
            # The same numbers are other weights in another format.
            formats = sorted(self.binding.formats.items())
            label = f"{self.layout.architecture} {self.sources()} {self.on_the_fly.identity()} {formats}"
            found = self.binding.parameters()
            if self._digest is None or self._digested != self.epoch.addresses:
                self._digested = self.epoch.addresses
                self._digest = WeightsDigest(found, self.binding.device, self.reader)
            self._identity = (state, self._digest.read(label, found))
        return self._identity[1]

    def sources(self) -> str:
        """What tells the host's own forward from those of other sources; see Tree.digest."""
        tree = self.baseline.tree
        return "" if tree is None else tree.digest

    def _holds_for(self, sampling: Hashable) -> Hashable:
        """Equal as long as identity() and checkpoint() need not be computed anew. Outside of samplings: the versions of
        the structure and of the values. Within one: the structure's and the sampling's number, so that both digests
        hold for the whole sampling, although scheduled LoRAs may edit values at each step. (_bind forgets both
        digests.)"""
        now = self.epoch
        if sampling is None:
            return now.structure, None, now.values
        return now.structure, sampling

    # --- made true for a call -------------------------------------------------------------------------------------

    def layout_now(self) -> Any:
        """The layout as the module tree is now. Raises Refusal with the reason."""
        self._look_at_modules()
        return self.layout

    def refresh(
        self, call: Call, channels_last: bool = False, room: Callable[[], int] | None = None
    ) -> None:
        """Make the binding true for this call. Raises Refusal with the reason if that is impossible.

        channels_last: how the weights of convolutions are to lie in memory. room: how many bytes copies of weights may
        take, to which the host applies functions; None: any number.
        """
        device = call.latent.device
        self._look_at_modules()
        traits = self.host_traits
        binding = self.binding
        if traits.sync_lora is not None:
            traits.sync_lora(binding.layers())
            # It notes on the layers what it has merged: no news at the next call.
            tree = self.baseline.tree
            if tree is not None and not tree.stands(self.module):
                self.baseline.tree = self._tree_now()
        if traits.wanted_lora is not None:
            self.baseline.lora = traits.wanted_lora()
        cast_before = binding.cast_to
        binding.cast_to = self.on_the_fly.cast_to(binding, call.latent.dtype)
        stays = channels_last == self.channels_last and binding.cast_to == cast_before and device == binding.device
        if not stays or not self.baseline.look_for_edits():
            self._bind(channels_last, call)
        are_unedited = self.epoch.values == self.refreshed.values
        moved = self.on_the_fly.refresh(binding, are_unedited, room, self.reader)
        if moved is not None:
            self.baseline.advance(addresses=int(moved), values=1)
        self.refreshed = self.epoch
        self.baseline.begin_applied = self._begin_applied if self.on_the_fly.is_asked else None
        if self.on_the_fly.copies:
            self.watch_contents(whole=self.on_the_fly.copies_matrices)

    def _begin_applied(self) -> Callable[[], bool]:
        """See Baseline.begin_applied."""
        have_same_contents = self.on_the_fly.begin_contents()
        return lambda: have_same_contents() and self.on_the_fly.stands(self.binding)

    def refresh_without_binding(self) -> None:
        """As refresh, for a call that reads the weights where and as the host laid them out: no parameter is
        re-pointed.

        Edits of values, and weights that lie elsewhere by now, count for identity(). Edits that torch does not count
        are found in the contents at each call, where a reader makes that one launch, or no parameter has a version;
        elsewhere at the next change. Raises Refusal with the reason if the network cannot be run.
        """
        self._look_at_modules()
        binding = self.binding
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(binding.layers())
        parameters = binding.parameters()
        binding.device = parameters[0].device
        binding.look_for_stored()
        binding.refuse_mixture()
        is_read_each_time = self.reader is not None or any(map(Tensor.is_inference, parameters))
        self._part = 1 if is_read_each_time else 0
        had_contents = self.baseline.contents is not None
        if had_contents is not is_read_each_time or not self.baseline.look_for_edits():
            self._watch_parameters()
            self._note_moved()

    def _bind(self, channels_last: bool, call: Call | None = None) -> None:
        """Bind the weights, and watch them where they lie then. call: the device of its latent computes; None: all
        weights are where they are needed."""
        began = time.perf_counter()
        binding = self.binding
        self.baseline.parameters = None
        self.streaming = None
        # Both digests are computed anew.
        self._checkpoint = (None, "")
        self._identity = (None, "")
        copied = binding.bind(channels_last, None if call is None else call.latent.device)
        self.channels_last = channels_last
        if binding.away and call is not None:
            self.streaming = streaming_of(binding, self.units(replace(call, cut=None)), self._memory)
        self._watch_parameters()
        self._note_moved()
        milliseconds = (time.perf_counter() - began) * 1e3
        log.debug("bound %s: %.0f MiB copied in %.0f ms", self.layout.model_name, copied / 2**20, milliseconds)

    def forget_baseline(self) -> None:
        """Have the next call read and bind everything again: something failed over these weights."""
        self.baseline.tree = None
        self.baseline.parameters = None
        self.baseline.contents = None
        self.streaming = None

    def _note_moved(self) -> None:
        """Some weights lie elsewhere now."""
        self.baseline.advance(addresses=1, values=1)

    def unmoved(self) -> bool:
        """Whether the parameters are the very ones that were bound, at the same addresses and in the same layout. Takes
        a millisecond."""
        parameters = self.baseline.parameters
        return parameters is not None and parameters.stand()

    def _look_at_modules(self) -> None:
        """Compare the modules and their code with the baseline, and read them anew where they have changed. Raises
        Refusal where the network cannot be run."""
        known = self.baseline.tree
        if known is not None and known.stands(self.module):
            self._new_ones = 0
        else:
            self._read_anew()
        if self._refusal is not None:
            raise Refusal(self._refusal)
        if self._new_ones > MOST_NEW:
            # Each would be checked against the host: that takes longer than the host alone.
            what = self.replaced[0] if self.replaced else "its code"
            raise Refusal(f"{what}, and changes with every call")

    def _read_anew(self) -> None:
        """Read the modules and their code, and note why the network cannot be run (_refusal). Raises what is a fault of
        ours, once: the same modules are not read again within this image."""
        self.baseline.advance(structure=1)
        tree = self._tree_now()
        self.baseline.tree = None
        self._refusal = None
        try:
            self._read_layout_of(tree)
        except Refusal as refusal:
            # Its text alone: an exception keeps the network alive.
            self._refusal = str(refusal)
        except Exception as error:
            self.baseline.tree = tree
            self._refusal = f"OneDiff has failed to read this network: {error}"
            self._has_failed = True
            self._drop_binding()
            raise
        self.baseline.tree = tree
        self._note_code(tree.reached)

    def _note_code(self, reached: Reached) -> None:
        """Note the code that the modules run, and whether it was met before."""
        facts = reached.facts_of_ours
        if self._code and facts != self._code:
            # Our operators call torch's functions by name too: what was captured or made of the weights while others
            # stood there is of those.
            self.code_changes += 1
            self._note_moved()
        self._code = facts
        self._new_ones = 0 if reached.digest in self._met else self._new_ones + 1
        self._met[reached.digest] = None
        while len(self._met) > MOST_MET:
            del self._met[next(iter(self._met))]

    def _tree_now(self) -> Tree:
        """The modules as they are now."""
        traits = self.host_traits
        ignored = traits.written.union(APPLIED_AT_CALL)
        return Tree(self.module, ignored, traits.placed, self._tokens, self.baseline.tree, traits.synced)

    def _read_layout_of(self, tree: Tree) -> None:
        """Read the layout, and make the binding to it. Where layers and layout are what they were, weights and graphs
        stay as they are. Raises Refusal."""
        unet = self.module
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
            if self._first is None:
                self._first = reached.facts
            found = replaced_names(reached, tree.hosts, self._first, trusted)
            known = {*trusted, *map(package, trusted), *tree.hosts}
            foreign = (one for one in found if foreign_parts(one, known))
            self.replaced = tuple(dict.fromkeys(map(reason_of, found)))
            self._unseen = next((reason_of(one) for one in foreign if has_unseen_state(one, tree.hosts)), "")
            self._judged = reached
        if self._unseen:
            raise Refusal(f"{self._unseen}, and OneDiff cannot see on what it depends")

    def _drop_binding(self) -> None:
        self.undo_channels_last()
        self._binding = None
        self.baseline.parameters = None
        self.baseline.contents = None
        self.streaming = None
        self.drop_applied()

    def undo_channels_last(self) -> bool:
        """Let the host's own forward find the convolutions' weights as torch makes them. Returns whether they moved."""
        if not self.channels_last or self._binding is None:
            return False
        self._binding.restore_memory_formats()
        self.baseline.parameters = None
        self.channels_last = False
        self._note_moved()
        return True

    def release(self) -> None:
        """Forget everything and leave ordinary parameters behind, with the same values."""
        self._memory = MainMemory()
        if self._binding is not None:
            self._binding.unbind()
        self.forget_baseline()
        self._binding = None
        self._refusal = None
        self._digest = None
        self.channels_last = False
        self._part = 0
        self.drop_applied()
        self._note_moved()
