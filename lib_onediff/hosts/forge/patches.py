"""Functions that extensions set on a UNet of the Forge family, as the patch points of our forward.

The protocol is ComfyUI's: transformer_options has lists of functions under "patches" and "block_modifiers", one
function for each attention under "patches_replace", and one for group norms under "group_norm_wrapper". Every function
also gets the options, in which the UNet notes the block that is running. Some WebUIs never read some of these names;
their UNets have no such points.

An extension may also set a forward on the instance of an attention (regional prompts) or of a transformer block. Our
forward calls it with the arguments that the host's own block passes. Such a module is called "changed" here, and "the
options" are the call's transformer_options.
"""
from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ...core.origins import author
from ...families.unet.layout import TransformerBlock
from ...families.unet.patch_points import CROSS_ATTENTION, INPUT, SELF_ATTENTION, BlockPlace, PatchPoints
from ..changed_modules import SELF_NORM, Changed, functions_of, words_for

# The names of the options in which extensions set functions, and of the argument that has the options.
PATCHES = "patches"
REPLACED = "patches_replace"
MODIFIERS = "block_modifiers"
NORM = "group_norm_wrapper"
OPTIONS = "transformer_options"
# The lists whose functions run within transformer blocks.
IN_BLOCKS = ("attn1_patch", "attn1_output_patch", "middle_patch", "attn2_patch", "attn2_output_patch")
# For each point of our forward that has a list: the list whose functions are called there.
POINTS = {
    "embedding": "emb_patch", "after_stage": "input_block_patch", "after_skip": "input_block_patch_after_skip",
    "join": "output_block_patch", "self_attention_inputs": "attn1_patch", "cross_attention_inputs": "attn2_patch",
    "between_attentions": "middle_patch",
}
# The list for the point attention_output, made of the attention's name.
OUTPUT_OF = "{}_output_patch"
LISTS = frozenset({*POINTS.values(), *map(OUTPUT_OF.format, (SELF_ATTENTION, CROSS_ATTENTION))})
# The names of attentions, which are also keys of "patches_replace".
ATTENTIONS = frozenset({SELF_ATTENTION, CROSS_ATTENTION})
# An option that ldm_patched sets in each block, from the attribute attn_precision of the block's module.
PRECISION = "attn_precision"
# The last part of the path of an attention's query, below its block.
QUERY = ".attn2.to_q"


class OptionPatches(PatchPoints):
    """The functions in one call's transformer_options and on the UNet's modules. Our forward calls a method at each of
    its points; the method calls the functions of extensions for that point in order, each with the previous function's
    result, and returns the last result, or its argument if there are no functions. PatchPoints has the shapes, and
    sees_stages and norm; Points has functions, structure and positions. structure is () if no function is set."""

    def __init__(
        self, unet: nn.Module, options: dict[str, Any], names_read: Collection[str], has_image_prompts: bool,
        changed: Changed,
    ) -> None:
        """unet: the host's; kept by a weak reference.
        options: the call's; the methods write into it what the host's forward notes there.
        names_read: the names that the host's UNet may read from options.
        has_image_prompts: whether the functions that replace cross attentions are IP-Adapters that our forward computes
            itself. If so, these functions are not called.
        changed: the modules on which extensions have set forwards.
        """
        self._unet = weakref.ref(unet)
        self._changed_modules = changed
        self._here: dict[str, Any] = {}
        self._options = options
        self._lists: dict[str, list[Callable[..., Any]]] = {
            name: list(functions) for name, functions in (options.get(PATCHES) or {}).items() if functions
        }
        self._replaced: Mapping[str, Mapping[Any, Callable[..., Tensor]]] = {
            name: blocks for name, blocks in (options.get(REPLACED) or {}).items()
            if not (has_image_prompts and name == CROSS_ATTENTION)
        }
        self._modifiers = list(options.get(MODIFIERS) or ())
        self._norm: Any = options.get(NORM)
        self.norm = None if self._norm is None else self._normed
        self._reads_precision = PRECISION in names_read
        self._extra: dict[str, Any] = {}
        self._block: BlockPlace = ("", 0, 0)
        self.sees_stages = bool(self._modifiers) or self._norm is not None
        self.positions = (
            sorted(self._lists), {name: set(blocks) for name, blocks in self._replaced.items()}, bool(self._modifiers),
            self._norm is not None, {path: tuple(names) for path, names in changed.items()},
        )
        listed = (f"{name} by {author(function)}" for name, function in self._named())
        self.structure = tuple(sorted((*listed, *words_for(changed))))

    @cached_property
    def functions(self) -> list[Any]:  # type: ignore[override]
        """Every function of extensions that is called in this call, also the forwards on changed modules. See
        Points."""
        # Collected when they are needed, because replays do not need them.
        lists = (*self._lists.values(), self._modifiers, *(blocks.values() for blocks in self._replaced.values()))
        return [*chain(*lists), *filter(None, [self._norm]), *functions_of(self._changed_modules)]

    def _named(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """(name, function) for the functions in the options, as `structure` shows them to users. name: of the option,
        such as "patches[attn1_patch]". Of the functions by which an extension replaces attentions, yields only one for
        self attention, and one for cross attention."""
        for name, functions in self._lists.items():
            yield from ((f"{PATCHES}[{name}]", function) for function in functions)
        for name, blocks in self._replaced.items():
            # An extension may set a function for each block; users read the extension's name once.
            kinds = {author(function): function for function in blocks.values()}
            count = sum(place in blocks or place[:2] in blocks for place in blocks_of(self._unet()))
            yield from ((f"{REPLACED}[{name}] of {count} blocks", function) for function in kinds.values())
        yield from ((MODIFIERS, function) for function in self._modifiers)
        if self._norm is not None:
            yield NORM, self._norm

    def has_function(self, point: str, *arguments: Any) -> bool:
        """Whether the method of this name (point) calls a function of an extension for these arguments. For points
        within a transformer block, whether it does so in the present block (begin_block). True for "norm", which is a
        point only if `norm` is set. See Points."""
        if point in ("before_stage", "after_stage") and self._modifiers:
            return True
        if point == "attend":
            return self._replacement(arguments[0]) is not None
        if point == "whole_block":
            return "" in self._here
        if point == "whole_attention":
            return self._module_of(arguments[0]) is not None
        if point == "attention_output":
            return OUTPUT_OF.format(arguments[0]) in self._lists
        if point == "after_stage" and arguments[0] != INPUT:
            return False
        return point == "norm" or POINTS.get(point) in self._lists

    def begin(self, latent: Tensor) -> None:
        """Called when a forward of this latent begins: writes the latent's shape into the options, and 0 as the number
        of transformers passed, as the host's forward does. See Points."""
        self._options["original_shape"] = list(latent.shape)
        self._options["transformer_index"] = 0

    def embedding(self, embedding: Tensor) -> Tensor:
        """The timestep's embedding after the functions in the list emb_patch. See PatchPoints."""
        channels = getattr(self._unet(), "model_channels", None)
        return self._apply_list("emb_patch", embedding, channels, self._options)

    def before_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """The input of a stage after the block modifiers. Writes the stage, (part, index), into the options, as the
        host does. See PatchPoints."""
        self._options["block"] = (part, index)
        return self._modified(hidden_states, "before")

    def after_stage(self, part: str, index: int, hidden_states: Tensor) -> Tensor:
        """The output of a stage after the block modifiers, and at an input stage also after the list input_block_patch.
        See PatchPoints."""
        hidden_states = self._modified(hidden_states, "after")
        if part != INPUT:
            return hidden_states
        return self._apply_list("input_block_patch", hidden_states, self._options)

    def after_skip(self, index: int, hidden_states: Tensor) -> Tensor:
        """The output of an input stage for the next stage, after the list input_block_patch_after_skip. The skip stays
        as it was before that list. See PatchPoints."""
        return self._apply_list("input_block_patch_after_skip", hidden_states, self._options)

    def join(self, index: int, hidden_states: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states and the skip of an output stage after the list output_block_patch, before they are
        concatenated. Writes the stage into the options, as the host does. See PatchPoints."""
        self._options["block"] = ("output", index)
        functions = self._lists.get("output_block_patch", ())
        if functions:
            hidden_states = hidden_states.contiguous()
            skip = skip.contiguous()
        for function in functions:
            hidden_states, skip = function(hidden_states, skip, self._options)
        return (hidden_states.detach(), skip.detach()) if functions else (hidden_states, skip)

    def _normed(self, path: str, hidden_states: Tensor) -> Tensor:
        """The output of the group norm at this path in the UNet, as the extension's function in group_norm_wrapper
        computes it; see PatchPoints.norm."""
        wrapped: Tensor = self._norm(self._module(path), hidden_states.contiguous(), self._options)
        return wrapped.detach()

    def _module(self, path: str) -> Any:
        """The UNet's module at this path. Raises AttributeError if there is none."""
        unet: Any = self._unet()
        return unet.get_submodule(path)

    def begin_block(self, place: BlockPlace, block: TransformerBlock) -> bool:
        """Called at the beginning of a transformer block, which is the present block until the next call of this
        method: writes the block's index into the options, as the host does. Returns whether functions are called within
        the block, or the block or one of its attentions is changed. See PatchPoints."""
        self._block = place
        self._options["block_index"] = place[2]
        self._here = self._changed_modules.get(block.self_norm.path.removesuffix(SELF_NORM), {})
        has_options = any(name in self._lists for name in IN_BLOCKS) or any(map(self._replacement, ATTENTIONS))
        if not has_options and not self._here:
            return False
        attention = block.cross_attention
        self._extra = {name: value for name, value in self._options.items() if name not in (PATCHES, REPLACED)}
        self._extra |= {"n_heads": attention.heads, "dim_head": attention.head_width}
        if self._reads_precision:
            self._extra[PRECISION] = self._module(attention.query.path.removesuffix(QUERY)).attn_precision
        return True

    def end_transformer(self) -> None:
        """Called at the end of a spatial transformer: adds 1 to the number of transformers in the options, as the
        host's forward does. See PatchPoints."""
        self._options["transformer_index"] += 1

    def whole_block(self, block: TransformerBlock, tokens: Tensor, context: Tensor) -> Tensor | None:
        """The output of the present block for these tokens by the extension's forward on it; None if the block is not
        changed. See PatchPoints."""
        module = self._here.get("")
        if module is None:
            return None
        return module(tokens.contiguous(), context=context, transformer_options=self._options).to(tokens.dtype)

    def whole_attention(
        self, attention: str, block: TransformerBlock, normed: Tensor, context: Tensor
    ) -> Tensor | None:
        """The output of an attention of the present block by the extension's forward on the attention, which gets
        the inputs after the list attn1_patch or attn2_patch, and whose output goes through attention_output. None if
        the attention is not changed, or patches_replace has a function for it. attention: SELF_ATTENTION or
        CROSS_ATTENTION. See PatchPoints."""
        module = self._module_of(attention)
        if module is None:
            return None
        is_cross = attention == CROSS_ATTENTION
        query = normed.contiguous()
        key = context if is_cross else None
        value = None
        if f"{attention}_patch" in self._lists:
            given = context if is_cross else query
            query, key, value = self._attention_inputs(f"{attention}_patch", query, given)
        options = {OPTIONS: self._extra} if takes_options(type(module).forward) else {}
        added = module(query, context=key, value=value, **options).to(normed.dtype)
        return self.attention_output(attention, added)

    def _module_of(self, attention: str) -> Any:
        """The module of this attention in the present block if it is changed; otherwise None. None too if
        patches_replace has a function for the attention: the host calls that function, and not the module."""
        return None if self._replacement(attention) is not None else self._here.get(attention)

    def self_attention_inputs(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the projections to queries, keys and values after the list attn1_patch. See PatchPoints."""
        return self._attention_inputs("attn1_patch", normed, normed)

    def cross_attention_inputs(self, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the projections to queries, keys and values after the list attn2_patch. See PatchPoints."""
        return self._attention_inputs("attn2_patch", normed, context)

    def _attention_inputs(self, name: str, normed: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs of the projections to queries, keys and values, at first (normed, context, context), after the
        functions in the list of this name ("attn1_patch")."""
        query, key, value = normed, context, context
        for function in self._lists.get(name, ()):
            query, key, value = function(query, key, value, self._extra)
        return query, key, value

    def attend(self, attention: str, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The output of an attention before its last projection, by the function in patches_replace for this attention
        of the present block; None if there is no such function. See PatchPoints."""
        replacement = self._replacement(attention)
        if replacement is None:
            return None
        attended: Tensor = replacement(query.contiguous(), key.contiguous(), value.contiguous(), self._extra)
        return attended

    def _replacement(self, attention: str) -> Any:
        """The function in patches_replace for this attention in the present block; without one, the function for this
        attention in all blocks of the block's stage; None without either function."""
        by_place = self._replaced.get(attention) or {}
        return by_place.get(self._block) or by_place.get(self._block[:2])

    def attention_output(self, attention: str, tokens: Tensor) -> Tensor:
        """The output of an attention after its last projection and the list attn1_output_patch or attn2_output_patch.
        See PatchPoints."""
        return self._apply_list(OUTPUT_OF.format(attention), tokens, self._extra)

    def between_attentions(self, tokens: Tensor) -> Tensor:
        """The tokens between self attention and cross attention after the list middle_patch. See PatchPoints."""
        return self._apply_list("middle_patch", tokens, self._extra)

    def _modified(self, hidden_states: Tensor, when: str) -> Tensor:
        """The hidden states after all functions in block_modifiers. when: "before" or "after" the stage, which the
        functions get as an argument."""
        return after_all(self._modifiers, hidden_states, when, self._options)

    def _apply_list(self, name: str, tensor: Tensor, *others: Any) -> Tensor:
        """The tensor after the functions in the list of this name ("emb_patch"), which also get `others`; the given
        tensor if the list is empty or missing."""
        return after_all(self._lists.get(name, ()), tensor, *others)


def after_all(functions: Sequence[Callable[..., Tensor]], tensor: Tensor, *others: Any) -> Tensor:
    """The tensor after these functions, each called as function(tensor, *others) with the previous function's result.
    Without functions, the given tensor object; with functions, a new tensor object: our operators keep facts about a
    tensor object, and these facts are wrong once a function has written to the tensor."""
    for function in functions:
        tensor = function(tensor.contiguous(), *others)
    return tensor.detach() if functions else tensor


def blocks_of(unet: Any) -> list[BlockPlace]:
    """All transformer blocks of a host's UNet, each as (part, index of its stage, index in its spatial transformer).
    Used to count the blocks for which an extension's functions are called: an extension may also set functions for
    blocks that the UNet does not have, which are never called."""
    stages = [("input", *one) for one in enumerate(unet.input_blocks)]
    stages += [("middle", 0, unet.middle_block), *(("output", *one) for one in enumerate(unet.output_blocks))]
    return [
        (part, index, number) for part, index, stage in stages for layer in stage
        for number in range(len(getattr(layer, "transformer_blocks", ())))
    ]


@lru_cache(maxsize=16)
def takes_options(forward: Any) -> bool:
    """Whether this forward, of a class of attentions, takes transformer_options. The host's blocks pass the options
    only to an attention that takes them."""
    return OPTIONS in inspect.signature(forward).parameters


def points_of(options: Mapping[str, Any], names_read: Collection[str]) -> frozenset[str]:
    """The option names that our forward can serve in this call, out of PATCHES, REPLACED, MODIFIERS and NORM: it calls
    all functions under such a name at the points where the host's forward calls them. A name is left out if a function
    under it is for a point that our forward does not have, or if the host's UNet does not read the name. A name without
    functions can be served. names_read: the names that the host's UNet may read."""
    known = {PATCHES: LISTS, REPLACED: ATTENTIONS}
    found = {
        name for name, parts in known.items()
        if name in names_read and all(part in parts and part in names_read for part in (options.get(name) or {}))
    }
    return frozenset(found | {name for name in (MODIFIERS, NORM) if name in names_read})
