"""Put our decoder and encoder on a diffusers AutoencoderKL, and take them off again.

Their own forwards are replaced, not the VAE's decode() and encode(): tiling and slicing stay the host's, and call them
per tile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.attempt import HostFunction
from ...core.refusal import Refusal
from ...core.settings import Settings
from ...runtime.runtime import runtime
from .module_forward import ModuleForward, by_name, put_on, take_off, unwrapped
from .read_vae import is_diffusers

# What the forwards of both take first.
LATENT = "sample"


class DecoderForward(ModuleForward):
    """Stands in for Decoder.forward, and Encoder.forward."""

    hook = "the VAE's forward"

    def serve(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        latent: Any = args[0] if args else kwargs.get(LATENT)

        def check() -> None:
            if type(module) is not self.kind:
                raise Refusal(f"somebody has changed its class to {type(module).__qualname__}")
            given = by_name(module, original, args, kwargs)
            if not isinstance(given.pop(LATENT, None), Tensor):
                raise Refusal("the VAE's decoder is called without a latent")
            passed = sorted(name for name, value in given.items() if value is not None)
            if passed:
                raise Refusal(f"the VAE passes {', '.join(passed)}")

        return runtime.vae.decode(module, latent, lambda: host(module, *args, **kwargs), check=check)

    @classmethod
    def declined(cls, module: Any, reason: str) -> None:
        runtime.vae.note_host(reason)


def halves_of(owner: Any) -> list[nn.Module]:
    """The decoder and the encoder of a pipeline's AutoencoderKL; nothing of any other kind of VAE."""
    vae = getattr(owner, "vae", None)
    decoder, encoder = (unwrapped(getattr(vae, name, None)) for name in ("decoder", "encoder"))
    if not isinstance(decoder, nn.Module) or not is_diffusers(decoder):
        return []
    return [decoder, encoder] if isinstance(encoder, nn.Module) and is_diffusers(encoder) else [decoder]


def attach(decoder: nn.Module, settings: Settings | None = None) -> None:
    """Serve this decoder's calls by our forward where it can; settings override the runtime's. Safe to call twice.

    Raises ValueError if somebody else has replaced its forward, and Refusal for one that is none of diffusers' own.
    """
    if not is_diffusers(decoder):
        raise Refusal(f"{type(decoder).__module__}.{type(decoder).__qualname__} is not a class of diffusers' VAE")
    put_on(decoder, DecoderForward, "the VAE decoder's")
    runtime.vae.adopt(decoder, settings)


def detach(decoder: nn.Module) -> None:
    """Undo attach: the decoder has its own forward again."""
    take_off(decoder)
    runtime.vae.release(decoder)
