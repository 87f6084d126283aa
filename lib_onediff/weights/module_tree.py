"""Finds out whether a network has changed since it was last read: compares it with its Baseline around each replay.

Tree: the modules and their order, their classes, attributes and hooks, and all code that they reach by name
(reached.py). Parameters: their identity, addresses, layouts and counts of edits. Baseline: a Tree, a Parameters, and
everything else that a replay is compared with. What is compared at each replay is in this file, without a Python call
for each module; contents.py and on_the_fly.py are used as well if a network needs them.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, compress
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..core.edits import edit_counts, version_of
from ..core.epoch import Epoch
from ..core.origins import package
from .code import NOT_READ, objects_in
from .contents import Contents
from .reached import Names, Reached
from .snapshot import PLAIN_CLASSES, PLAIN_TYPES, same, snapshot, state_of
from .stored import StoredReader
from .values import CONTAINERS, FUNCTIONS, Digests, Tokens, name_of, short

# Attributes of every module that no forward reads, or that are compared separately.
BOOKKEEPING = frozenset({
    "_parameters", "_modules", "_buffers", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})
# The attribute in which diffusers' attention modules keep their attention processor.
PROCESSOR = "processor"
FORWARDS = ("forward", "_forward")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Each returns that part of a module's State.
of_children = operator.itemgetter("_modules")
of_hooks = tuple(map(operator.itemgetter, HOOKS))
of_parameters = operator.itemgetter("_parameters")
# Returns the layout of a tensor that is compared: (shape, dtype).
layout_of = operator.attrgetter("shape", "dtype")
# A module's __dict__.
State = dict[str, Any]


class ModuleStates:
    """The classes, attributes, hooks and children of some modules, as they are when this is made, to find out later
    whether the modules still compute the same. Keeps no module alive."""

    def __init__(self, modules: Sequence[nn.Module], ignored: Collection[str], foreign: Mapping[int, Any]) -> None:
        """modules: the root first. ignored: names of attributes that are not compared. foreign: the attention
        processors (PROCESSOR) that are compared by identity alone: snapshot.same(processor), by the index of the module
        that has it."""
        states: list[State] = list(map(state_of, modules))
        self.foreign = dict(foreign)
        self.classes = list(map(type, modules))
        self.attributes = Names(states, [
            [name for name in state.copy() if name not in ignored and not (name == PROCESSOR and index in foreign)]
            for index, state in enumerate(states)
        ])
        self._count = len(modules)
        self._sizes = list(map(len, states))
        # `every`: the modules, then the children of these that are not among them. Noted are the indices of the modules
        # with children, and the index of each child in `every`; None as a child has the last index.
        children = members_of(of_children, states)
        known = set(map(id, modules))
        others = {id(child): child for child in children if child is not None and id(child) not in known}
        every = [*modules, *others.values()]
        self._modules = list(map(weakref.ref, every))
        indices = {id(one): index for index, one in enumerate((*every, None))}
        self._parents = indices_with(of_children, states)
        self._children = [indices[id(child)] for child in children]
        self._hooked = [indices_with(hooks, states) for hooks in of_hooks]
        self._hooks: list[tuple[int, str, Any]] = []
        for index, state in enumerate(states):
            for name in HOOKS:
                if state[name]:
                    self._hooks.append((index, name, snapshot(state[name])))

    def modules(self) -> list[Any]:
        """The modules that this was made of, in the same order; None for one that was freed."""
        return [reference() for reference in self._modules[:self._count]]

    def are_unchanged(self, root: nn.Module) -> bool:
        """Whether the modules compute the same as when this was made; False also if one was freed. root: the first of
        them, which the caller has. Takes a millisecond for all of SDXL's UNet."""
        every: list[Any] = [reference() for reference in self._modules]
        if every[0] is not root or None in every:
            return False
        try:
            return self._are_unchanged(every)
        except KeyError:  # an attribute is gone
            return False

    def _are_unchanged(self, every: list[Any]) -> bool:
        """are_unchanged() for modules that are all alive. every: the modules that this was made of, then the children
        of these that are not among them. Raises KeyError if an attribute is gone."""
        modules = every[:self._count]
        states: list[State] = list(map(state_of, modules))
        children = members_of(of_children, states)
        known_children = map([*every, None].__getitem__, self._children)
        return (
            list(map(type, modules)) == self.classes
            and indices_with(of_children, states) == self._parents
            and len(children) == len(self._children)
            and all(map(operator.is_, children, known_children))
            and list(map(len, states)) == self._sizes
            and [indices_with(hooks, states) for hooks in of_hooks] == self._hooked
            and all(snapshot(states[index][name]) == known for index, name, known in self._hooks)
            and self.attributes.are_unchanged(states)
            and all(same(states[index][PROCESSOR]) == known for index, known in self.foreign.items())
        )


class Tree:
    """The modules of a network and the code that they run, as they are when this is made, to find out later whether
    they still compute the same. Parameters' values are not compared here. Keeps no module alive.

    reached: the code that the modules run.
    hosts: the packages of the modules' and processors' classes, such as "diffusers", "torch", or an extension's.
    """

    def __init__(
        self, root: nn.Module, ignored: Collection[str], placed: Collection[str], tokens: Tokens | None = None,
        before: Tree | None = None, synced: Collection[str] = (),
    ) -> None:
        """root: the network. ignored: names of attributes that are not compared. placed: names of attributes that are
        compared, and are not part of the digest, because they only tell where weights are kept. tokens: the names for
        objects without a digest by value; None: new ones. before: an earlier tree of this root, whose `reached` is used
        again if it is unchanged, which saves time. synced: see HostTraits."""
        modules = list(root.modules())
        states: list[State] = list(map(state_of, modules))
        self._ignored = BOOKKEEPING.union(ignored)
        self._placed = placed
        self._synced = synced
        self._tokens = tokens or Tokens()
        # diffusers' attention processors are not modules. A processor of another package is compared by identity alone:
        # each call runs it as it is, so a proof does not depend on its code or state.
        classes = list(map(type, modules))
        packages = {package(kind.__module__) for kind in classes}
        foreign: dict[int, Any] = {}
        processors: list[type] = []
        for index, state in enumerate(states):
            if PROCESSOR in state:
                kind = type(state[PROCESSOR])
                if package(kind.__module__) in packages:
                    processors.append(kind)
                else:
                    foreign[index] = same(state[PROCESSOR])
        self._states = ModuleStates(modules, self._ignored, foreign)
        self.hosts = frozenset(package(kind.__module__) for kind in (*classes, *processors))
        self.reached: Reached = self._read_code(states, processors, before)

    def _read_code(self, states: Sequence[State], processors: Sequence[type], before: Tree | None) -> Reached:
        """The code of the modules' classes, of the classes of the objects in modules' attributes, and of functions set
        on modules. states: the modules'. processors: the classes of attention processors whose code counts. before: see
        __init__."""
        functions: list[Any] = []
        # Of objects that are not modules, the code of their classes is read.
        classes: list[type] = []
        for state in states:
            for name, value in state.copy().items():
                if type(value) in PLAIN_TYPES or name in self._ignored or name in FORWARDS or name == PROCESSOR:
                    continue
                for one in code_holders_in(value):
                    if isinstance(one, FUNCTIONS):
                        functions.append(one)
                    else:
                        classes.append(type(one))
        sources = list(dict.fromkeys((*self._states.classes, *processors, *classes)))
        known = None if before is None or functions else before.reached
        if known is not None and known.sources == sources and known.is_unchanged():
            return known
        return Reached(sources, functions, self._tokens, self._synced)

    def is_unchanged(self, root: nn.Module) -> bool:
        """Whether the modules and the code that they reach are the same as when this was made. root: the network that
        this was made of. Takes a millisecond for SDXL's UNet."""
        return self._states.are_unchanged(root) and self.reached.is_unchanged()

    def part(self, chosen: Collection[int]) -> ModuleStates:
        """The ModuleStates of some modules of the tree, as they are now. chosen: the ids of these modules, among them
        the root's."""
        modules: list[Any] = []
        foreign: dict[int, Any] = {}
        for index, module in enumerate(self._states.modules()):
            if id(module) in chosen:
                if index in self._states.foreign:
                    foreign[len(modules)] = self._states.foreign[index]
                modules.append(module)
        return ModuleStates(modules, self._ignored, foreign)

    @cached_property
    def digest(self) -> str:
        """A digest, equal in any process, of the classes, all code that they reach, and the attributes that the code
        may read, without those in `placed`. Valid as long as is_unchanged() is true."""
        modules = self._states.modules()
        paths = {id(module): str(index) for index, module in enumerate(modules)}
        digests = Digests(self._tokens, paths)
        attributes: list[tuple[int, str, str]] = []
        for index, module in enumerate(modules):
            for name, value in vars(module).copy().items():
                if type(value) in PLAIN_TYPES or self._is_foreign(index, name):
                    continue
                if self._is_read(name, value):
                    attributes.append((index, name, digests.of_data(value)))
        classes = list(map(name_of, self._states.classes))
        return short(repr((self.reached.digest, self._states.attributes.digest(self._placed), classes, attributes)))

    def _is_foreign(self, index: int, name: str) -> bool:
        """Whether an attribute is an attention processor that is compared by identity alone. index: of its module."""
        return name == PROCESSOR and index in self._states.foreign

    def _is_read(self, name: str, value: Any) -> bool:
        """Whether an attribute that is not a plain value is part of the digest: a function, an object or a built-in
        container, under a name that the network's code uses. Subclasses of built-in containers are not part: they are
        configurations of diffusers, which differ between equal networks."""
        if name not in self.reached.names or name in self._ignored or name in self._placed or name in FORWARDS:
            return False
        if isinstance(value, CONTAINERS):
            return type(value) in CONTAINERS
        return not isinstance(value, (nn.Module, Tensor, type))


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
        self._layouts = list(map(layout_of, parameters))
        self._strides = list(map(Tensor.stride, parameters))
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
        if None in modules:
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
        with suppress(RuntimeError, TypeError):
            return (
                list(map(Tensor.stride, parameters)) == self._strides
                and list(map(layout_of, parameters)) == self._layouts
            )
        return False

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


def with_surroundings(root: nn.Module, layers: Sequence[nn.Module]) -> set[int]:
    """The ids of all modules that affect a pass through these layers. These are the root, the layers, all modules that
    contain a layer, and the children without parameters of all of these (an activation, for example), with everything
    inside of such children. A module may be contained in several others."""
    parents: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for child in module.children():
            parents.setdefault(id(child), []).append(module)
    above: dict[int, nn.Module] = {}
    waiting = [root, *layers]
    while waiting:
        module = waiting.pop()
        if id(module) not in above:
            above[id(module)] = module
            waiting += parents.get(id(module), ())
    found = set(above)
    for module in above.values():
        for child in module.children():
            if next(child.parameters(), None) is None:
                found.update(map(id, child.modules()))
    return found


def unchanged() -> bool:
    """The function that Baseline.begin returns for a copy of ours, which is not compared: the replay is valid."""
    return True


def code_holders_in(value: Any) -> list[Any]:
    """The functions and the objects with code (has_code) in an attribute's value: the value itself, or members of it if
    it is a container. [] if there are none."""
    found = objects_in(value) if isinstance(value, CONTAINERS) else [value]
    return [one for one in found if isinstance(one, FUNCTIONS) or has_code(one)]


def has_code(value: Any) -> bool:
    """Whether the methods of an object's class are compared: False for plain values, containers, tensors and modules,
    and for classes of NOT_READ, such as the standard library's."""
    if isinstance(value, (*PLAIN_CLASSES, *CONTAINERS, Tensor, nn.Module)):
        return False
    return package(type(value).__module__) not in NOT_READ


def indices_with(part_of: Callable[[State], Any], states: Sequence[State]) -> list[int]:
    """The indices of the states in which a part is not empty. part_of: returns that part of a state, a dictionary such
    as its "_modules"."""
    return list(compress(range(len(states)), map(part_of, states)))


def members_of(part_of: Callable[[State], State], states: Iterable[State]) -> list[Any]:
    """The values in a part of each state, in one list. part_of: returns that part of a state, a dictionary such as its
    "_parameters"."""
    parts = filter(None, map(part_of, states))
    return list(chain.from_iterable(map(dict.values, parts)))
