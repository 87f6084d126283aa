"""What the decoder takes from the runtime."""
from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import backends
from ..operators import Network
from ..settings import Settings
from ..unet.layout import UnsupportedUNet
from .layout import DecoderLayout
from .read import read_decoder

if TYPE_CHECKING:
    from ..accelerator import Accelerator

log = logging.getLogger("onediff")


def decoder_steps(accelerator: Accelerator, settings: Settings, device: torch.device) -> backends.Steps:
    """The backends to try for a decode. It is one call a picture: no graph would pay for its memory."""
    return backends.launched_steps(settings.backend, device, accelerator.operators.why_not_native)


def kernels_are_ready(accelerator: Accelerator, layout: DecoderLayout, latent: Tensor) -> bool:
    """Whether the native kernels of a decode are compiled; if not, they soon will be. Raises what Triton raised."""
    network = Network(layout.architecture, layout.leaves(), latent.dtype, latent.device)
    return accelerator.operators.prepare(network, accelerator.patient)


def prepare_early(accelerator: Accelerator, decoder: nn.Module, settings: Settings) -> None:
    """Begin to compile, in a thread, what the first decode would have to do without."""
    parameter = next(decoder.parameters(), None)
    if not settings.enabled or parameter is None or not torch.cuda.is_available():
        return
    # A VAE that waits in the computer's memory goes to the GPU when it is used.
    latent = torch.empty(0, dtype=parameter.dtype, device=torch.device("cuda", torch.cuda.current_device()))
    work = (accelerator, weakref.ref(decoder), settings, latent)
    threading.Thread(target=prepare, args=work, name="onediff-vae", daemon=True).start()


def prepare(
    accelerator: Accelerator, decoder: weakref.ref[nn.Module], settings: Settings, latent: Tensor
) -> None:
    try:
        if decoder_steps(accelerator, settings, latent.device).backends[0] == backends.NATIVE:
            kernels_are_ready(accelerator, read_decoder(decoder()), latent)
    except UnsupportedUNet as reason:
        log.debug("VAE: %s", reason)
    except Exception:
        # The first decode meets the same fault, and says so.
        log.debug("VAE: its kernels could not be prepared", exc_info=True)
