"""Casts and functions that a host applies to a network's weights "on the fly": at each use, such as LoRAs that it does
not merge into the weights.

AppliedFunctions makes tensors from them, at addresses that stay the same; operands.py replaces the stored parameters by
these. OnTheFly finds out whether the host still applies the same, and makes the tensors anew if not.
"""
from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from ..core.layer_weights import RANKS, LowRank, Weights
from ..core.refusal import Refusal, unsupported_lora
from ..core.units import MEBIBYTE
from .binding import BOUND_DTYPES, Binding
from .contents import Contents, ContentsReader, MemorySpan
from .digests import digest_of_values
from .scan import Casts, FunctionReader, LowRankUpdate, Parts, WeightFunctions

# The functions of a layer to whose parameters the host applies none.
NOTHING = WeightFunctions()


class OnTheFly:
    """The functions and casts that a host applies to the weights of one network at each use, and the tensors made from
    them.

    BoundNetwork calls refresh() before our forward is launched or captured, and is_unchanged() and begin_contents()
    around each replay.

    may_apply: whether the host applies some, or can begin to without a change of the module tree. If not, is_unchanged
        need not be called.
    applied: the tensors made from the host's functions, and from biases and weights of norms that it casts (matrices
        are cast at each use). None if the host computes with the parameters as they are, before the first refresh(),
        after drop(), and after a refresh() that has raised.
    """

    def __init__(self, reader: FunctionReader | None, casts: Casts | None = None) -> None:
        """reader: HostTraits.functions; None if the host applies no functions that we could read. casts:
        HostTraits.casts; None if it casts nothing."""
        self._reader = reader
        self._casts = casts
        self.may_apply = reader is not None
        self.applied: AppliedFunctions | None = None
        self._is_needed = False
        # Parts.mark() and Parts.facts of the parts that applied was made from, weak references to their objects, and
        # the numbers in their tensors.
        self._mark: list[object] = []
        self._facts: list[object] = []
        self._references: list[Callable[[], Any]] = []
        self._contents: Contents | None = None

    def cast_to(self, binding: Binding, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype to which the host casts the parameters when the network's input has this dtype; None if it uses
        them as they are stored."""
        is_as_stored = binding.layers.dtype == dtype and not binding.layers.formats
        if self._casts is None or dtype not in BOUND_DTYPES or is_as_stored:
            return None
        return self._casts.to(binding.layers.casting(), dtype)

    def has_wide_norms(self, binding: Binding) -> bool:
        """Whether the host computes norms in float32 and the rest in a 16-bit dtype: it casts weights, but not those of
        norms, because torch.autocast computes norms in float32."""
        return binding.cast_to is not None and self._casts is not None and not self._casts.norms

    def refresh(
        self, binding: Binding, are_unedited: bool, room: Callable[[], int] | None,
        contents_reader: ContentsReader | None,
    ) -> bool | None:
        """Make `applied` from the functions and casts that the host applies now. Waits for a comparison of their
        tensors' numbers with those of the last refresh.

        are_unedited: whether the network's parameters are known to be unchanged since the last refresh. room: returns
        how many bytes the changed copies of weights may take; None: any number. contents_reader: see Contents.

        Returns None if nothing has changed since the last refresh. Otherwise returns whether any tensor in `applied`
        is new, is gone, or has moved to another address, so that graphs with the old addresses are invalid; False if
        the new values are at the old addresses. Raises Refusal if the copies do not fit, if the LoRAs cannot be
        computed, or if a LoRA is on the meta device.
        """
        reader = self._reader
        if reader is None and self._casts is None:
            return None
        self.begin_contents()()
        layers = binding.layers.called()
        parts = Parts() if reader is None else reader.parts(layers)
        self._is_needed = bool(parts.indices) or binding.cast_to is not None
        self.may_apply = self._is_needed or (reader is not None and reader.could_apply(layers))
        if not self._is_needed:
            return self.drop() or None
        if are_unedited and self._was_made_of(parts, binding):
            return None
        if any(tensor.is_meta for tensor in parts.tensors):
            raise unsupported_lora("its weights are not loaded (they are on PyTorch's meta device)")
        paths = binding.layers.paths()
        functions = {} if reader is None else {paths[index]: reader.of(layers[index]) for index in parts.indices}
        casts_norms = self._casts is None or self._casts.norms
        before = self.applied
        self.applied = None
        applied = AppliedFunctions(binding.dtype, binding.device, casts_norms, before, binding.layers.as_stored)
        moved = applied.fit(functions, binding.shapes(), binding.products(), room, binding.decoded)
        self.applied = applied
        self._mark = parts.mark()
        self._facts = parts.facts
        self._references = list(map(weakref.ref, parts.objects))
        spans = list(map(MemorySpan.of, parts.tensors))
        self._contents = Contents(spans, reader=contents_reader) if spans else None
        return moved

    def is_unchanged(self, binding: Binding) -> bool:
        """Whether the host applies the same functions and casts as at the last refresh. The numbers in the functions'
        tensors are not compared; begin_contents does that. False if a function cannot be computed by us any more."""
        try:
            parts = Parts() if self._reader is None else self._reader.parts(binding.layers.called())
        except Refusal:
            return False
        if self.applied is None:
            return not parts.indices and binding.cast_to is None
        return self._was_made_of(parts, binding)

    def _was_made_of(self, parts: Parts, binding: Binding) -> bool:
        """Whether `applied` was made from equal parts and for the binding's present dtype, so that it need not be made
        again. Always False for functions whose result may differ at each use (WeightFunctions.lasting)."""
        if self.applied is None or not self.applied.lasting or self.applied.dtype != binding.dtype:
            return False
        return all(reference() is not None for reference in self._references) and parts.mark() == self._mark

    def begin_contents(self) -> Callable[[], bool]:
        """Start to compare the numbers in the tensors of the host's functions, such as LoRA matrices, with those of the
        last refresh. The returned function waits for the comparison, and returns whether they are equal; True if there
        are no such tensors. A difference is reported once, and makes the next refresh renew `applied`."""
        changed = None if self._contents is None else self._contents.begin()

        def have_same_contents() -> bool:
            if changed is not None and changed():
                # No parts have an empty mark, so the next refresh renews `applied`.
                self._mark = []
                return False
            return True

        return have_same_contents

    def identity(self) -> str:
        """A digest, equal in any process, of the functions that are applied (Parts.facts), with the numbers in their
        tensors, as of the last comparison. "" if no function with tensors is applied, and while `applied` is None."""
        if self._contents is None or self.applied is None:
            return ""
        return digest_of_values(repr(self._facts), [self._contents.known])

    def drop(self) -> bool:
        """Free the GPU memory of `applied`, which the next refresh makes again. Returns whether there was one; then
        graphs that read it are invalid."""
        had_any = self.applied is not None
        self.applied = None
        self._contents = None
        return had_any

    @property
    def copies(self) -> bool:
        """Whether `applied` has changed or cast copies of the host's parameters, which are stale after the host edits
        the parameters. (LoRAs computed beside a layer are no such copies.)"""
        return self.applied is not None and bool(self.applied.weights or self.applied.biases)

    @property
    def has_narrow_loras(self) -> bool:
        """Whether the host computes some LoRAs in a dtype with fewer digits than the network's. The comparison with the
        host then does not measure how far rounding moves the output (runtime/rounding.py), because the large rounding
        of these LoRAs would excuse real errors."""
        return self.applied is not None and any(one.scales for one in self.applied.low_rank.values())

    @property
    def copies_matrices(self) -> bool:
        """Whether `applied` has copies of matrices too, and not of biases and norms alone."""
        return self.applied is not None and any(tensor.dim() > 1 for tensor in self.applied.weights.values())

    def applied_now(self) -> AppliedFunctions | None:
        """`applied`, for a forward that is launched now. None if the host computes with the parameters as they are.
        Raises Refusal if tensors are needed, and drop() has freed them since the last refresh."""
        if self.applied is None and self._is_needed:
            raise Refusal(
                "OneDiff has just freed its copies of LoRAs or weights to make room on the GPU, and makes them again "
                "in the next step"
            )
        return self.applied

    def marks(self, binding: Binding) -> tuple[str, ...]:
        """The ways in which the host does not use its weights as they are stored, for users and for ShapeKey.weights:
        for example ("INT8 (ConvRot) weights", "LoRA on the fly"). () if it uses them as they are stored."""
        if self.applied is None:
            return tuple(f"{name} weights" for name in binding.layers.format_names())
        stored = str(binding.layers.dtype).removeprefix("torch.")
        found = [f"{name} weights" for name in binding.layers.format_names()]
        if self.applied.low_rank:
            found.append("LoRA on the fly")
        if self.copies_matrices:
            found.append("weights changed on the fly")
        if binding.cast_to is not None and not binding.layers.formats:
            found.append(f"weights stored as {stored}")
        return tuple(found)

    @property
    def bytes(self) -> int:
        """The bytes of all tensors in `applied`; 0 if it is None."""
        return 0 if self.applied is None else self.applied.bytes


class AppliedFunctions:
    """The tensors made from a host's functions and casts for one network. They keep their addresses as long as the same
    kinds of functions are on the same layers, because captured graphs contain the addresses.

    An object is made for each refresh, filled once by fit(), and then only read.

    dtype: of the computation.
    low_rank: LoRAs that are computed beside a layer, by the layer's path. The LoRAs of all members of a fused layer are
        also one entry by the fused layer's name.
    weights, biases: the changed or cast parameters, by the same paths and names. They replace the stored ones; layers
        that are not in these dictionaries keep theirs.
    lasting: whether all functions are; see WeightFunctions.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, casts_norms: bool = True,
        before: AppliedFunctions | None = None, as_stored: Collection[str] = (),
    ) -> None:
        """device: the one where the tensors are made. casts_norms: see Casts.norms. before: the object of the last
        refresh: fit() writes over the memory of its tensors, so it must not be used again. None at the first refresh.
        as_stored: see HostLayers.as_stored."""
        self.dtype = dtype
        self._device = device
        self._casts_norms = casts_norms
        self._as_stored = as_stored
        self.low_rank: dict[str, LowRank] = {}
        self.weights: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor] = {}
        self._before: dict[tuple[str, str], Tensor] = {} if before is None else before._made
        self._made: dict[tuple[str, str], Tensor] = {}
        self._decoded: Callable[[str, torch.dtype], Tensor | None] = lambda path, dtype: None
        self.lasting = True

    @property
    def bytes(self) -> int:
        """The bytes of all tensors that were made."""
        return sum(tensor.nbytes for tensor in list(self._made.values()))

    def fit(
        self, functions: Mapping[str, WeightFunctions], weights: Weights, paths: Mapping[str, Sequence[str]],
        room: Callable[[], int] | None, decoded: Callable[[str, torch.dtype], Tensor | None] = lambda path, dtype: None,
    ) -> bool:
        """Make all tensors, and set low_rank, weights and biases.

        functions: the functions on each layer that has some, by path. weights: the stored parameters, some of them on
        another device, or only their shapes; see Binding.shapes. paths: for each product of our forward, the paths of
        its layers; see Binding.products. room: see OnTheFly.refresh. decoded: returns the decoded weight of a layer at
        a path; None if it is not stored in 4 or 8 bits.

        Returns whether any tensor of the last refresh has another address or is gone, or a new one was added. Raises
        Refusal if there is no room, or if the host alone can compute these functions.
        """
        self._decoded = decoded
        self.lasting = all(one.lasting for one in functions.values())
        groups: dict[str, dict[str, WeightFunctions]] = {}
        for name, members in paths.items():
            groups[name] = {path: functions.get(path, NOTHING) for path in members}
        self._refuse_without_room(groups, weights, room)
        # Tensors that count no edits: nobody but us writes to them.
        with torch.inference_mode():
            for name, group in groups.items():
                is_norm = weights[name].weight.dim() == 1
                casts_norm = is_norm and self._casts_norms and name not in self._as_stored
                if any(one.updates for one in group.values()):
                    self._fit_updates(name, group, weights)
                # Matrices that are only cast are cast at each use (operands.Cast).
                self._fit_parameters("weight", self.weights, name, group, weights, casts_norm)
                self._fit_parameters("bias", self.biases, name, group, weights, self._casts_norms or not is_norm)
        before = self._before
        self._before = {}
        if before.keys() != self._made.keys():
            return True
        return any(self._made[key] is not tensor for key, tensor in before.items())

    def _refuse_without_room(
        self, groups: Mapping[str, Mapping[str, WeightFunctions]], weights: Weights, room: Callable[[], int] | None
    ) -> None:
        """Raise Refusal if the copies of matrices that functions change need more bytes than room() and the tensors of
        the last refresh have. groups: the functions on each layer, by product and path; see fit."""
        copied = 0
        for name, group in groups.items():
            weight = weights[name].weight
            if weight.dim() > 1 and any(one.weight is not None for one in group.values()):
                copied += weight.numel()
        needed = copied * self.dtype.itemsize
        if not needed or room is None:
            return
        left = room()
        written_over = sum(tensor.nbytes for tensor in self._before.values())
        if needed > left + written_over:
            raise Refusal(
                "a LoRA (LoHa, LoKr, DoRA) or an extension changes weights on the fly, and OneDiff's copies of these "
                f"weights need {math.ceil(needed / MEBIBYTE)} MiB, but only "
                f"{max(0, left + written_over) // MEBIBYTE} MiB are free: raise 'Graph memory in MiB', free VRAM, or "
                "let the WebUI merge LoRAs (Forge: 'Diffusion in Low Bits' without 'fp16 LoRA')"
            )

    def _fit_updates(self, name: str, group: Mapping[str, WeightFunctions], weights: Weights) -> None:
        """Make the LoRAs of one product, and add them to low_rank: one matrix with the down matrices of all its layers,
        and for each layer with LoRAs one up matrix.

        name: of the product; see Binding.products. group: the functions on each of its layers, by path. weights: see
        fit.
        """
        updates = [update for one in group.values() for update in one.updates]
        narrow = [update.down.dtype for update in updates if self._is_narrow(update)]
        if narrow:
            self._fit_narrow_updates(name, group, weights, narrow[0])
            return
        own_ups: dict[str, Tensor] = {}
        downs: list[Tensor] = []
        for path, one in group.items():
            if one.updates:
                own_ups[path], own_down = joint_factors(one.updates, self._device)
                downs.append(own_down)
        all_downs = torch.cat(downs).to(self.dtype)
        down = self._place("down", name, all_downs).copy_(all_downs)
        placed = self._place_ups(name, own_ups) if own_ups.keys() == group.keys() else self._place_apart(own_ups)
        ups: list[tuple[int, Tensor]] = []
        first_row = 0
        first_rank = 0
        for path in group:
            up = placed.get(path)
            if up is not None:
                ups.append((first_row, up))
                end_rank = first_rank + up.shape[1]
                self.low_rank[path] = LowRank(down[first_rank:end_rank], ((0, up),))
                first_rank = end_rank
            first_row += len(weights[path].weight)
        self.low_rank[name] = LowRank(down, tuple(ups))

    def _place_ups(self, name: str, ups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of up matrices, by path, at addresses that stay the same. If all ranks are equal, the copies are views
        of one tensor, one below the other, which a kernel reads as one. name: of the product. ups: the up matrix (out,
        ranks) of every layer of the product, by path."""
        if len({up.shape[1] for up in ups.values()}) > 1:
            return self._place_apart(ups)
        together = torch.cat(list(ups.values())).to(self.dtype)
        placed = self._place("ups", name, together).copy_(together)
        return dict(zip(ups, placed.split([len(up) for up in ups.values()]), strict=True))

    def _place_apart(self, ups: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Like _place_ups, but each copy is a tensor of its own: for ranks that differ from layer to layer, and for
        products with LoRAs on some of their layers alone."""
        return {path: self._place("up", path, up).copy_(up) for path, up in ups.items()}

    def _is_narrow(self, update: LowRankUpdate) -> bool:
        """Whether the host computes a LoRA in a dtype with fewer digits than that of the computation."""
        kind = update.down.dtype
        return update.in_own_type and torch.finfo(kind).eps > torch.finfo(self.dtype).eps

    def _fit_narrow_updates(
        self, name: str, group: Mapping[str, WeightFunctions], weights: Weights, dtype: torch.dtype
    ) -> None:
        """Like _fit_updates, for LoRAs that the host computes in `dtype`, which has fewer digits than the network's.
        The up matrices of a layer's LoRAs are not joined into one, because the host rounds the result of each LoRA.
        Raises Refusal if the product has LoRAs of other dtypes too."""
        updates = [update for one in group.values() for update in one.updates]
        if any(update.down.dtype != dtype or update.up.dtype != dtype for update in updates):
            raise unsupported_lora(f"those on the same layer ({name}) are stored in several types")
        all_downs = torch.cat([update.down for update in updates]).to(self._device)
        down = self._place("down", name, all_downs, dtype).copy_(all_downs)
        ups: list[tuple[int, Tensor]] = []
        scales: list[Tensor] = []
        first_row = 0
        end_rank = 0
        for path, one in group.items():
            first_up = len(ups)
            first_rank = end_rank
            for index, update in enumerate(one.updates):
                label = f"{path} {index}"
                scale = torch.full((), update.scale, dtype=torch.float32, device=self._device)
                scales.append(self._place("scale", label, scale, torch.float32).copy_(scale))
                up = self._place("up", label, update.up, dtype).copy_(update.up)
                ups.append((first_row, up))
                end_rank += up.shape[1]
            if one.updates:
                own_ups = tuple((0, up) for _, up in ups[first_up:])
                self.low_rank[path] = LowRank(down[first_rank:end_rank], own_ups, tuple(scales[first_up:]))
            first_row += len(weights[path].weight)
        self.low_rank[name] = LowRank(down, tuple(ups), tuple(scales))

    def _fit_parameters(
        self, kind: str, found: dict[str, Tensor], name: str, group: Mapping[str, WeightFunctions], weights: Weights,
        is_cast: bool,
    ) -> None:
        """Make the changed or cast weights or biases of one product: one tensor for all its layers, and a view of it
        for each layer. Does nothing if the host neither changes nor casts any of them, or for biases that the layers do
        not have.

        kind: "weight" or "bias". found: self.weights or self.biases, to which they are added by the product's name and
        the layers' paths. name, group, weights: see _fit_updates. is_cast: whether the host casts these parameters, and
        the cast copies are to be made here. Raises Refusal if a function changes a parameter's shape, and what the
        functions raise.
        """
        together: Tensor | None = getattr(weights[name], kind)
        changes = [getattr(one, kind) for one in group.values()]
        if together is None:
            return
        needs_cast = is_cast and together.dtype != self.dtype
        if not any(changes) and not needs_cast:
            return
        stored: list[Tensor] = [getattr(weights[path], kind) for path in group]
        found[name] = self._place(kind, name, together)
        pieces = found[name].split(list(map(len, stored)))
        for path, piece, parameter, change in zip(group, pieces, stored, changes, strict=True):
            decoded = self._decoded(path, self.dtype) if kind == "weight" else None
            parameter = parameter if decoded is None else decoded
            changed = parameter
            if change is not None:
                changed = change(parameter.detach().to(self._device, self.dtype, copy=True))
                if changed.shape != parameter.shape:
                    raise unsupported_lora(f"it changes the size of the layer {path} while the model runs")
            found[path] = piece.copy_(changed)

    def _place(self, kind: str, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor with the shape and strides of `like`, which the caller fills. It has the address of
        the one made for this kind and name at the last refresh, if that has the same layout.

        kind: what the tensor is, such as "down". name: the layer's or product's. dtype: None: that of the computation.
        """
        kept = self._before.get((kind, name))
        dtype = dtype or self.dtype
        layout = like.shape, like.stride(), dtype, self._device
        if kept is None or (kept.shape, kept.stride(), kept.dtype, kept.device) != layout:
            kept = torch.empty_like(like, dtype=dtype, device=self._device)
        self._made[kind, name] = kept
        return kept


def joint_factors(updates: Sequence[LowRankUpdate], device: torch.device) -> tuple[Tensor, Tensor]:
    """The LoRAs of one layer joined into a single one: (up (out, ranks), down (ranks, in, ...)), in float32. up
    includes the scales, and both are scaled as by `balanced`. The ranks of a linear layer are padded with zeros to a
    multiple of RANKS."""
    pairs = [balanced(update, device) for update in updates]
    up = torch.cat([up for up, _ in pairs], dim=1)
    down = torch.cat([down for _, down in pairs])
    lacking = -len(down) % RANKS
    if down.dim() > 2 or not lacking:
        return up, down
    return functional.pad(up, (0, lacking)), functional.pad(down, (0, 0, 0, lacking))


def balanced(update: LowRankUpdate, device: torch.device) -> tuple[Tensor, Tensor]:
    """The up and down matrices of a LoRA, as (up, down) in float32, with the LoRA's scale multiplied into up. Rows of
    down are divided by powers of two, and columns of up multiplied by the same, so that the rows have a length near 1
    and the product with down does not overflow in float16."""
    up = update.up.to(device, torch.float32)
    down = update.down.to(device, torch.float32)
    length = down.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    power = length.log2().round().exp2()
    return up * (update.scale * power), down / power.view(-1, *(1 for _ in down.shape[1:]))
