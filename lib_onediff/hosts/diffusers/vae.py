"""Serves the decoder and the encoder of a diffusers AutoencoderKL by our forward.

Replaces the forwards of Decoder and Encoder, and not the VAE's decode() and encode(). So tiling and slicing stay the
host's, which call our forward for each tile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.attempt import HostFunction
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...runtime.runtime import runtime
from .module_forward import ModuleForward, arguments_by_name, replace_forward, restore_forward, unwrapped
from .read_vae import is_diffusers

# The first parameter of both forwards.
LATENT = "sample"


class DecoderForward(ModuleForward):
    """Serves the calls of one decoder or encoder."""

    hook = "the VAE's forward"

    def serve(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        latent: Any = args[0] if args else kwargs.get(LATENT)

        def check() -> None:
            if type(module) is not self.kind:
                raise Refusal(f"its class was changed to {type(module).__qualname__}")
            given = arguments_by_name(module, original, args, kwargs)
            if not isinstance(given.pop(LATENT, None), Tensor):
                raise Refusal("the VAE's decoder or encoder is called without a tensor")
            passed = sorted(name for name, value in given.items() if value is not None)
            if passed:
                raise Refusal(f"the VAE passes {', '.join(passed)}, which OneDiff does not support")

        return runtime.vae.decode(module, latent, lambda: host(module, *args, **kwargs), check=check)

    @classmethod
    def declined(cls, module: Any, reason: str) -> None:
        runtime.vae.note_host(reason)


def halves_of(owner: Any) -> list[nn.Module]:
    """The decoder and the encoder of a pipeline's AutoencoderKL; [] for any other kind of VAE."""
    vae = getattr(owner, "vae", None)
    decoder, encoder = (unwrapped(getattr(vae, name, None)) for name in ("decoder", "encoder"))
    if not isinstance(decoder, nn.Module) or not is_diffusers(decoder):
        return []
    return [decoder, encoder] if isinstance(encoder, nn.Module) and is_diffusers(encoder) else [decoder]


def attach(decoder: nn.Module, settings: Settings | None = None) -> None:
    """Serve the calls of this decoder or encoder by our forward. Calls that only the host can compute still run the
    host's own. settings: override the runtime's. Safe to call twice.

    Raises Refusal if its class is not diffusers' own, and ValueError if other code has replaced its forward.
    """
    if not is_diffusers(decoder):
        raise Refusal(f"{type(decoder).__module__}.{type(decoder).__qualname__} is not a class of diffusers' VAE")
    replace_forward(decoder, DecoderForward, "the VAE decoder's")
    runtime.vae.adopt(decoder, settings)


def detach(decoder: nn.Module) -> None:
    """Undo attach: the decoder or encoder runs its own forward again."""
    restore_forward(decoder)
    runtime.vae.release(decoder)
