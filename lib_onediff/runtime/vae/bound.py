"""One VAE decoder in our care: its layout and its parameters, true to a module that its host may change."""
from __future__ import annotations

import weakref

from torch import nn

from ...core.affine import Weights
from ...core.refusal import Refusal
from ...families.registry import read_decoder
from ...families.vae.layout import DecoderLayout
from ...options.settings import Settings
from ...weights.binding import Binding
from ...weights.scan import LOOKED_AT_BY_OTHERS, HostTraits, scan
from ...weights.watch import Tree


class BoundDecoder:
    """Holds no reference to the decoder. settings override the runtime's."""

    def __init__(self, decoder: nn.Module, settings: Settings | None, host_traits: HostTraits) -> None:
        self._decoder = weakref.ref(decoder)
        self.settings = settings
        self.host_traits = host_traits
        self._tree: Tree | None = None
        self._binding: Binding | None = None
        self._refusal: str | None = None

    @property
    def binding(self) -> Binding:
        if self._binding is None:
            raise Refusal("this decoder has not been bound yet")
        return self._binding

    @property
    def layout(self) -> DecoderLayout:
        return self.binding.layout

    def look(self) -> str | None:
        """See whether the module tree computes as it did, and read it again if not: at every decode. Returns why the
        decoder cannot be run, or None."""
        decoder = self._decoder()
        if decoder is None:
            return "the host has unloaded this decoder"
        if self._tree is not None and self._tree.stands(decoder):
            return self._refusal
        self._tree, self._binding = Tree(decoder, LOOKED_AT_BY_OTHERS), None
        self._refusal = scan(decoder, self.host_traits).patched
        if self._refusal is None:
            try:
                self._binding = Binding(decoder, read_decoder(decoder))
            except Refusal as reason:
                self._refusal = str(reason)
        return self._refusal

    def sources(self) -> str:
        """What tells the host's own decode from those of other sources; see Tree.digest."""
        return "" if self._tree is None else self._tree.digest()

    def weights(self) -> Weights:
        """Every layer's tensors by path, as they are now. Drop the result after the decode.

        The host's parameters are read where they lie and never re-pointed: turning a weight channels-last takes a
        thousandth of a decode, so torch may do that at each convolution, and the host's own decode finds its weights
        as it left them. Raises Refusal with the reason if they are of several types or on several devices.
        """
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(self.binding.layers())
        self.binding.refuse_mixture()
        return self.binding.weights()
