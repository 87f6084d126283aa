"""A network as it was at the last look: its modules, its parameters, and the comparison of both around a replay.

Tree: the modules and their order, their classes, every attribute, hooks, and all code that they reach by name
(reached.py). Parameters: which objects they are, where they lie and how, and how often they were edited. Baseline: all
that a replay is compared with. Everything that a replay goes through in weights/ is in this file, without a frame for
each module; contents.py and on_the_fly.py come in where a network needs them.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, compress
from typing import Any

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

# What torch keeps on every module and no forward pass reads, or what is compared by itself.
BOOKKEEPING = frozenset({
    "_parameters", "_modules", "_buffers", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})
PROCESSOR = "processor"
FORWARDS = ("forward", "_forward")
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
of_children = operator.itemgetter("_modules")
of_hooks = tuple(map(operator.itemgetter, HOOKS))
of_parameters = operator.itemgetter("_parameters")
layout_of = operator.attrgetter("shape", "dtype")
State = dict[str, Any]


class Tree:
    """A module tree as it computed when this was made. Keeps no module alive.

    reached: the code that it runs. hosts: the packages that the classes of its modules come from, such as "diffusers",
    "torch", or an extension's.
    """

    def __init__(
        self, root: nn.Module, ignored: Collection[str], placed: Collection[str], tokens: Tokens | None = None,
        before: Tree | None = None, synced: Collection[str] = (),
    ) -> None:
        """ignored: names of attributes that are compared elsewhere. placed: names of attributes that are compared, but
        are no part of the digest. tokens: give names to objects that have no digest by value. before: an earlier tree
        of this root: its code is taken over where it is still the same. synced: see HostTraits."""
        modules = list(root.modules())
        states: list[State] = list(map(state_of, modules))
        self._modules = list(map(weakref.ref, modules))
        self._classes = list(map(type, modules))
        self._ignored = BOOKKEEPING.union(ignored)
        self._placed = placed
        self._synced = synced
        self._tokens = tokens or Tokens()
        # An attention's processor is no module. One of another package is called as it is, at every call: which object
        # it is counts, and neither its code nor what it remembers between calls is part of what was proved.
        packages = {package(kind.__module__) for kind in self._classes}
        self._foreign: dict[int, Any] = {}
        processors: list[type] = []
        for place, state in enumerate(states):
            if PROCESSOR in state:
                kind = type(state[PROCESSOR])
                if package(kind.__module__) in packages:
                    processors.append(kind)
                else:
                    self._foreign[place] = same(state[PROCESSOR])
        self._attributes = Names(states, [self._compared(place, state) for place, state in enumerate(states)])
        self._sizes = list(map(len, states))
        # The indices of the modules that have children, and of each child. A child may be None: its index is the one
        # after the last module's.
        places = {id(one): place for place, one in enumerate((*modules, None))}
        self._parents = places_with(of_children, states)
        self._children = [places[id(child)] for child in members_of(of_children, states)]
        self._hooked = [places_with(hooks, states) for hooks in of_hooks]
        self._hooks: list[tuple[int, str, Any]] = []
        for place, state in enumerate(states):
            for name in HOOKS:
                if state[name]:
                    self._hooks.append((place, name, snapshot(state[name])))
        self.hosts = frozenset(package(kind.__module__) for kind in (*self._classes, *processors))
        self.reached: Reached = self._read_code(states, processors, before)

    def _compared(self, place: int, state: State) -> list[str]:
        """The names of a module's attributes that are compared."""
        return [name for name in state.copy() if name not in self._ignored and not self._is_foreign(place, name)]

    def _read_code(self, states: Sequence[State], processors: Sequence[type], before: Tree | None) -> Reached:
        """The code of all classes, of the objects that modules hold, and of functions set on modules."""
        functions: list[Any] = []
        # Objects that are no modules compute as their classes do.
        classes: list[type] = []
        for state in states:
            for name, value in state.copy().items():
                if type(value) in PLAIN_TYPES or name in self._ignored or name in FORWARDS or name == PROCESSOR:
                    continue
                for one in held_by(value):
                    if isinstance(one, FUNCTIONS):
                        functions.append(one)
                    else:
                        classes.append(type(one))
        sources = list(dict.fromkeys((*self._classes, *processors, *classes)))
        known = None if before is None or functions else before.reached
        if known is not None and known.sources == sources and known.stands():
            return known
        return Reached(sources, functions, self._tokens, self._synced)

    def stands(self, root: nn.Module) -> bool:
        """Whether it computes as it did. A millisecond for SDXL's UNet."""
        modules: list[Any] = [reference() for reference in self._modules]
        if modules[0] is not root or None in modules:
            return False
        try:
            return self._stands(modules)
        except KeyError:  # an attribute is gone
            return False

    def _stands(self, modules: list[Any]) -> bool:
        states: list[State] = list(map(state_of, modules))
        children = members_of(of_children, states)
        known_children = map([*modules, None].__getitem__, self._children)
        return (
            list(map(type, modules)) == self._classes
            and places_with(of_children, states) == self._parents
            and len(children) == len(self._children)
            and all(map(operator.is_, children, known_children))
            and list(map(len, states)) == self._sizes
            and [places_with(hooks, states) for hooks in of_hooks] == self._hooked
            and all(snapshot(states[place][name]) == known for place, name, known in self._hooks)
            and self._attributes.stand(states)
            and all(same(states[place][PROCESSOR]) == known for place, known in self._foreign.items())
            and self.reached.stands()
        )

    @cached_property
    def digest(self) -> str:
        """Tells the sources of this computation from others, in any process: classes, all code that they reach, and
        plain attributes but placed. It holds as long as stands() is true."""
        modules = [reference() for reference in self._modules]
        paths = {id(module): str(place) for place, module in enumerate(modules)}
        digests = Digests(self._tokens, paths)
        attributes: list[tuple[int, str, str]] = []
        for place, module in enumerate(modules):
            for name, value in vars(module).copy().items():
                if type(value) in PLAIN_TYPES or self._is_foreign(place, name):
                    continue
                if self._is_read(name, value):
                    attributes.append((place, name, digests.of_data(value)))
        classes = list(map(name_of, self._classes))
        return short(repr((self.reached.digest, self._attributes.digest(self._placed), classes, attributes)))

    def _is_foreign(self, place: int, name: str) -> bool:
        """Whether an attribute of the module at a place is a processor of another package."""
        return name == PROCESSOR and place in self._foreign

    def _is_read(self, name: str, value: Any) -> bool:
        """Whether an attribute of a module goes into the digest: a function, an object or a plain container whose name
        the network's code uses. Containers of other classes (diffusers' configurations) only note where a network is
        from."""
        if name not in self.reached.names or name in self._ignored or name in self._placed or name in FORWARDS:
            return False
        if isinstance(value, CONTAINERS):
            return type(value) in CONTAINERS
        return not isinstance(value, (nn.Module, Tensor, type))


class Parameters:
    """The parameters of some modules as they were when this was made. Keeps none of them alive."""

    def __init__(self, modules: Sequence[nn.Module], reader: StoredReader | None = None) -> None:
        """reader: of weights in few bits: their values and scales stand in the place of their parameters."""
        self._modules = list(map(weakref.ref, modules))
        self._reader = reader
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
        # How often each was edited in place when were_edited was called last.
        self._edits = edit_counts(parameters)
        # Of an inference tensor torch counts no edits.
        self._all_counted = not any(map(Tensor.is_inference, parameters))

    def in_place(self) -> list[Any] | None:
        """The parameters, if each module is alive and each parameter has the address that was noted. None otherwise:
        the memory at these addresses may have been freed, and nothing may read there. A fifth of a millisecond for
        SDXL's UNet. Let go of the list after the call: it keeps the parameters alive."""
        modules: list[Any] = [reference() for reference in self._modules]
        if None in modules:
            return None
        if self._reader is None:
            # Without a frame for each module.
            dictionaries = filter(None, map(of_parameters, map(state_of, modules)))
            values = chain.from_iterable(map(dict.values, dictionaries))
            parameters = [one for one in values if one is not None]
        else:
            parameters = self._reader.tensors(modules)
        with suppress(RuntimeError, TypeError):
            if self._reader is not None and self._reader.facts(modules) != self._facts:
                return None
            if self._addresses == list(map(Tensor.data_ptr, parameters)):
                return parameters
        return None

    def are_same(self, parameters: Sequence[Any]) -> bool:
        """Whether these are the very tensors that were noted, of the same shapes, types and strides. parameters: what
        in_place has returned."""
        if not all(map(operator.is_, parameters, [reference() for reference in self._references])):
            return False
        with suppress(RuntimeError, TypeError):
            return (
                list(map(Tensor.stride, parameters)) == self._strides
                and list(map(layout_of, parameters)) == self._layouts
            )
        return False

    def were_edited(self, parameters: Sequence[Any]) -> bool:
        """Whether any was edited in place since this was called last, as far as torch counts edits. parameters: what
        in_place has returned."""
        before = self._edits
        self._edits = []
        if self._all_counted:
            # Without the test of each tensor that edit_counts makes. It raises where a parameter's data was replaced
            # by an inference tensor's.
            with suppress(RuntimeError):
                self._edits = list(map(version_of, parameters))
        self._edits = self._edits or edit_counts(parameters)
        return self._edits != before

    def stand(self) -> bool:
        """Whether these are still the parameters, and each lies where and as it lay."""
        found = self.in_place()
        return found is not None and self.are_same(found)


class Baseline:
    """A network as it was at the last look. Each call compares the network with it, and a replay does so while the GPU
    computes. Keeps no module alive.

    epoch: the versions that are raised where a difference is found; see Epoch.
    tree: the modules. parameters: where the weights lie. None: to be noted anew before the next replay.
    contents: the numbers in memory; None where no edit has to be found there.
    wanted_lora: returns which LoRAs the host wants; None where it brings weights up to date by itself. lora: what that
    returned when the weights were brought up to date last.
    begin_applied: begins to compare what the host applies to the weights at each use with what it was, and returns a
    function that ends that and returns whether it is the same; None where the host applies nothing.
    """

    def __init__(
        self, root: nn.Module, wanted_lora: Callable[[], Hashable] | None = None, is_copy: bool = False
    ) -> None:
        """is_copy: the network is a copy of ours, which nobody else changes: nothing is compared."""
        self._root = weakref.ref(root)
        self._is_copy = is_copy
        self.epoch = Epoch()
        self.tree: Tree | None = None
        self.parameters: Parameters | None = None
        self.contents: Contents | None = None
        self.wanted_lora = wanted_lora
        self.lora: Hashable = None
        self.begin_applied: Callable[[], Callable[[], bool]] | None = None

    def advance(self, structure: int = 0, addresses: int = 0, values: int = 0) -> None:
        """Add these to the versions of the epoch."""
        now = self.epoch
        self.epoch = Epoch(now.structure + structure, now.addresses + addresses, now.values + values)

    def begin(self) -> Callable[[], bool] | None:
        """Begin to compare the network with this, around a replay. Returns the function to call once the replay is
        launched; None where it must not be launched: weights lie elsewhere, or the host wants other LoRAs.

        That function returns whether the output is this network's: False where the modules, their code, the parameter
        objects or what the host applies to them have changed. An edit of values in place raises epoch.values, and is
        otherwise the caller's affair: the graph has read the edited values.
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
            if not tree.stands(root):
                return False
            have_changed = contents_changed is not None and contents_changed()
            if not parameters.are_same(present):
                return False
            # Last, and noted at once: each edit is reported once.
            if parameters.were_edited(present) or have_changed:
                self.advance(values=1)
            return is_same_applied is None or is_same_applied()

        return is_same

    def look_for_edits(self) -> bool:
        """Raise epoch.values if values were edited in place since the last look. Returns True, whether edited or not;
        False, and no edit is counted, where the parameters are others or lie elsewhere: they must be bound again."""
        parameters = self.parameters
        present = None if parameters is None else parameters.in_place()
        if parameters is None or present is None or not parameters.are_same(present):
            return False
        have_changed = self.contents is not None and self.contents.begin(are_alive=True)()
        # Last, and noted at once: each edit is reported once.
        if parameters.were_edited(present) or have_changed:
            self.advance(values=1)
        return True


def unchanged() -> bool:
    """The end of a comparison that has nothing to compare."""
    return True


def held_by(value: Any) -> list[Any]:
    """The functions and objects that an attribute of a module is, or contains."""
    found = objects_in(value) if isinstance(value, CONTAINERS) else [value]
    return [one for one in found if isinstance(one, FUNCTIONS) or has_code(one)]


def has_code(value: Any) -> bool:
    """Whether an object is of a class whose methods are read."""
    if isinstance(value, (*PLAIN_CLASSES, *CONTAINERS, Tensor, nn.Module)):
        return False
    return package(type(value).__module__) not in NOT_READ


def places_with(part_of: Callable[[State], Any], states: Sequence[State]) -> list[int]:
    """The places of the states of which this part is not empty; for most it is."""
    return list(compress(range(len(states)), map(part_of, states)))


def members_of(part_of: Callable[[State], State], states: Iterable[State]) -> list[Any]:
    """The values in this part of the modules' states, one after the other."""
    parts = filter(None, map(part_of, states))
    return list(chain.from_iterable(map(dict.values, parts)))
