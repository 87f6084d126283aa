"""Random edits of the code that a network runs: replaced functions and methods, and replaced bodies of functions.

The names to replace are found by running the network under a profiler and reading the names that its code calls. Only
those whose replacement changes the output are kept. So there is no list of names to maintain, and every edit has an
effect.
"""
from __future__ import annotations

import dis
import functools
import importlib
import operator
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from edits_of_modules import Inapplicable, Undo, scaled, some
from torch import Tensor, nn

FACTOR = 1.1
TESTS = Path(__file__).parent
FORMS = ("closure", "wraps", "partial", "object", "disguised")
# Names that are never replaced: this tool uses them itself, or torch does not work without them.
KEPT = frozenset({"size", "dim", "is_floating_point", "numel", "stride", "data_ptr", "__init__"})
# Modules of torch whose functions run for every module.
AROUND_ALL = frozenset({"torch.nn.modules.module", "torch.nn.modules.container"})
MISSING = object()


class Site(NamedTuple):
    """A name under which a function is called. owner: the globals of a file (a dict), or a module, class or object."""

    owner: Any
    name: str

    def value(self) -> Any:
        return self.owner[self.name] if isinstance(self.owner, dict) else getattr(self.owner, self.name)

    def put(self, value: Any) -> Undo:
        """Bind the name to a value. Returns a function that restores the previous state."""
        space = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        before = space.get(self.name, MISSING)
        self._set(value)
        return lambda: self._set(before)

    def _set(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        elif value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


class Sites(NamedTuple):
    """The names whose functions a network's output depends on, in a fixed order.

    files: global names of the network's own files, and attributes of the modules that these import.
    torch: names that the functions of torch.nn.functional call.
    tensors: methods of Tensor.
    methods: methods of the classes of modules.
    bodies: those of `files` that are Python functions without a closure, whose code can be replaced.
    """

    files: list[Site]
    torch: list[Site]
    tensors: list[Site]
    methods: list[Site]
    bodies: list[Site]


class Address(NamedTuple):
    """Where to find the owner of a Site after its file was imported again.

    module: the module's name. path: the path of a class or object in it; "" for the module itself. is_namespace:
    whether the owner is the dict of the module's globals.
    """

    module: str
    path: str
    is_namespace: bool

    @classmethod
    def of(cls, owner: Any) -> Address:
        if isinstance(owner, dict):
            return cls(owner["__name__"], "", True)
        if isinstance(owner, types.ModuleType):
            return cls(owner.__name__, "", False)
        if isinstance(owner, type):
            return cls(owner.__module__, owner.__qualname__, False)
        return next(
            cls(module, name, False) for module, space in list(sys.modules.items())
            for name, value in vars(space).items() if value is owner
        )

    def owner(self) -> Any:
        module = importlib.import_module(self.module)
        if self.is_namespace:
            return vars(module)
        return operator.attrgetter(self.path)(module) if self.path else module


Addresses = list[list[tuple[Address, str]]]


def addresses_of(sites: Sites) -> Addresses:
    return [[(Address.of(site.owner), site.name) for site in found] for found in sites]


def sites_at(addresses: Addresses) -> Sites:
    return Sites(*([Site(address.owner(), name) for address, name in found] for found in addresses))


class Frame(NamedTuple):
    """A function that was called. space: its globals. first: the class of its first argument."""

    code: types.CodeType
    space: dict[str, Any]
    first: Any


def frames_of(work: Callable[[], Any]) -> list[Frame]:
    """The Python functions that work() calls, each once for each class of its first argument."""
    found: dict[tuple[types.CodeType, type], Frame] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            found.setdefault((code, type(first)), Frame(code, frame.f_globals, type(first)))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(found.values())


def belongs_to_network(frame: Frame) -> bool:
    """Whether a function belongs to the network: to a host's code or to one of torch's layers."""
    file = Path(frame.code.co_filename)
    name = frame.space.get("__name__", "")
    if name.startswith("torch."):
        return name.startswith("torch.nn.modules.") and name not in AROUND_ALL
    if TESTS in file.parents:
        return "stand_ins" in file.parts
    return name.partition(".")[0] not in ("lib_onediff", "torch", "contextlib", "functools", "typing", "inspect")


def names_called(frame: Frame) -> Iterator[Site]:
    """The global names that a function's code reads, and the attributes that it reads of global modules and objects."""
    value: Any = None
    for instruction in dis.get_instructions(frame.code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in frame.space:
            yield Site(frame.space, instruction.argval)
            value = frame.space[instruction.argval]
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and value is not None:
            owner = value
            value = None
            if isinstance(owner, types.ModuleType) or hasattr(owner, "__dict__") and not callable(owner):
                yield Site(owner, instruction.argval)
                value = getattr(owner, instruction.argval, None)
        elif instruction.opname != "PUSH_NULL":
            value = None


def owner_of(kind: type, code: types.CodeType) -> Site | None:
    """The method with this code, on the class that defines it: `kind` or one of its bases. None if there is none."""
    for base in kind.__mro__:
        function = vars(base).get(code.co_name)
        if isinstance(function, types.FunctionType) and underlying(function).__code__ is code:
            return Site(base, code.co_name)
    return None


def underlying(function: Any) -> Any:
    """The function inside of all wrappers (functools.wraps)."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def sites_of(work: Callable[[], Tensor], root: type) -> Sites:
    """The names on which a network's output depends. work: calls the network by the host's own code. root: the
    network's class; its forward is left out."""
    frames = frames_of(work)
    own = [frame for frame in frames if belongs_to_network(frame)]
    in_torch = [frame for frame in frames if frame.space.get("__name__") == "torch.nn.functional"]
    baseline = work()

    def matters(site: Site) -> bool:
        try:
            value = site.value()
        except (AttributeError, KeyError):
            return False
        if not callable(value) or isinstance(value, type) or site.name in KEPT or site.owner is nn.Module:
            return False
        return changes(lambda: site.put(closure(value, FACTOR)))

    def changes(put: Callable[[], Undo]) -> bool:
        try:
            undo = put()
        except (TypeError, AttributeError, ValueError):
            return False
        try:
            output = work()
            return output.shape == baseline.shape and not torch.allclose(output, baseline, rtol=1e-3, atol=1e-4)
        except Exception:
            return False
        finally:
            undo()

    def kept(sites: Iterator[Site]) -> list[Site]:
        unique = {(id(site.owner), site.name): site for site in sites}
        return [site for site in unique.values() if matters(site)]

    def calls(frames: list[Frame]) -> Iterator[Site]:
        return (site for frame in frames for site in names_called(frame))

    attributes = {name for frame in own for name in frame.code.co_names if name in vars(torch._C.TensorBase)}
    methods = (owner_of(frame.first, frame.code) for frame in own)
    files = kept(calls(own))
    return Sites(
        files,
        # Names of torch.nn.functional itself are in `files`.
        kept(site for site in calls(in_torch) if site.owner is not vars(nn.functional)),
        kept(Site(Tensor, name) for name in sorted(attributes)),
        kept(site for site in methods if site is not None and site != Site(root, "forward")),
        [site for site in files if has_own_body(site.value()) and changes(lambda site=site: other_body(site.value()))],
    )


# --- objects in place of functions --------------------------------------------------------------------------------

def closure(below: Any, factor: float | None) -> Any:
    """A function that calls another one, and multiplies its result by a factor (None: returns the result as it is)."""
    def replaced(*args: Any, **kwargs: Any) -> Any:
        made = below(*args, **kwargs)
        return made if factor is None else scaled(made, factor)

    return replaced


class Louder:
    """As the function that closure() returns, as a callable object."""

    def __init__(self, below: Any, factor: float | None) -> None:
        self.below = below
        self.factor = factor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return closure(self.below, self.factor)(*args, **kwargs)


def in_place_of(below: Any, chance: random.Random, is_method: bool = False) -> Any:
    """A replacement for a function, in a random one of FORMS. With a probability of 1/4, it computes the same."""
    factor = None if chance.random() < 0.25 else FACTOR
    form = chance.choice(FORMS)
    made = closure(below, factor)
    if form == "wraps":
        return functools.wraps(below)(made)
    if form == "partial" and not is_method:
        return functools.partial(lambda function, *args, **kwargs: function(*args, **kwargs), made)
    if form == "object" and not is_method:
        return Louder(below, factor)
    if form == "disguised":
        for name in ("__name__", "__qualname__", "__module__"):
            setattr(made, name, getattr(below, name, name))
    return made


def has_own_body(function: Any) -> bool:
    """Whether other_body can replace the code of a function."""
    is_plain = isinstance(function, types.FunctionType) and not hasattr(function, "__wrapped__")
    return is_plain and not function.__closure__ and not function.__code__.co_freevars


def body(*args: Any, **kwargs: Any) -> Any:
    call: Any = "call"
    return call(*args, **kwargs)


def other_body(function: types.FunctionType) -> Undo:
    """Replace the code of a function, whose object stays the same, by one that multiplies its result by FACTOR."""
    code = function.__code__
    defaults = function.__defaults__
    kwdefaults = function.__kwdefaults__
    before = types.FunctionType(code, function.__globals__, function.__name__, defaults)
    before.__kwdefaults__ = kwdefaults
    louder = closure(before, FACTOR)
    constants = tuple(louder if constant == "call" else constant for constant in body.__code__.co_consts)
    function.__code__ = body.__code__.replace(co_consts=constants, co_name=code.co_name, co_filename=code.co_filename)

    def undo() -> None:
        function.__code__ = code

    return undo


# --- edits: functions of the networks and a random generator ------------------------------------------------------

def chosen(sites: list[Any], chance: random.Random) -> Any:
    if not sites:
        raise Inapplicable
    return chance.choice(sites)


def replace_global(sites: Sites, chance: random.Random) -> Undo:
    site = chosen(sites.files, chance)
    return site.put(in_place_of(site.value(), chance))


def replace_in_torch(sites: Sites, chance: random.Random) -> Undo:
    site = chosen(sites.torch, chance)
    return site.put(in_place_of(site.value(), chance))


def replace_tensor_method(sites: Sites, chance: random.Random) -> Undo:
    site = chosen(sites.tensors, chance)
    return site.put(in_place_of(site.value(), chance, is_method=True))


def exchange_functions(sites: Sites, chance: random.Random) -> Undo:
    """Replace one of torch's functions by another one."""
    pairs = {"sin": "cos", "cos": "sin", "exp": "expm1", "sigmoid": "tanh", "silu": "mish", "softmax": "sigmoid"}
    site = chosen([one for one in sites.files if hasattr(one.owner, pairs.get(one.name, ""))], chance)
    other = getattr(site.owner, pairs[site.name])
    return site.put(other if site.name in ("sin", "cos", "exp", "sigmoid") else lambda x, *args, **kwargs: other(x))


def replace_method(sites: Sites, chance: random.Random) -> Undo:
    site = chosen(sites.methods, chance)
    return site.put(in_place_of(site.value(), chance, is_method=True))


def replace_call_of_modules(sites: Sites, chance: random.Random) -> Undo:
    below = nn.Module.__call__

    def louder(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = below(self, *args, **kwargs)
        return scaled(made, FACTOR) if isinstance(self, nn.SiLU) else made

    return Site(nn.Module, "__call__").put(louder)


def exchange_body(sites: Sites, chance: random.Random) -> Undo:
    function = chosen(sites.bodies, chance).value()
    # Another edit may have replaced the function.
    if not has_own_body(function):
        raise Inapplicable
    return other_body(function)


def one_with_method(network: nn.Module, sites: Sites, chance: random.Random) -> tuple[Any, str]:
    """A random module of the network, and the name of a method of its class on which the output depends."""
    kinds = {type(module) for module in network.modules() if module is not network}
    found = [site for site in sites.methods if any(issubclass(kind, site.owner) for kind in kinds)]
    site = chosen(found, chance)
    return some(network, chance, site.owner, lambda module: module is not network), site.name


def override_in_a_class(network: nn.Module, sites: Sites, chance: random.Random) -> Undo:
    """Change the class of a module to a subclass that overrides a method."""
    module, name = one_with_method(network, sites, chance)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {
        name: in_place_of(getattr(kind, name), chance, is_method=True), "__module__": kind.__module__,
    })
    return lambda: setattr(module, "__class__", kind)


def override_on_an_instance(network: nn.Module, sites: Sites, chance: random.Random) -> Undo:
    module, name = one_with_method(network, sites, chance)
    if name in vars(module):
        raise Inapplicable
    made = in_place_of(getattr(type(module), name), chance, is_method=True)
    setattr(module, name, types.MethodType(made, module))
    return lambda: delattr(module, name)


GLOBALS = (replace_global, replace_global, replace_tensor_method, exchange_functions)
IN_TORCH = (replace_in_torch,)
CLASSES = (replace_method, replace_method, replace_call_of_modules)
BODIES = (exchange_body,)
# Edits of one network, which are made to its twin with the same random choices.
OF_A_NETWORK = (override_in_a_class, override_on_an_instance)
