"""A network's layout and bound weights, kept up to date with the host's module."""
from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..core.call import Call
from ..core.epoch import Epoch
from ..core.refusal import Refusal
from .baseline import Baseline, Parameters, Part
from .binding import Binding
from .contents import PART, Contents, ContentsReader, MemorySpan
from .digests import WeightsDigest, digest_of_values
from .host_code import HostCode
from .main_memory import MainMemory
from .module_tree import Tree
from .on_the_fly import OnTheFly
from .scan import APPLIED_AT_CALL, HostTraits
from .streaming import Streaming, Units, streaming_of
from .values import Tokens

log = logging.getLogger("onediff")


class BoundNetwork:
    """Keeps a network's layout and binding up to date with a module that its host may change at any time. Has no strong
    reference to the module.

    Two things identify the state of the network:
    epoch: versions that count the changes found in this process. Objects made at another epoch may be invalid.
    identity(): a digest of weights and code, equal in any process. It is the key of verdicts.

    host_traits: the properties of the host, which its adapter knows.
    is_copy: whether the module is a copy of ours on another device, which no other code changes.
    baseline: the network at the last look for changes; replays are compared with it.
    refreshed: the epoch at the last refresh. Objects that are made after it from the binding are valid for this epoch.
    channels_last: whether we have put the convolutions' weights in channels-last order.
    on_the_fly: the functions and casts that the host applies to its weights at each use.
    host_code: decides whether the network's code can be served, and counts its changes.
    streaming: copies weights in main memory to the device that computes; None if all weights are on the device, and
        after the buffers were freed; see streaming_now().
    reader: a kernel that computes checksums of weights, set by the runtime; None: torch's operators are used.
    """

    def __init__(
        self, module: nn.Module, read: Callable[[nn.Module], Any], host_traits: HostTraits = HostTraits(),  # noqa: B008
        units_of: Callable[[Any, Call], Units] | None = None, is_copy: bool = False,
    ) -> None:
        """Reads nothing yet: see refresh. module: the host's, of any family. read: returns the layout of a module, or
        raises Refusal. host_traits: those of the host's adapter. units_of: returns the layers of a call in reading
        order (see units); None: a network with weights in main memory is refused. is_copy: see the class."""
        self._read_layout = read
        self._units_of = units_of
        self._module = weakref.ref(module)
        self.host_traits = host_traits
        self.is_copy = is_copy
        self.baseline = Baseline(module, host_traits.wanted_lora, is_copy)
        self.refreshed = self.baseline.epoch
        self.reader: ContentsReader | None = None
        self._tokens = Tokens()
        self.host_code = HostCode()
        # Whether reading the modules failed by a fault of ours.
        self._has_failed = False
        # The step of partial reads of the contents (see Contents.part); 0: contents are not compared.
        self._part = 0
        self.channels_last = False
        self._binding: Binding | None = None
        self._refusal: str | None = None
        self.on_the_fly = OnTheFly(host_traits.functions, host_traits.casts)
        self.streaming: Streaming | None = None
        self._memory = MainMemory()
        # The last digests, each with the key for which it is valid; see _holds_for.
        self._checkpoint: tuple[Hashable, str] = (None, "")
        self._identity: tuple[Hashable, str] = (None, "")
        # The reader of identity(), and the epoch.addresses that it was made at.
        self._digest: WeightsDigest | None = None
        self._digested: Hashable = None

    @property
    def epoch(self) -> Epoch:
        """The versions of the network as it was found at the last look for changes. Looks for none itself."""
        return self.baseline.epoch

    @property
    def layout(self) -> Any:
        """The layout of the binding: the network as it was read last. Raises Refusal without a binding."""
        return self.binding.layout

    @property
    def module(self) -> nn.Module:
        """The host's module. Raises Refusal if the host has unloaded it."""
        module = self._module()
        if module is None:
            raise Refusal("this model has been unloaded")
        return module

    @property
    def has_binding(self) -> bool:
        """Whether there is a binding. It may be out of date: layout_now() makes one and moves no weights, and after a
        refusal because of the network's code, the one from before stays."""
        return self._binding is not None

    @property
    def is_partly_away(self) -> bool:
        """Whether the host kept a part of the weights in main memory when they were bound last. Unlike `streaming`,
        this stays when the buffers are freed, and when there was no GPU memory for them."""
        return self._binding is not None and bool(self._binding.away)

    @property
    def binding(self) -> Binding:
        """The binding to the module's layers, as refresh() or layout_now() has read them last; see has_binding. Raises
        Refusal before the first reading, after release(), and if the last reading gave no layout."""
        if self._binding is None:
            raise Refusal(
                "OneDiff has not read this model's weights yet: it reads them in the next step with this model"
            )
        return self._binding

    def exactly(self, host: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A function that runs `host`, the host's forward of a call, while the host's approximations are switched off,
        such as products in eight bits: our output is compared with its result. `host` itself for a host without
        approximations. See HostTraits.yardstick."""
        yardstick = self.host_traits.yardstick
        return host if yardstick is None else yardstick(host, self.module, self.binding.decoded_layers())

    def streaming_now(self) -> Streaming | None:
        """The object that copies weights in main memory to the device that computes; None if all weights are there.
        Raises Refusal if weights are in main memory and the buffers for their copies were freed (drop_applied,
        forget_baseline); the next refresh makes them again. Also raises Refusal without a binding."""
        if self.binding.away and self.streaming is None:
            raise Refusal(
                "a part of the model's weights is in main memory; OneDiff has just freed the GPU memory that it copies "
                "them to, and allocates it again in the next step"
            )
        return self.streaming

    def units(self, call: Call) -> Units:
        """The names of the layers in the order in which the forward of a call reads them, in groups that are copied
        together (see Family.units). A fused layer whose members cannot be in one tensor is replaced by its members.
        Raises Refusal if the family does not tell the order, which streaming needs, and without a binding."""
        if self._units_of is None:
            raise Refusal(
                "a part of the model's weights is in main memory, and OneDiff cannot copy this kind of model's weights "
                "to the GPU"
            )
        apart = self.binding.apart
        units = self._units_of(self.binding.layout, call)
        return [[path for name in unit for path in apart.get(name, [name])] for unit in units]

    def drop_applied(self) -> None:
        """Free GPU memory: the tensors made from functions and casts that the host applies to its weights (LoRAs beside
        a layer, and changed or cast copies; OnTheFly.drop), and the buffers for streamed weights. Graphs that read
        this memory become invalid; the next refresh makes the tensors and buffers again."""
        if self.streaming is not None:
            self.streaming = None
            self.baseline.parameters = None
        if self.on_the_fly.drop():
            self._note_moved()

    @property
    def bytes(self) -> int:
        """The bytes that drop_applied would free on the device that computes. Graphs and 8-bit weights are not
        included."""
        return self.on_the_fly.bytes + (0 if self.streaming is None else self.streaming.bytes)

    def retry(self) -> None:
        """If reading the network has failed by a fault of ours, let the next call read it again; otherwise, do nothing.
        Called at the beginning of each sampling: reading may succeed in another image."""
        if self._has_failed:
            self._has_failed = False
            self._refusal = None
            self.baseline.tree = None

    # --- the search for changes -----------------------------------------------------------------------------------

    def values_now(self) -> int:
        """The version of the weights' values (epoch.values) after a look for edits, which may increase it. If the
        weights have moved or are not bound, epoch.values + 1, so that nothing kept from calls before that is used: the
        next refresh binds the weights again, and increases epoch.values itself."""
        return self.epoch.values if self.baseline.look_for_edits() else self.epoch.values + 1

    def watch_contents(self, whole: bool) -> None:
        """From now on, also compare the contents of weights at each call, to find edits that torch does not count. Call
        it when something derived from the values is kept. whole: compare all numbers; otherwise 1 in contents.PART.
        After one call with whole=True, all numbers are compared until release(). Weights in main memory that a GPU
        computes with are not compared."""
        part = 1 if whole else PART
        if self.baseline.contents is None or part < self._part:
            self._part = min(part, self._part or part)
            self._watch_parameters()

    def _watch_parameters(self) -> None:
        """Note the addresses and edit counts of the bound parameters in the baseline, for later comparisons; also
        checksums of their contents if _part is not 0. Weights in main memory have no checksums."""
        binding = self.binding
        layers = binding.layers
        self.baseline.parameters = Parameters(layers.modules(), layers.reader if layers.formats else None)
        self.baseline.contents = None
        self.baseline.parts.clear()
        if self._part:
            spans: list[MemorySpan] = []
            for name in binding.groups:
                if name in binding.away:
                    continue
                for tensors in binding.parts(name):
                    spans += map(MemorySpan.of, tensors)
            self.baseline.contents = Contents(spans, self._part, self.reader)

    def checkpoint(self, sampling: Hashable = None) -> str:
        """A digest that identifies the checkpoint, and is the same with and without LoRAs. Measured errors of 8-bit
        formats are stored under it.

        It is computed from biases and norms, which few LoRAs change: they are copied to the CPU (3 MB of SDXL's), which
        waits for the device. sampling: the number of the sampling in progress, in which the digest is computed once,
        whatever is edited; None: outside of samplings, where it is computed after every change. Raises Refusal without
        a binding.
        """
        state = self._holds_for(sampling)
        if self._checkpoint[0] != state:
            vectors = self.binding.layers.vectors()
            self._checkpoint = (state, digest_of_values(self.layout.architecture, vectors))
        return self._checkpoint[1]

    def identity(self, sampling: Hashable = None) -> str:
        """A digest of all numbers of the weights, of the functions that the host applies to them, and of the code of
        the host's forward. Verdicts, the results of checks against the host, are stored under it.

        sampling: the number of the sampling in progress, in which the digest is computed once, whatever is edited;
        None: outside of samplings, where it is computed after every change. It takes 13 ms for SDXL on an H200, waits
        for the device, and takes seconds on a CPU. Of weights in main memory that a GPU computes with, it reads 1
        number in contents.PART. Raises Refusal without a binding.
        """
        state = self._holds_for(sampling)
        if self._identity[0] != state:
            # The format is part of it, because the same bytes in another format are other weights.
            formats = sorted(self.binding.layers.formats.items())
            label = f"{self.layout.architecture} {self.sources()} {self.on_the_fly.identity()} {formats}"
            found = self.binding.layers.parameters()
            if self._digest is None or self._digested != self.epoch.addresses:
                self._digested = self.epoch.addresses
                self._digest = WeightsDigest(found, self.binding.device, self.reader)
            self._identity = (state, self._digest.read(label, found))
        return self._identity[1]

    def sources(self) -> str:
        """The digest of the code of the host's forward; see Tree.digest. "" if the modules were not read yet, or must
        be read again."""
        tree = self.baseline.tree
        return "" if tree is None else tree.digest

    def _holds_for(self, sampling: Hashable) -> Hashable:
        """A key that is equal as long as identity() and checkpoint() are valid.

        Outside of samplings, it has the versions of structure and values. In a sampling, it has the sampling's number
        instead of the values' version, because scheduled LoRAs may edit values at each step. (_bind drops both
        digests.)
        """
        now = self.epoch
        if sampling is None:
            return now.structure, None, now.values
        return now.structure, sampling

    # --- refresh --------------------------------------------------------------------------------------------------

    def layout_now(self) -> Any:
        """The layout of the modules as they are now, read again if they have changed. Moves no weights. Raises Refusal,
        with the reason, if the network cannot be run."""
        self._look_at_modules()
        return self.layout

    def refresh(
        self, call: Call, channels_last: bool = False, room: Callable[[], int] | None = None
    ) -> None:
        """Bring layout and binding up to date for a call: look for changes, merge the LoRAs that the host wants, move
        weights if necessary (Binding.bind), and make the tensors of the functions and casts that the host applies to
        its weights at each use (OnTheFly.refresh). Afterwards, `refreshed` is the present epoch. Raises Refusal, with
        the reason, if the network cannot be run.

        channels_last: whether the weights of convolutions must be in channels-last order. room: returns how many bytes
        may be used for copies of weights to which the host applies functions; None: no limit.
        """
        device = call.latent.device
        self._look_at_modules()
        traits = self.host_traits
        binding = self.binding
        if traits.sync_lora is not None:
            traits.sync_lora(binding.layers.modules())
            # It writes attributes of the layers when it merges LoRAs: these must not count as a change at the next
            # call.
            tree = self.baseline.tree
            if tree is not None and not tree.is_unchanged(self.module):
                self.baseline.tree = self._tree_now()
                self.baseline.parts.clear()
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
        self.baseline.begin_applied = self._begin_applied if self.on_the_fly.may_apply else None
        if self.on_the_fly.copies:
            self.watch_contents(whole=self.on_the_fly.copies_matrices)

    def _begin_applied(self) -> Callable[[], bool]:
        """Start to compare the functions that the host applies to its weights with those of the last refresh. Returns a
        function that ends the comparison, and returns whether they are the same; see Baseline.begin_applied."""
        have_same_contents = self.on_the_fly.begin_contents()
        return lambda: have_same_contents() and self.on_the_fly.is_unchanged(self.binding)

    def refresh_without_binding(self) -> None:
        """As refresh, but for a forward that reads each layer's weights where the host has them, such as a VAE's: no
        parameter is moved or fused, no function of the host is applied, and `refreshed` stays.

        After an edit or a move of weights, identity() is computed anew. The contents are compared at each call if a
        kernel does it in one launch, or if torch counts no edits of some parameter; otherwise, edits that torch does
        not count are found at the next counted one. Raises Refusal, with the reason, if the network cannot be run.
        """
        self._look_at_modules()
        binding = self.binding
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(binding.layers.modules())
        parameters = binding.layers.parameters()
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
        """Move the weights to where our forward needs them (Binding.bind), and note their new addresses, so that graphs
        and digests from before are invalid. Weights in main memory get a Streaming. call: its latent's device computes;
        None: the device of the weights, all of which must be there."""
        began = time.perf_counter()
        binding = self.binding
        self.baseline.parameters = None
        self.streaming = None
        # Drop both digests.
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
        """Make the next call read and bind everything again, after something has failed with these weights. Drops the
        notes for comparisons, and the buffers for streamed weights: with weights in main memory, streaming_now() raises
        Refusal until then. The binding, the tensors of on_the_fly, `host_code` and the epoch stay."""
        self.baseline.tree = None
        self.baseline.parameters = None
        self.baseline.contents = None
        self.streaming = None

    def _note_moved(self) -> None:
        """Increase the versions of addresses and values, because some weights have moved: graphs with the old
        addresses, and everything derived from the values, become invalid."""
        self.baseline.advance(addresses=1, values=1)

    def part_of(self, call: Call) -> Part | None:
        """The part of the network that a call reads if DeepCache shortens the call; the part is noted as it is now. A
        replay of such a call compares only this part with the host's (Baseline.begin_part). None in three cases: for
        calls that DeepCache does not shorten; if the family does not tell which layers a call reads (units_of); if the
        whole network must be compared (Baseline.part). Raises Refusal without a binding."""
        if self._units_of is None or call.cut is None or not call.cut.reads:
            return None
        binding = self.binding
        names = chain.from_iterable(self._units_of(binding.layout, call))
        layers = map(binding.layers.module, chain.from_iterable(map(binding.members, names)))
        return self.baseline.part(list(dict.fromkeys(layers)))

    def unmoved(self) -> bool:
        """Whether the parameters are the same objects that were bound, at the same addresses and in the same layout.
        False if none are bound, or if they must be bound again. Takes a millisecond."""
        parameters = self.baseline.parameters
        return parameters is not None and parameters.are_unchanged()

    def _look_at_modules(self) -> None:
        """Compare the modules and their code with the baseline, and read them again if they have changed. Raises
        Refusal if the network cannot be run, also if that was found earlier, or if its code is new at every call
        (HostCode.refuse_if_always_new)."""
        known = self.baseline.tree
        if known is not None and known.is_unchanged(self.module):
            self.host_code.note_unchanged()
        else:
            self._read_anew()
        if self._refusal is not None:
            raise Refusal(self._refusal)
        self.host_code.refuse_if_always_new()

    def _read_anew(self) -> None:
        """Read the modules and their code, and make them the baseline. If the network cannot be run, set _refusal to
        the reason, which the caller raises.

        If reading fails by a fault of ours, raises its exception: the same modules are not read again before retry(),
        and later calls are refused.
        """
        self.baseline.advance(structure=1)
        self.baseline.parts.clear()
        tree = self._tree_now()
        self.baseline.tree = None
        self._refusal = None
        try:
            self._read_layout_of(tree)
        except Refusal as refusal:
            # Only the text, because the exception's traceback would keep the network alive.
            self._refusal = str(refusal)
        except Exception as error:
            self.baseline.tree = tree
            self._refusal = f"OneDiff has failed to read this model: {error}"
            self._has_failed = True
            self._drop_binding()
            raise
        self.baseline.tree = tree
        if self.host_code.note(tree.reached):
            self._note_moved()

    def _tree_now(self) -> Tree:
        """A Tree of the modules as they are now. Reuses what is unchanged since the baseline's tree."""
        traits = self.host_traits
        ignored = traits.written.union(APPLIED_AT_CALL)
        return Tree(self.module, ignored, traits.placed, self._tokens, self.baseline.tree, traits.synced)

    def _read_layout_of(self, tree: Tree) -> None:
        """Check the network's code (HostCode.check), and read the module's layout. Make a binding for it, unless the
        present binding has the same layers and an equal layout (Binding.follow): then the present binding stays, with
        the copies of weights.

        tree: of the module as it is now; its code is checked, and nothing else is read from it. The caller has counted
        the change of structure in the epoch. Raises Refusal, with the reason, if the network cannot be run; the
        convolutions are then in the host's memory order. A refusal because of the code leaves the binding; one by
        `read`, which gives no layout, drops it."""
        module = self.module
        try:
            self.host_code.check(module, tree, self.host_traits)
        except Refusal:
            self.undo_channels_last()
            raise
        try:
            layout = self._read_layout(module)
        except Refusal:
            self._drop_binding()
            raise
        if self._binding is None or not self._binding.follow(module, layout):
            self._drop_binding()
            self._binding = Binding(module, layout, self.host_traits.stored)

    def _drop_binding(self) -> None:
        """Drop the binding, the notes for comparisons, the buffers for streamed weights and the tensors of on_the_fly.
        Weights that were fused stay so; the convolutions go back to the host's memory order."""
        self.undo_channels_last()
        self._binding = None
        self.baseline.parameters = None
        self.baseline.contents = None
        self.streaming = None
        self.drop_applied()

    def undo_channels_last(self) -> bool:
        """Put the convolutions' weights back into the host's memory order. Returns whether that moved them: False if we
        had not laid them out channels-last. After a move, the next refresh binds again."""
        if not self.channels_last or self._binding is None:
            return False
        self._binding.restore_memory_formats()
        self.baseline.parameters = None
        self.channels_last = False
        self._note_moved()
        return True

    def release(self) -> None:
        """Undo the binding, when OneDiff stops to serve the network: the module has ordinary parameters with the same
        values again (Binding.unbind). Frees the memory of all tensors of this object: those that drop_applied() frees,
        the checksums, and main memory pinned for streaming. A later refresh binds anew."""
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
