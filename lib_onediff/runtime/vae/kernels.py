"""Which backends may decode; and the native one's kernels, compiled from the moment when a VAE is handed over."""
from __future__ import annotations

import logging
import threading
import weakref

import torch
from torch import Tensor, nn

from ... import engines as backends
from ...engines.operator_sets import Network
from ...model.layout import UnsupportedUNet
from ...model.read import read_decoder
from ...model.vae.layout import DecoderLayout
from ...options.settings import Settings
from ..services import Services

log = logging.getLogger("onediff")


def decoder_candidates(services: Services, settings: Settings, device: torch.device) -> backends.Candidates:
    """The backends to try for a decode. It is one call an image: no graph would pay for its memory."""
    return backends.launched_candidates(settings.backend, device, services.operators.why_not_native)


def kernels_are_ready(services: Services, layout: DecoderLayout, latent: Tensor) -> bool:
    """Whether the native kernels of a decode are compiled; if not, they soon will be. Raises what Triton raised."""
    network = Network(layout.architecture, layout.leaves(), latent.dtype, latent.device)
    return services.operators.prepare(network, services.waits_for_compile)


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
        if decoder_candidates(services, settings, latent.device).backends[0] == backends.NATIVE:
            present = decoder()
            if present is None:
                return
            layout = read_decoder(present)
            # Compiling takes longer than a host may want to keep it.
            del present
            kernels_are_ready(services, layout, latent)
    except UnsupportedUNet as reason:
        log.debug("VAE: %s", reason)
    except Exception:
        # The first decode meets the same fault, and says so.
        log.debug("VAE: its kernels could not be prepared", exc_info=True)
