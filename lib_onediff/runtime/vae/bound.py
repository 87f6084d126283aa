"""One VAE decoder in our care: its layout and its parameters, true to a module that its host may change."""
from __future__ import annotations

import weakref

from torch import Tensor, nn

from ...core.affine import Weights
from ...core.refusal import Refusal
from ...families.registry import read_decoder
from ...families.vae.layout import DecoderLayout
from ...options.settings import Settings
from ...weights.binding import Binding
from ...weights.scan import LOOKED_AT_BY_OTHERS, HostTraits, scan
from ...weights.watch import Tree
from .precision import short_name


class BoundDecoder:
    """Holds no reference to the decoder. settings override the runtime's."""

    def __init__(self, decoder: nn.Module, settings: Settings | None, host_traits: HostTraits) -> None:
        self._decoder = weakref.ref(decoder)
        self.settings = settings
        self.host_traits = host_traits
        self._tree: Tree | None = None
        self._binding: Binding | None = None
        self._why_not = "this decoder has not been read yet"

    @property
    def binding(self) -> Binding:
        """As look has left it. Raises Refusal where the decoder cannot be run."""
        if self._binding is None:
            raise Refusal(self._why_not)
        return self._binding

    @property
    def layout(self) -> DecoderLayout:
        return self.binding.layout

    def look(self) -> None:
        """See whether the module tree computes as it did, and read it again if not: at every decode."""
        decoder = self._decoder()
        if decoder is None:
            raise Refusal("the host has unloaded this decoder")
        if self._tree is None or not self._tree.stands(decoder):
            tree, self._tree, self._binding = Tree(decoder, LOOKED_AT_BY_OTHERS), None, None
            try:
                patched = scan(decoder, self.host_traits).patched
                if patched is not None:
                    raise Refusal(patched)
                self._binding = Binding(decoder, read_decoder(decoder))
            except Refusal as refusal:
                # Its text alone: an exception keeps the decoder alive.
                self._why_not = str(refusal)
            self._tree = tree

    def refuse_latent(self, latent: Tensor) -> None:
        """Raise Refusal for a latent that does not fit the decoder."""
        channels, binding = self.layout.in_convolution.in_channels, self.binding
        if latent.dim() != 4 or latent.shape[1] != channels:
            raise Refusal(f"the latent is {tuple(latent.shape)}, but this VAE takes {channels} channels")
        if latent.device != binding.device:
            raise Refusal(f"the VAE's weights are on {binding.device}, the latent is on {latent.device}")
        if latent.dtype != binding.dtype:
            raise Refusal(
                f"the VAE's weights are {short_name(binding.dtype)}, the latent is {short_name(latent.dtype)}"
            )

    def sources(self) -> str:
        """What tells the host's own decode from those of other sources; see Tree.digest."""
        return "" if self._tree is None else self._tree.digest()

    def weights(self) -> Weights:
        """Every layer's tensors by path, as they are now. Drop the result after the decode.

        The host's parameters are read where they lie and never re-pointed: turning a weight channels-last takes a
        thousandth of a decode, so torch may do that at each convolution, and the host's own decode finds its weights
        as it left them. Raises Refusal if they are of several types or on several devices.
        """
        if self.host_traits.sync_lora is not None:
            self.host_traits.sync_lora(self.binding.layers())
        self.binding.refuse_mixture()
        return self.binding.weights()
