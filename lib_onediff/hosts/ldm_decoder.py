"""Our VAE in the hosts whose VAE is ldm's (A1111 with ldm and sgm, Forge): class-level patches of Decoder.forward and
Encoder.forward.

Who replaces the forward of one decoder (an extension that decodes in tiles) stands above a class-level patch.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ..model.patches import HostTraits, origin, own_method, package
from ..runtime.runtime import runtime
from .class_patch import ClassPatch


class DecoderPatches:
    """Patches of these Decoder and Encoder classes.

    why_host: why a decode by this decoder is not ours, in one line, from what the adapter knows of its host. upcasts:
    whether the host computes attention scores in float32 whatever the type of its inputs.
    """

    def __init__(
        self, decoder_classes: Iterable[type], host_traits: HostTraits,
        why_host: Callable[[nn.Module], str | None] = lambda decoder: None,
        upcasts: Callable[[], bool] = lambda: False,
    ) -> None:
        self.patches = [
            ClassPatch(
                kind, "forward", self._forward, runtime.guard, "the VAE's forward",
                lambda decoder, reason: runtime.vae.note_host(reason),
            )
            for kind in decoder_classes
        ]
        self._host_traits, self._why_host, self._upcasts = host_traits, why_host, upcasts

    def serve(self) -> None:
        for patch in self.patches:
            patch.apply()

    def stop(self) -> None:
        """Undo serve()."""
        for patch in self.patches:
            patch.undo()
        runtime.vae.release_all()

    def begin_run(self, decoder: Any) -> None:
        """A sampling begins, whose image will most likely be decoded by this one."""
        runtime.vae.begin_run()
        if any(isinstance(decoder, patch.owner) for patch in self.patches):
            runtime.vae.adopt(decoder, host_traits=self._host_traits)
            replaced = own_method(decoder, "forward")
            if replaced is not None:
                # It may decode without ours, and nobody would tell why. If it asks ours, that is told then.
                runtime.vae.tell_host(f"the decoder has a forward of its own, set by {origin(replaced)} (tiles?)")

    def end_run(self) -> None:
        """The image is done."""
        runtime.vae.end_run()

    def _forward(self, original: Callable[..., Tensor], decoder: nn.Module, z: Tensor, **kwargs: Any) -> Tensor:
        """Stands in for Decoder.forward(self, z, **kwargs)."""
        host = lambda: original(decoder, z, **kwargs)  # noqa: E731
        reason = self._why(original, decoder, kwargs)
        runtime.vae.adopt(decoder, host_traits=self._host_traits)
        if reason is not None:
            return runtime.vae.decode_by_host(decoder, z, host, reason, upcast_attention=self._upcasts())
        return runtime.vae.decode(decoder, z, host, upcast_attention=self._upcasts())

    def _why(self, original: Callable[..., Tensor], decoder: nn.Module, kwargs: dict[str, Any]) -> str | None:
        source = origin(original)
        if package(source) != package(type(decoder).__module__):
            return f"{type(decoder).__name__}.forward was replaced by {source}"
        if kwargs:
            return f"the VAE is called with more than we know ({', '.join(sorted(kwargs))})"
        return self._why_host(decoder)
