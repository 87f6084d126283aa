"""The number of times that tensors were edited in place (torch's Tensor._version)."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

# The count of an inference tensor: torch does not count its edits.
UNCOUNTED = -1
version_of = operator.attrgetter("_version")


def edit_counts(tensors: Sequence[Tensor]) -> list[int]:
    """The number of edits in place of each tensor; UNCOUNTED for an inference tensor."""
    # Reading the count of an inference tensor raises an exception, which takes twenty times as long as this check.
    if not any(map(Tensor.is_inference, tensors)):
        with suppress(RuntimeError):
            return list(map(version_of, tensors))
    return list(map(edit_count, tensors))


def edit_count(tensor: Any) -> int:
    """The number of edits in place of a tensor; UNCOUNTED for an inference tensor."""
    try:
        return UNCOUNTED if tensor.is_inference() else int(tensor._version)
    except RuntimeError:  # The tensor's data is an inference tensor's.
        return UNCOUNTED
