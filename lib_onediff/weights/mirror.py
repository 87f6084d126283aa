"""A copy of a network's weights on a second GPU, which is updated when the originals change."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from .binding import Binding
from .bound import BoundNetwork
from .scan import HostTraits


class MirrorNetwork(BoundNetwork):
    """A copy of a network (the source) on another device, bound like the source: it has the source's layout, and
    parameters of our own, which no other code moves or edits.

    refresh(), after the source's refresh(), copies all weights if any has changed. Keeps no reference to the host's
    module.
    """

    def __init__(self, source: BoundNetwork, copy: nn.Module) -> None:
        """copy: the result of empty_copy(source.binding), which the caller keeps alive. It has no values before the
        first refresh()."""

        def yardstick(
            host: Callable[[], Tensor], copy: nn.Module, decoded: Sequence[nn.Module]
        ) -> Callable[[], Tensor]:
            # host() runs the source.
            return source.exactly(host)

        traits = HostTraits(yardstick=yardstick)
        super().__init__(copy, lambda unet: source.layout, traits, is_copy=True)
        self._source = source
        self._copied_binding = source.binding
        # HostCode.changes of the source at the last refresh.
        self._code_changes = 0
        # The source's epoch.values at the last copy; None if the copies are not complete.
        self._copied: int | None = None

    def is_of(self, source: BoundNetwork) -> bool:
        """Whether this is a copy of `source` with the layers that it has now. False after the host has replaced layers,
        even by equal ones: then a new copy is needed."""
        return source is self._source and source.has_binding and source.binding is self._copied_binding

    def is_up_to_date(self) -> bool:
        """Whether the copies have the values that the source had when it was last compared for edits. False before the
        first refresh(), after a copy has failed, and if is_of(source) is False."""
        return self.is_of(self._source) and self._copied == self._source.epoch.values

    def refresh(self, call: Call, channels_last: bool = False, room: Callable[[], int] | None = None) -> None:
        """Bring the copy up to date with the source. Call it after the source's refresh for the same call. If any
        weight has changed, copies of all weights are launched. Parameters: see BoundNetwork.refresh; room is not used.
        Also raises torch.cuda.OutOfMemoryError."""
        if self._binding is None:
            self._binding = Binding(self.module, self._source.layout)
        if self._code_changes != self._source.host_code.changes:
            # Graphs were captured with the old code.
            self._code_changes = self._source.host_code.changes
            self._note_moved()
        if channels_last != self.channels_last or not self.unmoved():
            self._bind(channels_last)
        self._copy_changes()
        self.binding.layout = self._source.layout
        self.refreshed = self.epoch

    def layout_now(self) -> Any:
        """The source's layout as it is now. (The copy's modules have parameters alone, from which no layout can be
        read.)"""
        return self._source.layout_now()

    def identity(self, sampling: Hashable = None) -> str:
        """The source's identity, because the weights are equal. sampling: see BoundNetwork.identity."""
        return self._source.identity(sampling)

    def _copy_changes(self) -> None:
        """Launch copies of all weights, if the source's version of values (epoch.values) is not that of the last copy.
        The source itself looks for edits, in its refresh()."""
        if self._copied == self._source.epoch.values:
            return
        # From now on, the source's contents are compared in full, because any edit makes the copies stale.
        self._source.watch_contents(whole=True)
        theirs = self._copied_binding.layers.parameters()
        ours = self.binding.layers.parameters()
        # If a copy fails, the copies count as incomplete.
        self._copied = None
        with torch.inference_mode(False), torch.no_grad():
            for copy, parameter in zip(ours, theirs, strict=True):
                copy.copy_(parameter, non_blocking=True)
        self._copied = self._source.epoch.values
        self.baseline.advance(values=1)

    def release(self) -> None:
        """Drop the binding; the next refresh() makes it again, and copies all weights. This frees no weights: they are
        freed with the module `copy`."""
        self._binding = None
        self._copied = None
        self.baseline.parameters = None


def empty_copy(binding: Binding, device: torch.device) -> nn.Module:
    """A module tree with uninitialised parameters on a device. They have the same paths, shapes and dtypes as the
    parameters of a binding. Raises torch.cuda.OutOfMemoryError."""
    root = nn.Module()
    # torch would not count the edits of parameters made in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        for path, layer in binding.layers.by_path().items():
            module = root
            for name in filter(None, path.split(".")):
                if name not in module._modules:
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            for name, parameter in layer._parameters.items():
                module.register_parameter(name, None if parameter is None else nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False
                ))
    return root


def bytes_of(binding: Binding) -> int:
    """The bytes that a copy of a binding's parameters takes on another GPU."""
    return sum(parameter.nbytes for parameter in binding.layers.parameters())
