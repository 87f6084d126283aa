"""Finds out whether a network has changed since it was last read: compares it with its Baseline around each replay.

Parameters: their identity, addresses, layouts and counts of edits. Baseline: a Tree of the modules (module_tree.py), a
Parameters, and everything else that a replay is compared with; contents.py and on_the_fly.py are used as well if a
network needs them. Each replay runs this, so there is no Python call for each module.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.edits import edit_counts, version_of
from ..core.epoch import Epoch
from .contents import Contents
from .layouts import Layouts
from .module_tree import ModuleStates, Tree, with_surroundings
from .snapshot import state_of
from .stored import StoredReader

# Returns the parameters in a module's __dict__, by name.
of_parameters = operator.itemgetter("_parameters")


class Parameters:
    """The addresses, layouts and counts of edits of some modules' parameters, as they are when this is made, to find
    out later whether the parameters have moved or were edited. Keeps no parameter alive.

    has_reader: whether the tensors were read by a StoredReader.
    """

    def __init__(self, modules: Sequence[nn.Module], reader: StoredReader | None = None) -> None:
        """reader: for networks with weights in 4 or 8 bits: the stored values and scales are noted in place of these
        weights. None: the modules' own parameters are noted."""
        self._modules = list(map(weakref.ref, modules))
        self._reader = reader
        self.has_reader = reader is not None
        self._facts: list[object] = []
        parameters: list[Tensor]
        if reader is None:
            parameters = [one for module in modules for one in module._parameters.values() if one is not None]
        else:
            parameters = reader.tensors(modules)
            self._facts = reader.facts(modules)
        self._references = list(map(weakref.ref, parameters))
        self._addresses = list(map(Tensor.data_ptr, parameters))
        self._layouts = Layouts(parameters)
        # The counts of edits at the last call of were_edited.
        self._edits = edit_counts(parameters)
        # Whether torch counts the edits of all of them, as it does for all but inference tensors.
        self._all_counted = not any(map(Tensor.is_inference, parameters))

    def in_place(self) -> list[Any] | None:
        """The parameters that the modules have now, if every module is alive and every parameter has the noted address.
        None otherwise: the memory at the noted addresses may have been freed, so a graph must not read it.

        Takes 0.2 ms for SDXL's UNet. Do not keep the list after the call, because it keeps the parameters alive.
        """
        modules: list[Any] = [reference() for reference in self._modules]
        # Quicker than `None in modules`, which also compares with ==.
        if not all(map(operator.is_not, modules, repeat(None))):
            return None
        if self._reader is None:
            # Without a Python call for each module.
            dictionaries = filter(None, map(of_parameters, map(state_of, modules)))
            values = chain.from_iterable(map(dict.values, dictionaries))
            parameters = [one for one in values if one is not None]
        else:
            parameters = self._reader.tensors(modules)
        with suppress(RuntimeError, TypeError):
            if self._addresses == list(map(Tensor.data_ptr, parameters)):
                return parameters
        return None

    def are_same(self, parameters: Sequence[Any]) -> bool:
        """Whether these are the same tensor objects that were noted, with the same shapes, dtypes and strides, and
        weights in 4 or 8 bits have the same format. Values may differ. parameters: the result of in_place()."""
        known = [reference() for reference in self._references]
        if not all(map(operator.is_, parameters, known)):
            return False
        if self._reader is not None:
            modules: list[Any] = [reference() for reference in self._modules]
            if None in modules or self._reader.facts(modules) != self._facts:
                return False
        # Inlined to save a Python call.
        quick = self._layouts.quick.get(torch.is_inference_mode_enabled())
        return (quick is not None and quick(*parameters)) or self._layouts.are_same(parameters)

    def were_edited(self, parameters: Sequence[Any]) -> bool:
        """Whether torch has counted an edit in place since the last call of this method. Each edit is reported once.
        parameters: the result of in_place()."""
        before = self._edits
        self._edits = []
        if self._all_counted:
            # Faster than edit_counts, which tests each tensor first. It raises if a parameter's data was replaced by an
            # inference tensor's.
            with suppress(RuntimeError):
                self._edits = list(map(version_of, parameters))
        self._edits = self._edits or edit_counts(parameters)
        return self._edits != before

    def note_edits(self) -> None:
        """Note the edits so far, so that were_edited does not report them. Does nothing if in_place() is None."""
        present = self.in_place()
        if present is not None:
            self.were_edited(present)

    def are_unchanged(self) -> bool:
        """Whether the parameters are the same objects, at the same addresses and in the same layouts. Values may
        differ."""
        found = self.in_place()
        return found is not None and self.are_same(found)


class Part(NamedTuple):
    """The part of a network that a cached pass of a step policy (DeepCache) runs, as it was when this was made.

    states: of the layers that the pass reads, of the modules that contain them, and of modules without parameters
        beside them. See with_surroundings.
    parameters: of these layers.
    """

    states: ModuleStates
    parameters: Parameters


class Baseline:
    """A network as it was when it was last read or compared. Each call compares the network with its baseline; a replay
    does so while the GPU computes. Keeps no module alive.

    BoundNetwork, which reads the network, sets and clears the attributes.

    epoch: the versions, increased when a difference is found; see Epoch.
    tree: the modules; None if they must be read anew: then nothing may be replayed.
    parameters: the addresses of the weights; None if they must be bound anew: then nothing may be replayed.
    contents: checksums of the weights' numbers; None if torch counts all edits that matter.
    wanted_lora: returns a key of the LoRAs that the host wants to merge into the weights; None for hosts that merge
        them before they call the network.
    lora: the result of wanted_lora when LoRAs were last merged.
    parts: the Parts of cached passes, by the ids of the layers that they read. Valid as long as tree and parameters.
    begin_applied: starts to compare the functions that the host applies to its weights at each use with those of the
        last refresh, and returns a function that ends the comparison and returns whether they are the same. None if
        the host applies nothing.
    """

    def __init__(
        self, root: nn.Module, wanted_lora: Callable[[], Hashable] | None = None, is_copy: bool = False
    ) -> None:
        """root: the network. is_copy: whether it is a copy of ours, which no other code changes, so that nothing needs
        to be compared. wanted_lora: see the class."""
        self._root = weakref.ref(root)
        self._is_copy = is_copy
        self.epoch = Epoch()
        self.tree: Tree | None = None
        self.parameters: Parameters | None = None
        self.contents: Contents | None = None
        self.wanted_lora = wanted_lora
        self.lora: Hashable = None
        self.begin_applied: Callable[[], Callable[[], bool]] | None = None
        self.parts: dict[Hashable, Part] = {}

    def advance(self, structure: int = 0, addresses: int = 0, values: int = 0) -> None:
        """Increase each version of the epoch by the number given for it."""
        now = self.epoch
        self.epoch = Epoch(now.structure + structure, now.addresses + addresses, now.values + values)

    def part(self, layers: Sequence[nn.Module]) -> Part | None:
        """The Part of a pass that reads these layers alone, for begin_part. Made at the first call with these layers,
        and kept in `parts`. None if such a pass must compare the whole network: checksums are in use, weights are
        stored in 4 or 8 bits, the network is a copy of ours, or it has changed since it was read."""
        tree = self.tree
        root = self._root()
        if tree is None or root is None or self._is_copy or self.parameters is None:
            return None
        if self.contents is not None or self.parameters.has_reader:
            return None
        key = tuple(map(id, layers))
        known = self.parts.get(key)
        if known is None or not known.parameters.are_unchanged():
            known = Part(tree.part(with_surroundings(root, layers)), Parameters(layers))
            # The part is noted as it is now: changes and edits from before would be missed.
            if not tree.is_unchanged(root) or not self.look_for_edits():
                return None
            self.parts[key] = known
        return known

    def begin_part(self, part: Part) -> Callable[[], bool] | None:
        """Like begin, for a replay that reads this part alone, so that less is compared. Edits of modules outside of
        the part cannot affect this replay; they are found before the next replay that reads these modules. Functions
        that the host applies to weights are compared for all modules."""
        tree = self.tree
        root = self._root()
        if tree is None or root is None or self.contents is not None:
            return self.begin()
        if self.wanted_lora is not None and self.wanted_lora() != self.lora:
            return None
        is_same_applied = None if self.begin_applied is None else self.begin_applied()
        parameters = part.parameters
        present = parameters.in_place()
        if present is None:
            return None

        def is_same() -> bool:
            if not (part.states.are_unchanged(root) and tree.reached.is_unchanged() and parameters.are_same(present)):
                return False
            # After the other checks, because each edit is reported once.
            if parameters.were_edited(present):
                self.advance(values=1)
            return is_same_applied is None or is_same_applied()

        return is_same

    def _note_edits(self) -> None:
        """Increase epoch.values, after edits of values were found. Note the edits in all parts, so that these do not
        report them again."""
        self.advance(values=1)
        for part in self.parts.values():
            part.parameters.note_edits()

    def begin(self) -> Callable[[], bool] | None:
        """Start to compare the network with this baseline, before a replay. Returns a function to call after the replay
        was launched; None if the replay must not be launched, because weights have moved, the host wants other LoRAs,
        or the network was freed or must be read or bound anew.

        That function returns whether the replay's output is valid: False if the modules, their code, the parameter
        objects, or the functions that the host applies to them have changed. An edit of values in place only increases
        epoch.values and gives True: the graph has read the edited values. A caller with copies of the old values must
        compare epoch.values itself.
        """
        parameters = self.parameters
        if self._is_copy:
            return None if parameters is None else unchanged
        tree = self.tree
        root = self._root()
        if tree is None or parameters is None or root is None:
            return None
        if self.wanted_lora is not None and self.wanted_lora() != self.lora:
            return None
        is_same_applied = None if self.begin_applied is None else self.begin_applied()
        present = parameters.in_place()
        if present is None:
            return None
        contents_changed = None if self.contents is None else self.contents.begin(are_alive=True)

        def is_same() -> bool:
            if not tree.is_unchanged(root):
                return False
            have_changed = contents_changed is not None and contents_changed()
            if not parameters.are_same(present):
                return False
            # After the other checks, because each edit is reported once.
            if parameters.were_edited(present) or have_changed:
                self._note_edits()
            return is_same_applied is None or is_same_applied()

        return is_same

    def look_for_edits(self) -> bool:
        """Increase epoch.values if values were edited in place since they were last compared. Returns whether the
        parameters are still the same objects at the same addresses, edited or not. If they are not, or `parameters` is
        None, no edit is counted, and they must be bound again. Waits for checksums, if these are in use.
        """
        parameters = self.parameters
        present = None if parameters is None else parameters.in_place()
        if parameters is None or present is None or not parameters.are_same(present):
            return False
        have_changed = self.contents is not None and self.contents.begin(are_alive=True)()
        # After the other checks, because each edit is reported once.
        if parameters.were_edited(present) or have_changed:
            self._note_edits()
        return True


def unchanged() -> bool:
    """The function that Baseline.begin returns for a copy of ours, which is not compared: the replay is valid."""
    return True
