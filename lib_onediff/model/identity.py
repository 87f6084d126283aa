"""Notice that parameters were moved, exchanged or edited, without keeping any alive; tell networks by their values."""
from __future__ import annotations

import contextlib
import ctypes
import hashlib
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

UNCOUNTED = -1
# torch's own check of its CUDA graphs: builds with CUDA have it, and it takes half the time of a loop here. Private, so
# it may go or change: where it is missing or raises, the loop is asked.
lie_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


class Edits:
    """Which parameters these are, and how often each was edited in place. Equal if nothing can have changed.

    References and not id(): a new parameter may get the identity and the address of one that is gone. An inference
    tensor counts no edits (UNCOUNTED); there the object alone is compared.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        # Any: one that is gone has no attributes, and the AttributeError says so.
        self._references: list[Callable[[], Any]] = [weakref.ref(parameter) for parameter in parameters]
        self.counts = list(map(edit_count, parameters))

    def still_true(self) -> bool:
        """Whether these very parameters are unedited: a fifth of the cost of taking all of them down again. A
        parameter that was put in the place of one that is still alive is not noticed."""
        try:
            return self.counts == [reference()._version for reference in self._references]
        except (AttributeError, RuntimeError):
            return False

    def changed_since(self, before: Edits) -> list[int]:
        """Which parameters, by their places, are others or may have been edited since. As many must have been seen
        then."""
        pairs = zip(self._references, before._references, self.counts, before.counts, strict=True)
        return [
            place for place, (now, then, count, counted) in enumerate(pairs)
            if now is not then or count != counted or count == UNCOUNTED
        ]

    def __eq__(self, other: object) -> bool:
        # A live object has one plain weak reference, so references can be compared without their tensors.
        return isinstance(other, Edits) and self.counts == other.counts and all(
            map(operator.is_, self._references, other._references)
        )


class Sighting:
    """Recognises the very tensors that it saw last, unedited, without keeping them alive."""

    def __init__(self, tensors: tuple[Tensor | None, ...] | None = None) -> None:
        """tensors: what it sees now, as by remember()."""
        self._seen: tuple[tuple[Callable[[], Tensor | None], int], ...] | None = None
        if tensors is not None:
            self.remember(tensors)

    def recognises(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """True if these are the tensors of the last remember(). An inference tensor counts no edits and never is."""
        if self._seen is None or len(self._seen) != len(tensors):
            return False
        return all(
            reference() is tensor and edits != UNCOUNTED and edits == edit_count(tensor)
            for (reference, edits), tensor in zip(self._seen, tensors, strict=True)
        )

    def remember(self, tensors: tuple[Tensor | None, ...]) -> None:
        self._seen = tuple(
            (weakref.ref(tensor) if tensor is not None else returns_none, edit_count(tensor)) for tensor in tensors
        )


def returns_none() -> None:
    return None


class Signature:
    """Where parameters lay when this was taken. Equal if as many lie in the same places.

    matrices: the weights of linear layers and convolutions. vectors: biases, and what norms have.
    """

    def __init__(self, matrices: list[nn.Parameter], vectors: list[nn.Parameter]) -> None:
        self._references: list[Callable[[], Any]] = list(map(weakref.ref, [*matrices, *vectors]))
        self._addresses = list(map(Tensor.data_ptr, [*matrices, *vectors]))
        self._indices = list(range(len(self._addresses)))
        last = len(matrices)
        self._matrices = self._references[:last], self._addresses[:last], self._indices[:last]

    def still_true(self) -> bool:
        """Whether these very parameters are alive and have not moved; see Edits.still_true."""
        return lie_still(self._references, self._addresses, self._indices)

    def matrices_stand(self, edits: Edits | None) -> bool:
        """As still_true, of the matrices alone: half the time. SDXL has 794 of them, and 1,680 parameters. Where edits
        are given, those must be true too."""
        return lie_still(*self._matrices) and (edits is None or edits.still_true())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._addresses == other._addresses


def lie_still(references: list[Callable[[], Any]], addresses: list[int], indices: list[int]) -> bool:
    """Whether the tensors are alive and lie at these addresses. indices: of all of them, 0 and on."""
    tensors = [reference() for reference in references]
    if lie_at is not None:
        with contextlib.suppress(RuntimeError, TypeError):
            return bool(lie_at(tensors, addresses, indices))
    try:
        return addresses == list(map(Tensor.data_ptr, tensors))
    except TypeError:  # one of them is gone
        return False


def digest_of_values(architecture: str, tensors: Iterable[Tensor]) -> str:
    """What tells these values, all of one type, from others of a network of the same architecture. Copies them from the
    device in one piece, and waits for it."""
    together = torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()
    content = ctypes.string_at(together.data_ptr(), together.numel() * together.element_size())
    return hashlib.sha256(f"{architecture} {together.dtype} ".encode() + content).hexdigest()[:16]


def edit_count(tensor: Tensor | None) -> int:
    """How often a tensor was edited in place; UNCOUNTED for an inference tensor, 0 for None."""
    if tensor is None:
        return 0
    try:
        return tensor._version
    except RuntimeError:
        return UNCOUNTED
