"""One VAE decoder in our care: its parameters, true to a module that its host may change."""
from __future__ import annotations

import weakref

from torch import Tensor, nn

from ...core.refusal import Refusal
from ...core.settings import Settings
from ...families.registry import read_decoder
from ...weights.binding import Binding
from ...weights.scan import LOOKED_AT_BY_OTHERS, HostTraits, refuse_foreign_code
from ...weights.watch import Tree
from .precision import short_name


class BoundDecoder:
    """Holds no reference to the decoder. settings override the runtime's."""

    def __init__(self, decoder: nn.Module, settings: Settings | None, host_traits: HostTraits) -> None:
        self._decoder = weakref.ref(decoder)
        self.settings = settings
        self._host_traits = host_traits
        self._tree: Tree | None = None
        self._binding: Binding | Refusal | None = None

    def look(self) -> Binding:
        """The decoder's parameters as they are now, at every decode: where the module tree computes otherwise than it
        did, it is read again. Raises Refusal where the decoder cannot be run.

        The host's parameters are read where they lie and never re-pointed: turning a weight channels-last takes a
        thousandth of a decode, so torch may do that at each convolution, and the host's own decode finds its weights
        as it left them.
        """
        decoder = self._decoder()
        if decoder is None:
            raise Refusal("the host has unloaded this decoder")
        if self._tree is None or not self._tree.stands(decoder):
            tree, self._tree = Tree(decoder, LOOKED_AT_BY_OTHERS), None
            try:
                refuse_foreign_code(decoder, self._host_traits)
                self._binding = Binding(decoder, read_decoder(decoder))
            except Refusal as refusal:
                # Its text alone: the one that was raised keeps the decoder alive.
                self._binding = Refusal(str(refusal))
            self._tree = tree
        if not isinstance(self._binding, Binding):
            raise Refusal(str(self._binding))
        if self._host_traits.sync_lora is not None:
            self._host_traits.sync_lora(self._binding.layers())
        self._binding.refuse_mixture()
        return self._binding

    def sources(self) -> str:
        """What tells the host's own decode from those of other sources; see Tree.digest."""
        return "" if self._tree is None else self._tree.digest()


def refuse_latent(binding: Binding, latent: Tensor) -> None:
    """Raise Refusal for a latent that does not fit a decoder."""
    channels = binding.layout.in_convolution.in_channels
    if latent.dim() != 4 or latent.shape[1] != channels:
        raise Refusal(f"the latent is {tuple(latent.shape)}, but this VAE takes {channels} channels")
    if latent.device != binding.device:
        raise Refusal(f"the VAE's weights are on {binding.device}, the latent is on {latent.device}")
    if latent.dtype != binding.dtype:
        raise Refusal(f"the VAE's weights are {short_name(binding.dtype)}, the latent is {short_name(latent.dtype)}")
