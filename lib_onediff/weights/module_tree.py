"""A module tree, and whether it still computes the same.

Noted once and compared at every call: the modules and their order, their classes, every attribute, hooks, and all code
that they reach by name (reached.py). An edit of a parameter is none of these, see parameters.py and contents.py.
"""
from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn

from ..core.origins import package
from .code import NOT_READ, objects_in
from .reached import Names, Reached
from .snapshot import PLAIN_CLASSES, PLAIN_TYPES, same, snapshot, state_of
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
