"""Converts a call of a host's network to ours, and to a call of the prompt's rows alone. Raises Refusal for a call that
only the host's own forward can compute."""
from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...core.call import APART, OTHER_ROWS, Call, half_of
from ...core.inputs import rows_within
from ...core.origins import author
from ...core.refusal import Refusal, unsupported_inputs
from ...families.unet.call import Control, ImagePrompt, UNetCall
from ..changed_modules import Changed
from .patches import OPTIONS, OptionPatches, points_of

# Options that the UNet itself writes while it runs, and options that only ControlNets read.
HARMLESS_OPTIONS = frozenset({
    "original_shape", "transformer_index", "block", "block_index", "controlnet_conditioning_modifiers",
    "controlnet_model_function_wrapper",
})
# The parameters of a UNet's forward, in their order.
UNET_PARAMETERS = ("x", "timesteps", "context", "y", "control", "transformer_options")
# The keys of `control`, for the parts of a UNet.
PARTS = ("input", "middle", "output")
# A transformer's context is (batch, tokens, width).
PROMPT_DIMENSIONS = 3
# The values in the option cond_or_uncond, which has one for each part of a batch.
COND = 0
UNCOND = 1
# Reasons why the rows of a call's prompt are unknown, for users.
NO_MARKS = "the WebUI does not say which part of the step belongs to the negative prompt"
SEVERAL_PROMPTS = "several prompts, areas or other predictions are computed together"


class HostCall(NamedTuple):
    """The arguments of a call of the host's forward, as the host gives them: x, timesteps, context and y may be values
    of any type, also None, until require_tensors() has checked them.

    x: the latent. context: the prompt. y: a UNet's extra embedding, such as SDXL's pooled prompt and sizes; None
        without.
    control: the residuals of ControlNets, lists by part of the UNet ("input"); None without ControlNets.
    options: transformer_options; {} if the host passes none.
    others: further arguments, by name.
    """

    x: Tensor
    timesteps: Tensor
    context: Tensor
    y: Tensor | None
    control: Mapping[str, Any] | None
    options: dict[str, Any]
    others: Mapping[str, Any]

    @classmethod
    def of(cls, parameters: tuple[str, ...], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> HostCall:
        """The HostCall of a call of a host's forward. parameters: the forward's, in their order. arguments, named: the
        call's, by position and by keyword; what is not given is None. Raises TypeError, as the forward does, for too
        many arguments, for one that is given twice, and without x."""
        by_place = dict(zip(parameters, arguments, strict=False))
        others = {**by_place, **named}
        if len(arguments) > len(parameters) or by_place.keys() & named.keys() or "x" not in others:
            raise TypeError(f"the forward takes {', '.join(parameters)}")
        x, timesteps, context, y, control, options = (others.pop(name, None) for name in UNET_PARAMETERS)
        return cls(x, timesteps, context, y, control, {} if options is None else options, others)

    def require_tensors(self) -> None:
        """Raise Refusal unless the latent, the timesteps and the context are tensors, and y is one or None."""
        given = self.x, self.timesteps, self.context
        if not all(isinstance(one, Tensor) for one in (given if self.y is None else (*given, self.y))):
            raise unsupported_inputs("the latent, the timestep, the prompt or the pooled prompt is not a tensor")

    def run(self, forward: Callable[..., Tensor], unet: nn.Module) -> Tensor:
        """The output of `forward`, the host's own forward of unet's class, for the network unet and these arguments.
        May be called several times: the forward removes elements from the lists in control, so it gets copies of the
        lists.
        """
        control = None if self.control is None else {
            part: list(values) if isinstance(values, list) else values for part, values in self.control.items()
        }
        return forward(
            unet, self.x, self.timesteps, context=self.context, y=self.y, control=control,
            transformer_options=self.options, **self.others,
        )

    def of_rows(self, rows: slice) -> HostCall:
        """A new HostCall with only the prompt's rows, and with the options that the host would pass if it computed no
        negative prompt. rows: the result of prompt_rows(), one half of the call."""
        batch = self.x.shape[0]
        options = {**self.options, "cond_or_uncond": [COND]}
        if isinstance(options.get("cond_mark"), Tensor):
            options["cond_mark"] = options["cond_mark"][rows]
        if "cond_indices" in options:
            options |= {"cond_indices": list(range(batch // 2)), "uncond_indices": []}
        if isinstance(options.get("uuids"), list):
            options["uuids"] = options["uuids"][1:] if rows.start else options["uuids"][:1]
        return self._replace(
            x=self.x[rows], timesteps=self.timesteps[rows], context=self.context[rows],
            y=None if self.y is None else self.y[rows],
            control=None if self.control is None else rows_within(dict(self.control), rows, batch), options=options,
        )

    def prompt_rows(self) -> slice:
        """The rows of the prompt in this call: the first or the second half. The rest are the negative prompt's rows.
        The option cond_or_uncond tells which half, and the option sigmas, (images,), how many rows a half must have.
        Raises Refusal if the call is not made of these two halves, or if one of the options is missing."""
        marks = self.options.get("cond_or_uncond")
        levels = self.options.get("sigmas")
        if not isinstance(marks, (list, tuple)) or not isinstance(levels, Tensor) or levels.dim() != 1:
            raise Refusal(NO_MARKS)
        if sorted(marks) != [COND, UNCOND]:
            raise Refusal(APART if len(marks) == 1 else SEVERAL_PROMPTS)
        if self.x.shape[0] != 2 * levels.shape[0]:
            raise Refusal(OTHER_ROWS)
        return half_of(self.x.shape[0], is_first=marks[0] == COND)


def unet_call(
    unet: nn.Module, given: HostCall, upcast_attention: bool, names_read: Collection[str],
    image_prompts: tuple[ImagePrompt, ...] = (), changed: Changed | None = None,
) -> UNetCall:
    """Our UNetCall for this call of the host's UNet (given), with the functions of extensions that the call brings.
    Raises Refusal if only the host can compute it.

    upcast_attention: whether the host computes attention scores in float32.
    names_read: the names under which the host's UNet may read an option or another argument (HostNetwork.names_read).
    image_prompts: the IP-Adapters that our forward computes itself.
    changed: the UNet's modules on which extensions have set forwards; None without such modules.
    """
    options = given.options
    points = points_of(options, names_read)
    runs_functions = bool(changed) or not all(is_empty(options.get(name)) for name in points)
    others = {name: value for name, value in options.items() if name not in points}
    foreign = unknown_options(others, names_read, runs_functions)
    if foreign:
        raise Refusal(f"another extension changes the UNet in this step: {', '.join(foreign)}")
    unknown = sorted(name for name, value in given.others.items() if value is not None and name in names_read)
    if unknown:
        raise unsupported_inputs(f"unknown arguments ({', '.join(unknown)})")
    patches: OptionPatches | None = None
    if runs_functions:
        patches = OptionPatches(unet, options, names_read, bool(image_prompts), changed or {})
    return UNetCall(
        latent=given.x, timestep=given.timesteps, context=given.context, y=given.y, control=control_of(given.control),
        upcast_attention=upcast_attention, patches=patches if patches is not None and patches.structure else None,
        image_prompts=image_prompts,
    )


def transformer_call(
    kind: Callable[..., Call], network: nn.Module, given: HostCall, upcast_attention: bool,
    names_read: Collection[str], image_prompts: tuple[ImagePrompt, ...] = (), changed: Changed | None = None,
) -> Call:
    """Our Call for this call of a host's transformer (given). Raises Refusal if only the host can compute it; also for
    y, ControlNets and image prompts, which only UNets take, and for a prompt that is not (batch, tokens, width).

    kind: kind(latent, timestep, context, upcast_attention=, patches=) returns the family's Call.
    upcast_attention, names_read, image_prompts, changed: see unet_call.
    """
    if given.context.dim() != PROMPT_DIMENSIONS:
        shape = tuple(given.context.shape)
        raise unsupported_inputs(f"the prompt has the shape {shape} instead of (batch, tokens, width)")
    call = unet_call(network, given, upcast_attention, names_read, image_prompts, changed)
    if call.y is not None or call.control is not None or call.image_prompts:
        raise Refusal(
            "a ControlNet, an image prompt or class labels are used, which OneDiff does not support with this model"
        )
    return kind(call.latent, call.timestep, call.context, upcast_attention=upcast_attention, patches=call.patches)


def unknown_options(options: Mapping[str, Any], names_read: Collection[str], runs_functions: bool) -> list[str]:
    """The entries of `options` that may change the UNet's output, in words for the user, such as
    "patches[output_block_patch] by forge_freeu.py". The caller refuses the call if there are any. [] if none may.

    Empty entries change nothing. Entries that the host's UNet never reads change nothing either, such as token
    merging's in Anima, or plain data that a new release of the WebUI adds.

    options: transformer_options without the entries whose functions our forward calls (points_of). names_read: see
    unet_call. runs_functions: whether functions of extensions run in this call. They get the options too, and may call
    functions that another extension has put there, so entries with functions then count even if the UNet never reads
    them.
    """
    found: list[str] = []
    for name, value in options.items():
        may_be_used = name in names_read or (runs_functions and not is_plain(value))
        if name not in HARMLESS_OPTIONS and may_be_used and not is_empty(value):
            parts = value if isinstance(value, Mapping) else {"": value}
            found += [describe(name, part, inside) for part, inside in parts.items() if not is_empty(inside)]
    return found


def is_empty(value: Any) -> bool:
    """Whether an entry of transformer_options has nothing in it: None, an empty string, list, tuple or set, or a
    mapping whose values are all empty. A number or a tensor is not empty."""
    if isinstance(value, Mapping):
        return all(is_empty(inside) for inside in value.values())
    return value is None or (isinstance(value, (list, tuple, set, frozenset, str)) and len(value) == 0)


def is_plain(value: Any) -> bool:
    """Whether an entry of transformer_options is data alone: neither callable, nor a container with something callable
    in it."""
    if isinstance(value, Mapping):
        return all(is_plain(inside) for inside in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(inside) for inside in value)
    return not callable(value)


def describe(name: str, part: Any, value: Any) -> str:
    """An entry of transformer_options in words for the user, such as "patches[attn1_patch] by an_extension": the
    entry's name, and the author of the first function in the entry (first_function); without a function, the name
    alone.

    name: the option's name. part: the entry's key if the option is a mapping; "" if it is none. value: the option's
    value, or in a mapping the one at this key.
    """
    label = f"{name}[{part}]" if part != "" else name
    function = first_function(value)
    return label if function is None else f"{label} by {author(function)}"


def first_function(value: Any) -> Any:
    """The first callable in an entry of transformer_options: the entry itself, or one in its mappings, lists and tuples
    at any depth. None if there is none."""
    if callable(value):
        return value
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return None
    found = (first_function(inside) for inside in value)
    return next((function for function in found if function is not None), None)


def control_of(control: Mapping[str, Any] | None) -> Control | None:
    """The residuals of ControlNets and T2I adapters as a Control, which our forward adds; None if there are none.
    Raises Refusal for values that are not tensors. control: see HostCall; the lists stay unchanged.

    The host's forward takes residuals from the end of each list: the last element of input, and of output, is for the
    first block. Of middle, it takes the last element alone.
    """
    slots = {part: tuple((control or {}).get(part) or ()) for part in PARTS}
    residuals = [residual for part in PARTS for residual in slots[part] if residual is not None]
    other = next((residual for residual in residuals if not isinstance(residual, Tensor)), None)
    if other is not None:
        raise unsupported_inputs(f"a ControlNet passes a {type(other).__name__} instead of a tensor")
    return Control(slots["input"][::-1], slots["middle"][-1:], slots["output"][::-1]) if residuals else None


def names_read_by(*modules: types.ModuleType) -> frozenset[str]:
    """All names under which these Python modules may read an entry of transformer_options or another mapping: every
    string and every name of a keyword argument in their source, so rather too many than too few.

    If a module passes the options to functions of another module, the source of the other module counts too, and so on.
    Raises OSError if a source is not available.
    """
    found: set[str] = set()
    known = set(modules)
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        tree = ast.parse(inspect.getsource(module))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
        further = set(receivers_of_options(module, tree)) - known
        known |= further
        waiting += further
    return frozenset(found)


def receivers_of_options(module: types.ModuleType, tree: ast.AST) -> Iterator[types.ModuleType]:
    """The Python modules to whose functions a module passes the variable transformer_options, such as ComfyUI's
    patcher_extension. May yield a module more than once, also the given one. tree: the module's parsed source."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(map(is_options, (*node.args, *(each.value for each in node.keywords)))):
            function = global_named(module, node.func)
            owner = sys.modules.get(getattr(function, "__module__", None) or "")
            if owner is not None and owner is not module and str(getattr(owner, "__file__", "")).endswith(".py"):
                yield owner


def is_options(argument: ast.expr) -> bool:
    """Whether an argument of a call, in parsed source, is the variable transformer_options itself."""
    return isinstance(argument, ast.Name) and argument.id == OPTIONS


def global_named(module: types.ModuleType, expression: ast.expr) -> Any:
    """The object that an expression in a module's source names: a global name of the module, with or without attributes
    ("attention_function", "extension.get_wrappers"). None if the expression is anything else, or there is no such name.
    """
    if isinstance(expression, ast.Attribute):
        return getattr(global_named(module, expression.value), expression.attr, None)
    return getattr(module, expression.id, None) if isinstance(expression, ast.Name) else None
