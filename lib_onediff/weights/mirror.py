"""A copy of a UNet's weights on another device, kept true to them: rows of a call can be computed there."""
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
    """A bound network on another device: the layout of its source over parameters of our own, which nobody else moves.

    A refresh, after one of the source, copies the weights that have changed there. Holds no reference to the host's
    module.
    """

    def __init__(self, source: BoundUNet, copy: nn.Module) -> None:
        """copy: made by empty_copy of the source's binding; the caller keeps it alive."""

        def yardstick(
            host: Callable[[], Tensor], copy: nn.Module, decoded: Sequence[nn.Module]
        ) -> Callable[[], Tensor]:
            # The host runs its own network.
            return source.exactly(host)

        traits = HostTraits(yardstick=yardstick)
        super().__init__(copy, lambda unet: source.layout, traits, is_copy=True)
        self._source = source
        self._of = source.binding
        # The version of the source's values that the copies are of.
        self._copied: int | None = None

    def is_of(self, source: BoundUNet) -> bool:
        """Whether these are the copies of the layers that the source has now."""
        return source is self._source and source.has_binding and source.binding is self._of

    def is_true(self) -> bool:
        """Whether the weights are those that the source had at its own last look."""
        return self.is_of(self._source) and self._copied == self._source.epoch.values

    def refresh(self, call: Call, channels_last: bool = False, room: Callable[[], int] | None = None) -> None:
        """As of BoundUNet, after the source was refreshed for the same call. Queues copies of all weights if any has
        changed. Raises torch.cuda.OutOfMemoryError too."""
        if self._binding is None:
            self._binding = Binding(self.module, self._source.layout)
        if self.code_changes != self._source.code_changes:
            # Graphs were captured of the code before.
            self.code_changes = self._source.code_changes
            self._note_moved()
        if channels_last != self.channels_last or not self.unmoved():
            self._bind(channels_last)
        self._copy_changes()
        self.binding.layout = self._source.layout
        self.refreshed = self.epoch

    def layout_now(self) -> Any:
        """The source's: a copy has no modules to read."""
        return self._source.layout_now()

    def identity(self, sampling: Hashable = None) -> str:
        """The source's: these are its weights."""
        return self._source.identity(sampling)

    def _copy_changes(self) -> None:
        if self._copied == self._source.epoch.values:
            return
        # From now on, every edit of a number counts.
        self._source.watch_contents(whole=True)
        theirs = self._of.parameters()
        ours = self.binding.parameters()
        # Until all is copied, it is true to nothing.
        self._copied = None
        with torch.inference_mode(False), torch.no_grad():
            for copy, parameter in zip(ours, theirs, strict=True):
                copy.copy_(parameter, non_blocking=True)
        self._copied = self._source.epoch.values
        self.baseline.advance(values=1)

    def release(self) -> None:
        """Forget everything. The copies go with their module."""
        self._binding = None
        self._copied = None
        self.baseline.parameters = None


def empty_copy(binding: Binding, device: torch.device) -> nn.Module:
    """Modules with parameters of the same names, shapes and types on another device, without values.

    Raises torch.cuda.OutOfMemoryError.
    """
    root = nn.Module()
    # What is made in inference mode would count no edits.
    with torch.inference_mode(False), torch.no_grad():
        for path, layer in binding.modules().items():
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
    """What a copy takes."""
    return sum(parameter.nbytes for parameter in binding.parameters())
