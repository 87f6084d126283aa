"""Serves the decoder and the encoder of a diffusers AutoencoderKL by our forward.

Replaces the forwards of Decoder and Encoder, and not the VAE's decode() and encode(). So tiling and slicing stay the
host's, which call our forward for each tile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.attempt import HostFunction
from ...core.refusal import Refusal, unsupported_inputs, unsupported_model
from ...core.settings import Settings
from ...runtime.runtime import runtime
from .module_forward import ModuleForward, arguments_by_name, replace_forward, restore_forward, unwrapped
from .read_vae import is_diffusers

# The name of the first parameter of the forwards of Decoder (the latent) and Encoder (the image).
INPUT = "sample"


class DecoderForward(ModuleForward):
    """Serves the calls of one decoder, or of one encoder, of an AutoencoderKL in place of its class's forward, by
    runtime.vae.decode, which also computes encoders."""

    hook = "the VAE's forward"

    def serve(
        self, original: Callable[..., Any], host: HostFunction, module: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The output of the decoder or encoder for this call, computed by our forward, or by the host's if ours cannot
        compute this call. See ModuleForward."""
        latent: Any = args[0] if args else kwargs.get(INPUT)

        def check() -> None:
            if type(module) is not self.kind:
                raise unsupported_model(
                    f"the class of the VAE's decoder or encoder was changed to {type(module).__qualname__}"
                )
            given = arguments_by_name(module, original, args, kwargs)
            if not isinstance(given.pop(INPUT, None), Tensor):
                raise unsupported_inputs("the VAE gets no tensor")
            passed = sorted(name for name, value in given.items() if value is not None)
            if passed:
                raise Refusal(f"the VAE passes {', '.join(passed)}, which OneDiff does not support")

        return runtime.vae.decode(module, latent, lambda: host(module, *args, **kwargs), check=check)

    @classmethod
    def declined(cls, module: Any, reason: str) -> None:
        """Count this decode or encode as one that the host computes, with the reason for the user. The guard calls this
        if it does not call serve(), or serve() has failed. See ModuleForward."""
        runtime.vae.note_host(reason)


def halves_of(owner: Any) -> list[nn.Module]:
    """[decoder, encoder] of a pipeline's AutoencoderKL, without the wrapper of torch.compile; [decoder] if the encoder
    is not of diffusers' own class; [] if the decoder is not of diffusers' own class, as in other kinds of VAE, or if
    there is no VAE. owner: the pipeline, or any object with an attribute vae."""
    vae = getattr(owner, "vae", None)
    decoder, encoder = (unwrapped(getattr(vae, name, None)) for name in ("decoder", "encoder"))
    if not isinstance(decoder, nn.Module) or not is_diffusers(decoder):
        return []
    return [decoder, encoder] if isinstance(encoder, nn.Module) and is_diffusers(encoder) else [decoder]


def attach(decoder: nn.Module, settings: Settings | None = None) -> None:
    """Serve the calls of this decoder or encoder by our forward from now on. Calls that our forward does not compute
    still run the host's. A second call only replaces the settings.

    settings: for this module, in place of the runtime's; None: the runtime's. Raises Refusal if its class is not
    diffusers' own, and ValueError if other code has replaced its forward.
    """
    if not is_diffusers(decoder):
        raise Refusal(f"{type(decoder).__module__}.{type(decoder).__qualname__} is not a class of diffusers' VAE")
    replace_forward(decoder, DecoderForward, "the VAE decoder's")
    runtime.vae.adopt(decoder, settings)


def detach(decoder: nn.Module) -> None:
    """Undo attach: the decoder or encoder runs its own forward again. Does nothing for one that was never attached."""
    restore_forward(decoder)
    runtime.vae.release(decoder)
