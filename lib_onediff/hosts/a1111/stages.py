"""Our blocks inside the loop of an extension that walks ldm's or sgm's stages itself, as sd-webui-controlnet does."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ...runtime.runtime import runtime
from ..changed_modules import ChangedModules, foreign_forward
from ..hooks import ForwardPatches
from .block_route import BlockRoute
from .patches import does_nothing_now, patches_of


class StageHooks(ForwardPatches):
    """Class-level patches of TimestepEmbedSequential.forward that only act inside a foreign loop."""

    def __init__(
        self, stage_classes: Iterable[type], changed: ChangedModules | None = None,
        check: Callable[[nn.Module], object] = lambda unet: None,
        upcasts_attention: Callable[[], bool] = lambda: False,
    ) -> None:
        """check, upcasts_attention: see BlockRoute."""
        modules = changed or ChangedModules(does_nothing_now)
        self._route = BlockRoute(
            runtime, lambda unet: patches_of(modules.at_call(unet)), check, upcasts_attention
        )
        super().__init__(stage_classes, self._forward, "the UNet's blocks", self._declined)

    def stop(self) -> None:
        super().stop()
        self._route.forget()

    def watch(self, unet: Any) -> None:
        """Look after the stages of this UNet from now on."""
        self._route.watch(unet, [*unet.input_blocks, unet.middle_block, *unet.output_blocks])

    def watches(self, unet: Any) -> bool:
        return self._route.unet_of(unet.input_blocks[0]) is unet

    def _declined(self, block: Any, reason: str) -> None:
        """Count a walk through the stages that is the host's once; the UNet's own forward has counted its own."""
        unet: Any = self._route.unet_of(block)
        if unet is not None and block is unet.input_blocks[0] and foreign_forward(unet) is not None:
            runtime.note_host(reason, unet)

    def _forward(
        self, original: Callable[..., Tensor], block: nn.Module, x: Tensor, emb: Tensor, context: Any = None,
        *args: Any, **kwargs: Any,
    ) -> Tensor:
        """Stands in for TimestepEmbedSequential.forward(self, x, emb, context=None, ...)."""
        host = lambda: original(block, x, emb, context, *args, **kwargs)  # noqa: E731
        unet = self._route.unet_of(block)
        owner = None if unet is None else foreign_forward(unet)
        if owner is None or args or kwargs or not isinstance(context, Tensor):
            return runtime.pressure.run_host(host)
        return self._route.run(block, x, emb, context, owner, host)
