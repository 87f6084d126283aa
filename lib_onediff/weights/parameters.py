"""The tensors of some modules: which objects they are, where they lie and how, and how often they were edited."""
from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..core.edits import edit_counts
from .stored import StoredReader

of_parameters = operator.itemgetter("_parameters")
layout_of = operator.attrgetter("shape", "dtype")


class Parameters:
    """The parameters of some modules as they were when this was made. Keeps none of them alive."""

    def __init__(self, modules: Sequence[nn.Module], reader: StoredReader | None = None) -> None:
        """reader: of weights in few bits: their values and scales stand in the place of their parameters."""
        self._tensors_of = present_in if reader is None else reader.tensors
        self._facts_of = None if reader is None else reader.facts
        self._modules = list(map(weakref.ref, modules))
        self._facts = [] if reader is None else reader.facts(modules)
        parameters = self._tensors_of(modules)
        self._references = list(map(weakref.ref, parameters))
        self._addresses = list(map(Tensor.data_ptr, parameters))
        self._layouts = list(map(layout_of, parameters))
        self._strides = list(map(Tensor.stride, parameters))

    def lie_still(self) -> list[Any] | None:
        """The parameters, if each module is alive and each parameter has the address that was noted. None otherwise:
        the memory at these addresses may have been freed, and nothing may read there. A fifth of a millisecond for
        SDXL's UNet. Drop them after the call."""
        modules: list[Any] = [reference() for reference in self._modules]
        if None in modules:
            return None
        parameters = self._tensors_of(modules)
        with suppress(RuntimeError, TypeError):
            if self._facts_of is not None and self._facts_of(modules) != self._facts:
                return None
            if self._addresses == list(map(Tensor.data_ptr, parameters)):
                return parameters
        return None

    def stand(self) -> bool:
        """Whether these are the very parameters, and each lies where and as it lay."""
        return self.edits() is not None

    def edits(self, found: list[Any] | None = None) -> list[int] | None:
        """How often each was edited in place, as far as torch counts edits; None where these are not the very
        parameters, or one lies elsewhere or in another way. found: the result of lie_still at this call of the
        network."""
        parameters = found or self.lie_still()
        if parameters is None:
            return None
        if not all(map(operator.is_, parameters, [reference() for reference in self._references])):
            return None
        with suppress(RuntimeError, TypeError):
            lie_as_before = list(map(Tensor.stride, parameters)) == self._strides
            if lie_as_before and list(map(layout_of, parameters)) == self._layouts:
                return edit_counts(parameters)
        return None


def present_in(modules: Iterable[nn.Module]) -> list[Any]:
    """The parameters that are these modules' own, in their order."""
    # Without a frame for each module: this runs at every call of a network.
    states = map(vars, modules)
    dictionaries = filter(None, map(of_parameters, states))
    found = chain.from_iterable(map(dict.values, dictionaries))
    return [parameter for parameter in found if parameter is not None]
