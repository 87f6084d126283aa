"""A copy of a UNet's weights on another device, kept true to them: rows of a call can be computed there."""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from .binding import Binding
from .bound import BoundUNet
from .call import UNetCall
from .identity import Edits
from .patches import HostTraits


class MirrorUNet(BoundUNet):
    """The bound UNet on another device: the same layout over parameters of our own, which nobody else moves.

    It is refreshed after its source was, copies then what has changed there, and holds no reference to the host's
    UNet. device: where it lies. copied_bytes: what the copies of all refreshes have moved between the devices.
    """

    def __init__(self, source: BoundUNet, copy: nn.Module) -> None:
        """copy: made by empty_copy of the source's binding; whoever calls keeps it alive."""
        super().__init__(copy, HostTraits(yardstick=source.host_traits.yardstick))
        self._source, self._of = source, source.binding
        self._seen: tuple[int, int] | None = None
        self._copied: tuple[int, Edits, int] | None = None
        self.copied_bytes = 0

    def is_of(self, source: BoundUNet) -> bool:
        """Whether these are the copies of the layers that the source has now."""
        return source is self._source and source.has_binding and source.binding is self._of

    def is_true(self) -> bool:
        """Whether the weights are those of the source: a tenth of a millisecond."""
        return self.is_of(self._source) and self._copied == self._source.weights_in_sampling()

    def refresh(self, call: UNetCall, by_content: bool, channels_last: bool = False, room: object = None) -> None:
        """As of BoundUNet, where the source was refreshed for the same sampling. Copies changed weights, behind what
        the devices are doing. Raises torch.cuda.OutOfMemoryError too."""
        if self._seen is not None and self._seen[1] != self._source.samplings:
            self.begin_sampling()
        super().refresh(call, by_content, channels_last)
        self._copy_changes()
        self.binding.layout = self._source.layout
        self._seen = self._source.looks, self._source.samplings

    def goes_on(self, call: UNetCall, by_content: bool, reads_prompt: bool) -> bool:
        """Whether the call belongs to the sampling of the last refresh. Our own parameters lie where they lay: is_true
        tells whether they are still the source's."""
        return self._is_same_sampling(call, by_content) and (not reads_prompt or self._edits is not None)

    def _is_same_sampling(self, call: UNetCall, by_content: bool) -> bool:
        if self._sampling_began or self._seen != (self._source.looks, self._source.samplings):
            return False
        return by_content or self._last_prompt.recognises((call.context, call.y))

    def _look(self) -> str | None:
        if self._binding is None:
            self._binding = Binding(self.module, self._source.layout)
        return None

    def _copy_changes(self) -> None:
        now, before = self._source.weights_in_sampling(), self._copied
        if now == before:
            return
        theirs, ours = self._of.parameters(), self.binding.parameters()
        changed: Iterable[int] = range(len(ours))
        if before is not None and now[0] == before[0]:
            # All lie where they lay.
            changed = now[1].changed_since(before[1])
        # Until all is copied, it is true to nothing.
        self._copied = None
        with torch.inference_mode(False), torch.no_grad():
            for index in changed:
                ours[index].copy_(theirs[index], non_blocking=True)
                self.copied_bytes += ours[index].nbytes
        self._copied = now

    def release(self) -> None:
        """Forget everything. The copies go with their module."""
        self._binding = self._signature = self._copied = None
        self.prompts.drop()


def empty_copy(binding: Binding, device: torch.device) -> nn.Module:
    """Modules with parameters of the same names, shapes and types on another device, without values.

    Raises torch.cuda.OutOfMemoryError.
    """
    root = nn.Module()
    # What is made in inference mode would count no edits.
    with torch.inference_mode(False), torch.no_grad():
        for path, layer in zip(binding.paths(), binding.layers(), strict=True):
            module = root
            for name in path.split("."):
                if name not in module._modules:
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            for name, parameter in layer._parameters.items():
                module.register_parameter(name, None if parameter is None else empty_like(parameter, device))
    return root


def empty_like(parameter: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=False)


def bytes_of(binding: Binding) -> int:
    """What a copy takes."""
    return sum(parameter.nbytes for parameter in binding.parameters())
