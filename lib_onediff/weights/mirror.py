"""A copy of a network's weights on a second GPU, which is updated when the originals change."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Call
from .binding import Binding
from .bound import BoundUNet
from .scan import HostTraits


class MirrorUNet(BoundUNet):
    """The bound copy of a network (the source) on another device: the source's layout, over parameters of our own,
    which no other code moves.

    refresh(), after the source's, copies all weights if any has changed. Keeps no reference to the host's module.
    """

    def __init__(self, source: BoundUNet, copy: nn.Module) -> None:
        """copy: the result of empty_copy(source.binding), which the caller keeps alive."""

        def yardstick(
            host: Callable[[], Tensor], copy: nn.Module, decoded: Sequence[nn.Module]
        ) -> Callable[[], Tensor]:
            # host() runs the source.
            return source.exactly(host)

        traits = HostTraits(yardstick=yardstick)
        super().__init__(copy, lambda unet: source.layout, traits, is_copy=True)
        self._source = source
        self._copied_binding = source.binding
        # The source's epoch.values at the last copy; None if the copies are not complete.
        self._copied: int | None = None

    def is_of(self, source: BoundUNet) -> bool:
        """Whether this is a copy of `source` with the layers that it has now. False after the host has replaced layers,
        even by equal ones: then a new copy is needed."""
        return source is self._source and source.has_binding and source.binding is self._copied_binding

    def is_true(self) -> bool:
        """Whether the copies have the values that the source had at its last look for changes."""
        return self.is_of(self._source) and self._copied == self._source.epoch.values

    def refresh(self, call: Call, channels_last: bool = False, room: Callable[[], int] | None = None) -> None:
        """See BoundUNet.refresh; call it after the source's refresh for the same call. If any weight has changed,
        copies of all weights are launched. Also raises torch.cuda.OutOfMemoryError."""
        if self._binding is None:
            self._binding = Binding(self.module, self._source.layout)
        if self.code_changes != self._source.code_changes:
            # Graphs were captured with the old code.
            self.code_changes = self._source.code_changes
            self._note_moved()
        if channels_last != self.channels_last or not self.unmoved():
            self._bind(channels_last)
        self._copy_changes()
        self.binding.layout = self._source.layout
        self.refreshed = self.epoch

    def layout_now(self) -> Any:
        """The source's layout: the copy's modules only have parameters."""
        return self._source.layout_now()

    def identity(self, sampling: Hashable = None) -> str:
        """The source's identity, because the weights are equal."""
        return self._source.identity(sampling)

    def _copy_changes(self) -> None:
        """Launch copies of all weights, if the source's values have changed since the last copy. Edits are looked for
        by the source; this only compares versions."""
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
        """Drop the binding. The copies are freed with their module."""
        self._binding = None
        self._copied = None
        self.baseline.parameters = None


def empty_copy(binding: Binding, device: torch.device) -> nn.Module:
    """Modules whose parameters have the same names, shapes and dtypes as a binding's, on another device and without
    values. Raises torch.cuda.OutOfMemoryError."""
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
    """Bytes of a copy of this binding's parameters."""
    return sum(parameter.nbytes for parameter in binding.layers.parameters())
