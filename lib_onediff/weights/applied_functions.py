"""What was made of the functions that a host applies to a UNet's weights, and the weights as it computes with them."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.affine import Affine, LowRank, Weights
from ..core.leaves import FusedLinear
from ..core.refusal import Refusal
from .binding import Binding
from .weight_functions import Change, LowRankUpdate, WeightFunctions

MEBIBYTE = 2**20


class Given(NamedTuple):
    """What is to be applied. functions: by path. affines: the parameters as they are stored, of fused layers too.
    dtype, device: in which and where it is computed. casts_norms: see Casts. before: what was made the last time."""

    functions: Mapping[str, WeightFunctions]
    affines: Weights
    dtype: torch.dtype
    device: torch.device
    casts_norms: bool
    before: Mapping[tuple[str, str], Tensor]

    def casts(self, stored: Tensor, of_norm: bool) -> bool:
        """Whether the host casts this bias, or parameter of a norm."""
        return stored.dtype != self.dtype and (self.casts_norms or not of_norm)


class AppliedFunctions:
    """What was made of a host's functions, for one UNet. It stays in the same memory as long as the same kinds of
    functions are on the same layers: a captured graph knows the addresses alone.

    weights, biases: what stands in the place of a layer's own, by path, and of a fused layer's by name.
    """

    def __init__(self) -> None:
        self.low_rank: dict[str, LowRank] = {}
        self.weights: dict[str, Tensor] = {}
        self.biases: dict[str, Tensor] = {}
        self._made: dict[tuple[str, str], Tensor] = {}
        self.lasting = True

    @property
    def bytes(self) -> int:
        """Memory beside the host's own weights."""
        return sum(tensor.nbytes for tensor in list(self._made.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is, in words that are part of a shape's key."""
        copies = any(tensor.dim() > 1 for tensor in self.weights.values())
        return tuple(kind for kind, there in (
            ("LoRA on the fly", bool(self.low_rank)), ("weights changed on the fly", copies)
        ) if there)

    def fit(
        self, functions: Mapping[str, WeightFunctions], affines: Weights, fusions: Sequence[FusedLinear],
        dtype: torch.dtype, room: Callable[[], int] | None, device: torch.device, casts_norms: bool = True,
    ) -> bool:
        """Make everything anew, in the memory that it has where that fits. affines: the parameters as they are stored,
        of fused layers too. dtype, device: in which and where is computed: some parameters may lie elsewhere for the
        time being. room: how many bytes there may be. casts_norms: see Casts.

        Returns whether anything lies elsewhere now. Raises Refusal if there is no room.
        """
        groups = grouped(affines, fusions)
        self._refuse_without_room(functions, affines, groups, dtype, room)
        given, moved = Given(functions, affines, dtype, device, casts_norms, self._made), False
        self._made = {}
        self.low_rank, self.weights, self.biases = {}, {}, {}
        self.lasting = all(one.lasting for one in functions.values())
        # Tensors that count no edits: nobody but us writes to them.
        with torch.inference_mode():
            for name, paths in groups.items():
                moved |= self._fit_updates(name, paths, given)
                moved |= self._fit_weights(name, paths, given)
                moved |= self._fit_biases(name, paths, given)
        return moved or given.before.keys() != self._made.keys()

    def _refuse_without_room(
        self, functions: Mapping[str, WeightFunctions], affines: Weights, groups: Mapping[str, Sequence[str]],
        dtype: torch.dtype, room: Callable[[], int] | None,
    ) -> None:
        copied = [name for name, paths in groups.items() if any(
            functions[path].weight is not None and affines[path].weight.dim() > 1 for path in paths if path in functions
        )]
        needed = sum(affines[name].weight.numel() for name in copied) * dtype.itemsize
        left = room() if needed and room is not None else needed
        # What is held now is written over.
        if needed > left + self.bytes:
            raise Refusal(
                f"what is applied to the weights on the fly needs copies of {needed / MEBIBYTE:.0f} MiB, and the "
                f"memory budget has {max(0, left) / MEBIBYTE:.0f} MiB"
            )

    def _fit_updates(self, name: str, paths: Sequence[str], given: Given) -> bool:
        functions, dtype, before = given.functions, given.dtype, given.before
        updates = {path: functions[path].updates for path in paths if path in functions and functions[path].updates}
        if not updates:
            return False
        factors = {path: [balanced(update, given.device) for update in found] for path, found in updates.items()}
        down, moved = self._hold("down", name, torch.cat([
            down.to(dtype) for pairs in factors.values() for _, down in pairs
        ]), before)
        ups: list[tuple[int, Tensor]] = []
        first_row = first_rank = 0
        for path in paths:
            if path in updates:
                up, up_moved = self._hold("up", path, torch.cat([
                    up.to(dtype) for up, _ in factors[path]
                ], dim=1), before)
                moved |= up_moved
                ups.append((first_row, up))
                ranks = up.shape[1]
                self.low_rank[path] = LowRank(down[first_rank:first_rank + ranks], ((0, up),))
                first_rank += ranks
            first_row += given.affines[path].weight.shape[0]
        self.low_rank[name] = LowRank(down, tuple(ups))
        return moved

    def _fit_weights(self, name: str, paths: Sequence[str], given: Given) -> bool:
        functions, affines = given.functions, given.affines
        stored = affines[name].weight
        changes = {path: functions[path].weight if path in functions else None for path in paths}
        is_cast = stored.dim() == 1 and given.casts(stored, of_norm=True)
        if not any(change is not None for change in changes.values()) and not is_cast:
            return False
        kept, moved = self._place("weight", name, stored, given.dtype, given.device, given.before)
        self._write(kept, [(affines[path].weight, changes[path]) for path in paths], paths)
        self.weights[name] = kept
        self.weights.update(zip(paths, kept.split([affines[path].weight.shape[0] for path in paths]), strict=True))
        return moved

    def _fit_biases(self, name: str, paths: Sequence[str], given: Given) -> bool:
        functions, affines = given.functions, given.affines
        weight, stored = affines[name][:2]
        if stored is None:
            return False
        changes = {path: functions[path].bias if path in functions else None for path in paths}
        is_cast = given.casts(stored, of_norm=weight.dim() == 1)
        if not any(change is not None for change in changes.values()) and not is_cast:
            return False
        kept, moved = self._place("bias", name, stored, given.dtype, given.device, given.before)
        biases = [bias for path in paths if (bias := affines[path].bias) is not None]
        self._write(kept, list(zip(biases, changes.values(), strict=True)), paths)
        self.biases[name] = kept
        self.biases.update(zip(paths, kept.split([len(bias) for bias in biases]), strict=True))
        return moved

    @staticmethod
    def _write(kept: Tensor, given: Sequence[tuple[Tensor, Change | None]], paths: Sequence[str]) -> None:
        """The parameters of a group into one tensor, each changed by its function."""
        row = 0
        for (parameter, change), path in zip(given, paths, strict=True):
            rows = kept[row:row + len(parameter)]
            if change is None:
                rows.copy_(parameter)
            else:
                changed = change(parameter.detach().to(kept.device, kept.dtype, copy=True))
                if changed.shape != parameter.shape:
                    raise Refusal(f"what is applied to {path} on the fly changes its size")
                rows.copy_(changed)
            row += len(parameter)

    def _hold(
        self, kind: str, name: str, values: Tensor, before: Mapping[tuple[str, str], Tensor]
    ) -> tuple[Tensor, bool]:
        """These values, where such were before if they fit; and whether they lie elsewhere now."""
        kept, moved = self._place(kind, name, values, values.dtype, values.device, before)
        kept.copy_(values)
        return kept, moved

    def _place(
        self, kind: str, name: str, like: Tensor, dtype: torch.dtype, device: torch.device,
        before: Mapping[tuple[str, str], Tensor],
    ) -> tuple[Tensor, bool]:
        kept = before.get((kind, name))
        stays = kept is not None and (kept.shape, kept.stride(), kept.dtype, kept.device) == (
            like.shape, like.stride(), dtype, device
        )
        place = kept if kept is not None and stays else torch.empty_like(like, dtype=dtype, device=device)
        self._made[kind, name] = place
        return place, not stays


def balanced(update: LowRankUpdate, device: torch.device) -> tuple[Tensor, Tensor]:
    """Up, scaled, and down of a LoRA in float32, with rows of down of a length near 1: whatever their sizes are in a
    file, what lies between the two products does not overflow in float16. By powers of two, which round nothing."""
    up, down = update.up.to(device, torch.float32), update.down.to(device, torch.float32)
    length = down.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    power = length.log2().round().exp2()
    return up * (update.scale * power), down / power.view(-1, *(1 for _ in down.shape[1:]))


def grouped(affines: Weights, fusions: Sequence[FusedLinear]) -> dict[str, tuple[str, ...]]:
    """The paths of the layers that lie in one tensor, by the name of that."""
    groups = {fusion.name: tuple(member.path for member in fusion.members) for fusion in fusions}
    fused = {path for paths in groups.values() for path in paths}
    return groups | {name: (name,) for name in affines if name not in fused and name not in groups}


class AppliedWeights(Mapping[str, Affine]):
    """The weights that a host computes with. What it stores in another type is cast where it is asked for: there is
    never a whole second UNet."""

    def __init__(self, weights: Weights, applied: AppliedFunctions, dtype: torch.dtype) -> None:
        self._weights, self._applied, self._dtype = weights, applied, dtype
        # A layer is asked for twice in a row: as the reader of a norm, and for its product.
        self._last: tuple[str, Affine] | None = None

    def __getitem__(self, path: str) -> Affine:
        if self._last is not None and self._last[0] == path:
            return self._last[1]
        weight = self._applied.weights.get(path, self._weights[path].weight)
        if weight.dim() == 1:
            # What of it the host casts is kept so.
            return Affine(weight, self.bias(path))
        found = Affine(weight.to(self._dtype), self.bias(path), low_rank=self._applied.low_rank.get(path))
        self._last = path, found
        return found

    def bias(self, path: str) -> Tensor | None:
        """That of a layer, which is not cast anew."""
        return self._applied.biases.get(path, self._weights[path].bias)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class AppliedBinding:
    """A binding whose weights are those that the host computes with."""

    def __init__(self, binding: Binding, applied: AppliedFunctions) -> None:
        self.layout: Any = binding.layout
        self._binding, self._applied = binding, applied

    def weights(self) -> Weights:
        """As Binding.weights."""
        return AppliedWeights(self._binding.weights(wider=False), self._applied, self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._binding.dtype
