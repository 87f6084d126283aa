"""Which devices may decode; and the kernels of the first, compiled from the moment when a VAE is handed over."""
from __future__ import annotations

import logging
import threading
import weakref

import torch
from torch import Tensor, nn

from ...core.device import Candidates, Network
from ...core.refusal import Refusal
from ...families.registry import read_decoder
from ...families.vae.layout import DecoderLayout
from ...options.settings import Settings
from ..services import Services

log = logging.getLogger("onediff")


def decoder_candidates(services: Services, settings: Settings, device: torch.device, dtype: torch.dtype) -> Candidates:
    """What to try for a decode. It is one call an image: no graph would pay for its memory."""
    return services.devices.launched(settings, device, dtype, services.waits_for_compile)


def decoder_network(layout: DecoderLayout, latent: Tensor) -> Network:
    return Network(layout.architecture, layout.leaves(), latent.dtype, latent.device)


def prepare_early(services: Services, decoder: nn.Module, settings: Settings) -> None:
    """Begin to compile, in a thread, what the first decode would have to do without."""
    parameter = next(decoder.parameters(), None)
    if not settings.enabled or parameter is None or not torch.cuda.is_available():
        return
    # A VAE that waits in the computer's memory goes to the GPU when it is used.
    device = parameter.device if parameter.is_cuda else torch.device("cuda", torch.cuda.current_device())
    latent = torch.empty(0, dtype=parameter.dtype, device=device)
    work = (services, weakref.ref(decoder), settings, latent)
    threading.Thread(target=prepare, args=work, name="onediff-vae", daemon=True).start()


def prepare(
    services: Services, decoder: weakref.ref[nn.Module], settings: Settings, latent: Tensor
) -> None:
    try:
        present = decoder()
        if present is None:
            return
        layout = read_decoder(present)
        # Compiling takes longer than a host may want to keep it.
        del present
        first = decoder_candidates(services, settings, latent.device, latent.dtype).devices[0]
        first.prepare(decoder_network(layout, latent), services.waits_for_compile)
    except Refusal as reason:
        log.debug("VAE: %s", reason)
    except Exception:
        # The first decode meets the same fault, and says so.
        log.debug("VAE: its kernels could not be prepared", exc_info=True)
