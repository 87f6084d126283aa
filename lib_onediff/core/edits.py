"""How often tensors were edited in place, by torch's counter Tensor._version. If it has risen, the values are new."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

# Given as the count of an inference tensor (made under torch.inference_mode), whose edits torch does not count.
UNCOUNTED = -1
version_of = operator.attrgetter("_version")


def edit_counts(tensors: Sequence[Tensor]) -> list[int]:
    """edit_count() of each tensor, in their order. Fast, because each call of a network reads the counts of all
    weights.
    """
    # Reading the count of an inference tensor raises an exception, which takes twenty times as long as this check.
    if not any(map(Tensor.is_inference, tensors)):
        with suppress(RuntimeError):
            return list(map(version_of, tensors))
    return list(map(edit_count, tensors))


def edit_count(tensor: Any) -> int:
    """How often a tensor has been edited in place since it was made; UNCOUNTED for an inference tensor."""
    try:
        return UNCOUNTED if tensor.is_inference() else int(tensor._version)
    except RuntimeError:  # The tensor's data is an inference tensor's.
        return UNCOUNTED
