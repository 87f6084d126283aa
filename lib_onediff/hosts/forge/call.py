"""One call of the host's UNet: as a Call, and its prompt's rows alone. Refusal says what in it only the
host's own forward understands."""
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
from ...core.refusal import Refusal
from ...families.unet.call import Control, ImagePrompt, UNetCall
from ..changed_modules import Changed
from .patches import OPTIONS, OptionPatches, points_of

# What the UNet itself writes there while it runs, and what is for ControlNets alone.
HARMLESS_OPTIONS = frozenset({
    "original_shape", "transformer_index", "block", "block_index", "controlnet_conditioning_modifiers",
    "controlnet_model_function_wrapper",
})
# Of a UNet's forward, in their order.
UNET_PARAMETERS = ("x", "timesteps", "context", "y", "control", "transformer_options")
PARTS = ("input", "middle", "output")
# A transformer's context is (batch, tokens, width).
PROMPT_DIMENSIONS = 3
# What each part of a batch is, in the option cond_or_uncond.
COND, UNCOND = 0, 1
NO_MARKS = "the call does not say which rows are the negative prompt's"
SEVERAL_PROMPTS = "several prompts, areas or other predictions share the call"


class HostCall(NamedTuple):
    """The arguments of the host's forward. others: what it takes besides by name."""

    x: Tensor
    timesteps: Tensor
    context: Tensor
    y: Tensor | None
    control: Mapping[str, Any] | None
    options: dict[str, Any]
    others: Mapping[str, Any]

    @classmethod
    def of(cls, parameters: tuple[str, ...], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> HostCall:
        """Of a forward that has these parameters. Raises TypeError for what no such forward takes: more arguments, one
        of them twice, or no x."""
        by_place = dict(zip(parameters, arguments, strict=False))
        others = {**by_place, **named}
        if len(arguments) > len(parameters) or by_place.keys() & named.keys() or "x" not in others:
            raise TypeError(f"the forward takes {', '.join(parameters)}")
        x, timesteps, context, y, control, options = (others.pop(name, None) for name in UNET_PARAMETERS)
        return cls(x, timesteps, context, y, control, {} if options is None else options, others)

    def refuse_no_tensors(self) -> None:
        """Raise Refusal where an input is no tensor."""
        given = self.x, self.timesteps, self.context
        if not all(isinstance(one, Tensor) for one in (given if self.y is None else (*given, self.y))):
            raise Refusal("the latent, the timestep, the context or y is no tensor")

    def by(self, forward: Callable[..., Tensor], unet: nn.Module) -> Tensor:
        """The output of the host's forward, which empties the lists of control: it may have to run again."""
        control = None if self.control is None else {
            part: list(values) if isinstance(values, list) else values for part, values in self.control.items()
        }
        return forward(
            unet, self.x, self.timesteps, context=self.context, y=self.y, control=control,
            transformer_options=self.options, **self.others,
        )

    def of_rows(self, rows: slice) -> HostCall:
        """For the prompt's rows alone, as the host itself calls without guidance."""
        batch, options = self.x.shape[0], {**self.options, "cond_or_uncond": [COND]}
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
        """The options say which they are, and the noise levels among them have one value for each image."""
        marks, levels = self.options.get("cond_or_uncond"), self.options.get("sigmas")
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
    """The call as ours.

    names_read: every name by which the host's UNet may ask for an option or another argument. image_prompts: what our
    forward computes in the place of functions. changed: the UNet's modules on which a forward of their own stands.
    """
    options = given.options
    points = points_of(options, names_read)
    runs_functions = bool(changed) or not all(is_empty(options.get(name)) for name in points)
    others = {name: value for name, value in options.items() if name not in points}
    foreign = unknown_options(others, names_read, runs_functions)
    if foreign:
        raise Refusal(f"another extension changes the UNet for this call: {', '.join(foreign)}")
    unknown = sorted(name for name, value in given.others.items() if value is not None and name in names_read)
    if unknown:
        raise Refusal(f"the network is called with arguments that OneDiff does not know ({', '.join(unknown)})")
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
    """As unet_call, of a transformer. kind: makes its family's call of latent, timestep and context."""
    if given.context.dim() != PROMPT_DIMENSIONS:
        raise Refusal(f"the prompt is {tuple(given.context.shape)}, not (batch, tokens, width)")
    call = unet_call(network, given, upcast_attention, names_read, image_prompts, changed)
    if call.y is not None or call.control is not None or call.image_prompts:
        raise Refusal("this network takes no label, ControlNet or image prompt")
    return kind(call.latent, call.timestep, call.context, upcast_attention=upcast_attention, patches=call.patches)


def unknown_options(options: Mapping[str, Any], names_read: Collection[str], runs_functions: bool) -> list[str]:
    """The entries of transformer_options that may change what the UNet computes, such as
    "patches[output_block_patch] by forge_freeu.py".

    Empty entries change nothing. Neither do entries under a name that the host's UNet never reads: token merging beside
    Anima, and the plain data that hosts add with every release. runs_functions: whether the call runs extensions'
    functions, which get the options too and may call what another extension has put there.
    """
    found: list[str] = []
    for name, value in options.items():
        may_be_used = name in names_read or (runs_functions and not is_plain(value))
        if name not in HARMLESS_OPTIONS and may_be_used and not is_empty(value):
            parts = value if isinstance(value, Mapping) else {"": value}
            found += [describe(name, part, inside) for part, inside in parts.items() if not is_empty(inside)]
    return found


def is_empty(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_empty(inside) for inside in value.values())
    return value is None or (isinstance(value, (list, tuple, set, frozenset, str)) and len(value) == 0)


def is_plain(value: Any) -> bool:
    """Whether there is nothing in a value that could be called."""
    if isinstance(value, Mapping):
        return all(is_plain(inside) for inside in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(is_plain(inside) for inside in value)
    return not callable(value)


def describe(name: str, part: Any, value: Any) -> str:
    label = f"{name}[{part}]" if part != "" else name
    while isinstance(value, (Mapping, list, tuple)) and value:
        value = next(iter(value.values() if isinstance(value, Mapping) else value))
    return f"{label} by {author(value)}" if callable(value) else label


def control_of(control: Mapping[str, Any] | None) -> Control | None:
    """Residuals of ControlNets and T2I adapters in our slots; the host's lists stay as they are.

    Forge's forward takes from the end of each list: the last of input and output belong to the first input and output
    block, and of middle it takes the last alone.
    """
    slots = {part: tuple((control or {}).get(part) or ()) for part in PARTS}
    residuals = [residual for part in PARTS for residual in slots[part] if residual is not None]
    other = next((residual for residual in residuals if not isinstance(residual, Tensor)), None)
    if other is not None:
        raise Refusal(f"control holds a {type(other).__name__}")
    return Control(slots["input"][::-1], slots["middle"][-1:], slots["output"][::-1]) if residuals else None


def names_read_by(*modules: types.ModuleType) -> frozenset[str]:
    """The names under which these modules may read transformer_options, or another mapping: every string and every
    argument's name in their source, and in that of the modules to whose functions they pass the options."""
    found: set[str] = set()
    known, waiting = set(modules), list(modules)
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
    """The other modules to whose functions a module passes the options, such as ComfyUI's patcher_extension."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(map(is_options, (*node.args, *(each.value for each in node.keywords)))):
            function = global_named(module, node.func)
            owner = sys.modules.get(getattr(function, "__module__", None) or "")
            if owner is not None and owner is not module and str(getattr(owner, "__file__", "")).endswith(".py"):
                yield owner


def is_options(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Name) and argument.id == OPTIONS


def global_named(module: types.ModuleType, expression: ast.expr) -> Any:
    """The value of a global name with or without attributes ("attention_function", "extension.get_wrappers"); None for
    other expressions."""
    if isinstance(expression, ast.Attribute):
        return getattr(global_named(module, expression.value), expression.attr, None)
    return getattr(module, expression.id, None) if isinstance(expression, ast.Name) else None
