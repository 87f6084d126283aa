"""One VAE decoder in our care: its layout and its parameters, true to a module that its host may change."""
from __future__ import annotations

import weakref

from torch import nn

from ...model.binding import Binding
from ...model.layout import UnsupportedUNet
from ...model.patches import HostTraits, Structure, scan
from ...model.read import read_decoder
from ...model.vae.layout import DecoderLayout
from ...model.weights import Weights
from ...options.settings import Settings


class BoundDecoder:
    """Holds no reference to the decoder. settings override the runtime's."""

    def __init__(self, decoder: nn.Module, settings: Settings | None, host_traits: HostTraits) -> None:
        self._decoder = weakref.ref(decoder)
        self.settings = settings
        self.host_traits = host_traits
        self._structure: Structure | None = None
        self._options: tuple[bool, ...] = ()
        self._binding: Binding | None = None
        self._unreadable: str | None = None

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise UnsupportedUNet("this decoder has not been bound yet")
        return self._binding

    @property
    def layout(self) -> DecoderLayout:
        return self.binding.layout

    def look(self) -> str | None:
        """Look through the module tree, and read it again if it has changed: a millisecond, at every decode. Returns
        why the decoder cannot be run, or None."""
        decoder = self._decoder()
        if decoder is None:
            return "the host has unloaded this decoder"
        structure = scan(decoder, self.host_traits)
        if structure.patched is not None:
            return structure.patched
        options = tuple(bool(getattr(decoder, name, False)) for name in ("give_pre_end", "tanh_out"))
        if (structure, options) != (self._structure, self._options):
            self._structure, self._options = structure, options
            self._binding = self._unreadable = None
            try:
                self._binding = Binding(decoder, read_decoder(decoder))
            except UnsupportedUNet as reason:
                self._unreadable = str(reason)
        return self._unreadable

    def weights(self) -> Weights:
        """Every layer's tensors by path, as they are now. Drop the result after the decode.

        The host's parameters are read where they lie and never re-pointed: turning a weight channels-last takes a
        thousandth of a decode, so torch may do that at each convolution, and the host's own decode finds its weights
        as it left them. Raises UnsupportedUNet with the reason if they are of several types or on several devices.
        """
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(self.binding.layers())
        self.binding.refuse_mixture()
        return self.binding.weights()
