"""Finds out whether a network's modules have changed since they were last read: compares their order, their classes,
attributes and hooks, and all code that they reach by name (reached.py). baseline.py compares their parameters.

Each replay runs this, so there is no Python call for each module.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn

from ..core.origins import package
from .code import NOT_READ, objects_in
from .reached import Names, Reached
from .snapshot import PLAIN_CLASSES, PLAIN_TYPES, same, snapshot, state_of
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
        # `every`: the modules, then the children of these that are not among them. Noted are the number of children of
        # each module, and the index of each child in `every`; None as a child has the last index.
        dictionaries = list(map(of_children, states))
        children = members_of(dictionaries)
        known = set(map(id, modules))
        others = {id(child): child for child in children if child is not None and id(child) not in known}
        every = [*modules, *others.values()]
        self._modules = list(map(weakref.ref, every))
        indices = {id(one): index for index, one in enumerate((*every, None))}
        self._child_counts = list(map(len, dictionaries))
        # Returns the children from [*every, None].
        self._pick_children = picker([indices[id(child)] for child in children])
        self._hooked = [indices_with(hooks, states) for hooks in of_hooks]
        self._has_hooks = any(self._hooked)
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
        if every[0] is not root:
            return False
        try:
            return self._are_unchanged(every)
        except (KeyError, RuntimeError, TypeError, ValueError):
            # An attribute is gone, or is now a value, such as a tensor, that == does not compare with a plain one.
            return False

    def _are_unchanged(self, every: list[Any]) -> bool:
        """are_unchanged() with the modules. every: the modules that this was made of, then the children of these that
        are not among them; None for one that was freed. Raises KeyError if an attribute is gone."""
        modules = every[:self._count]
        # A freed module has the class of None.
        if list(map(type, modules)) != self.classes or None in every[self._count:]:
            return False
        states: list[State] = list(map(state_of, modules))
        dictionaries = list(map(of_children, states))
        if list(map(len, dictionaries)) != self._child_counts:
            return False
        return (
            all(map(operator.is_, members_of(dictionaries), self._pick_children([*every, None])))
            and list(map(len, states)) == self._sizes
            and self._have_same_hooks(states)
            and all(snapshot(states[index][name]) == known for index, name, known in self._hooks)
            and self.attributes.are_unchanged(states)
            and all(same(states[index][PROCESSOR]) == known for index, known in self.foreign.items())
        )

    def _have_same_hooks(self, states: Sequence[State]) -> bool:
        """Whether the same modules have hooks. Which hooks, is compared separately. states: the modules'."""
        if self._has_hooks:
            return [indices_with(hooks, states) for hooks in of_hooks] == self._hooked
        return not any(any(map(hooks, states)) for hooks in of_hooks)


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


def members_of(dictionaries: Iterable[State]) -> list[Any]:
    """The values of all of these dictionaries, in one list."""
    return list(chain.from_iterable(map(dict.values, filter(None, dictionaries))))


def picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that returns the members of a list at these indices, as a sequence."""
    # An itemgetter of one index returns the member itself.
    return operator.itemgetter(*indices) if len(indices) > 1 else partial(members_at, indices)


def members_at(indices: Sequence[int], members: Sequence[Any]) -> list[Any]:
    """The members of a list at these indices."""
    return [members[index] for index in indices]
