"""What the runtime keeps for one UNet module."""
from __future__ import annotations

from collections.abc import Collection

from torch import nn

from .backends.base import Runner
from .settings import Settings
from .shapes.key import ShapeKey
from .unet.bound import BoundUNet
from .unet.foreign import Habits
from .unet.forward import Conditioning


class Care:
    """The bound module, its own settings, and its graphs."""

    def __init__(self, unet: nn.Module, settings: Settings | None, habits: Habits) -> None:
        self.settings = settings
        self.bound = BoundUNet(unet, habits)
        self.by_content = habits.by_content
        self.served_in_sampling = False
        self._runners: dict[ShapeKey, tuple[int, Conditioning, Runner]] = {}

    def runner(self, key: ShapeKey, conditioning: Conditioning) -> Runner | None:
        """The runner for a shape, unless weights or conditioning have moved since it was made."""
        generation, held, runner = self._runners.get(key, (None, None, None))
        if runner is not None and generation == self.bound.generation and held is conditioning:
            return runner
        self._runners.pop(key, None)
        return None

    def keep(self, key: ShapeKey, conditioning: Conditioning, runner: Runner) -> None:
        self._runners = {
            kept: entry for kept, entry in self._runners.items() if entry[0] == self.bound.generation
        }
        self._runners[key] = (self.bound.generation, conditioning, runner)

    def ready_keys(self) -> set[ShapeKey]:
        """The shapes that have a graph."""
        return set(self._runners)

    def drop_runners(self, keys: Collection[ShapeKey] | None = None) -> None:
        """Drop the graphs of these shapes; None: of all."""
        self._runners = {} if keys is None else {
            key: entry for key, entry in self._runners.items() if key not in keys
        }
