"""What a host applies to a UNet's weights at each use, brought up to date before every call: casts and functions."""
from __future__ import annotations

import enum
from collections.abc import Callable

import torch

from ..core.refusal import Refusal
from .applied_functions import AppliedBinding, AppliedFunctions
from .binding import BOUND_DTYPES, Binding
from .contents import Contents, Reader, digest_of_values
from .weight_functions import Casts, FunctionReader, WeightFunctionState


class News(enum.Enum):
    """What has become of the weights that a host computes with, since they were looked at last. MOVED: they lie
    elsewhere, or are others."""

    NONE, CHANGED, MOVED = range(3)


class OnTheFly:
    """reader, casts: see HostTraits.functions and HostTraits.casts. is_asked: whether stands tells anything.

    changes: how often something else was applied.
    applied: what was made of the host's functions, and of small parameters that it casts; None where the host computes
    with the parameters as they are."""

    def __init__(self, reader: FunctionReader | None, casts: Casts | None = None) -> None:
        self._reader, self._casts = reader, casts
        self.is_asked = reader is not None
        self.applied: AppliedFunctions | None = None
        self._is_needed = False
        self._state, self._glance = WeightFunctionState(), list[object]()
        # What is in the tensors that the host's functions hold.
        self._contents: Contents | None = None
        self._dtype = torch.float32
        self.contents_reader: Reader | None = None
        self.changes = 0

    def cast_to(self, binding: Binding, dtype: torch.dtype) -> torch.dtype | None:
        """The type to which the host casts the parameters for inputs of this type, or None."""
        if self._casts is None or dtype not in BOUND_DTYPES or binding.stored_dtype == dtype:
            return None
        return self._casts.to(binding.layers(), dtype)

    def has_wide_norms(self, binding: Binding) -> bool:
        """Whether the host computes norms in float32 though it computes with float16: it leaves them as they are, and
        torch.autocast has them wide."""
        return binding.cast_to is not None and self._casts is not None and not self._casts.norms

    def refresh(self, binding: Binding, stand: bool, room: Callable[[], int] | None) -> News:
        """Apply what the host would apply now. stand: whether the parameters are known to be what they were at the last
        refresh. room: how many bytes copies of weights may take; None: any number.

        Raises Refusal if they do not fit.
        """
        reader = self._reader
        if reader is None and self._casts is None:
            return News.NONE
        contents_stand = self.begin_contents()()
        if stand and contents_stand and self.stands(binding):
            return News.NONE
        layers = binding.called_layers()
        state = WeightFunctionState() if reader is None else reader.state(layers)
        self._is_needed = bool(state.layers) or binding.cast_to is not None
        self.is_asked = reader is not None or self._is_needed
        if not self._is_needed:
            return News.MOVED if self.drop() else News.NONE
        if stand and contents_stand and self._lasts() and state == self._state and self._dtype == binding.dtype:
            return News.NONE
        applied, self.applied = self.applied or AppliedFunctions(), None
        paths = binding.paths()
        functions = {} if reader is None else {paths[place]: reader.of(layers[place]) for place in state.layers}
        casts_norms = self._casts is None or self._casts.norms
        moved = applied.fit(
            functions, binding.weights(wider=False), binding.fusions, binding.dtype, room, binding.device, casts_norms
        )
        self.applied, self._state, self._dtype = applied, state, binding.dtype
        self._contents = Contents(state.places, reader=self.contents_reader) if state.places else None
        self.changes += 1
        self._glance = [] if reader is None else reader.glance(layers)
        return News.MOVED if moved else News.CHANGED

    def stands(self, binding: Binding) -> bool:
        """Whether the host applies what it did at the last refresh, in a sampling that goes on: up to 0.3 ms for SDXL
        where that is nothing, a millisecond with a LoRA on every layer."""
        seen = [] if self._reader is None else self._reader.glance(binding.called_layers())
        if self.applied is None:
            return not seen and binding.cast_to is None
        return self._lasts() and seen == self._glance and self._state.is_alive()

    def _lasts(self) -> bool:
        """Whether there is something that holds until the host changes it."""
        return self.applied is not None and self.applied.lasting

    def begin_contents(self) -> Callable[[], bool]:
        """Whether what is in the tensors that the host's functions hold is what it was: read now, told later."""
        contents = self._contents
        if contents is None:
            return lambda: True
        try:
            now = contents.begin()
        except ReferenceError:
            return lambda: False
        return lambda: not contents.changed(now())

    def identity(self) -> str:
        """What tells this from other things that could be applied."""
        if self._contents is None or self.applied is None:
            return ""
        return digest_of_values(repr(self._state.facts), [self._contents.known])

    def drop(self) -> bool:
        """Give all memory back; the next refresh makes it anew. Returns whether there was any."""
        dropped, self.applied, self._contents = self.applied is not None, None, None
        self.changes += dropped
        return dropped

    @property
    def copies(self) -> bool:
        """Whether anything was made of the host's own parameters, as they were."""
        return self.applied is not None and bool(self.applied.weights or self.applied.biases)

    @property
    def copies_matrices(self) -> bool:
        return self.applied is not None and any(tensor.dim() > 1 for tensor in self.applied.weights.values())

    def source(self, binding: Binding) -> Binding | AppliedBinding:
        """The weights that the host computes with. Raises Refusal between drop and refresh."""
        if self.applied is None and self._is_needed:
            raise Refusal("what is applied to the weights on the fly was given back with the graphs' memory")
        return binding if self.applied is None else AppliedBinding(binding, self.applied)

    def kinds(self, binding: Binding) -> tuple[str, ...]:
        """How the host computes with its weights where it does not take them as they are, in words for a shape's
        key."""
        if self.applied is None:
            return ()
        stored = str(binding.stored_dtype).removeprefix("torch.")
        return (*self.applied.kinds, *(() if binding.cast_to is None else (f"weights stored as {stored}",)))

    @property
    def bytes(self) -> int:
        """Memory beside the host's own weights."""
        return 0 if self.applied is None else self.applied.bytes
