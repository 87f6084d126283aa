"""Read any host's UNet, VAE decoder or VAE encoder into a layout, or refuse with a reason.

The one door to the readers of each kind of module, which know nothing of each other.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..core.call import Call
from ..core.family import DecoderFamily, Family, LayoutReader, UsualSizes
from ..core.layer_weights import Weights
from ..core.operators import Operators
from ..core.origins import package
from ..core.refusal import Refusal
from .anima.family import Animas
from .krea2.family import Krea2s
from .unet.family import UNets
from .vae import Autoencoders
from .z_image.family import ZImages


class Families:
    """The families whose networks are served."""

    def __init__(self, families: Iterable[Family]) -> None:
        self.all = tuple(families)
        self._readers = [reader for family in self.all for reader in family.readers]

    def take_reader(self, reader: LayoutReader) -> None:
        """Register the reader of one host's modules: hosts know the families, and families know no host."""
        self._readers.append(reader)

    def usual_sizes(self, model: str | None = None) -> tuple[UsualSizes, ...]:
        """Those of a model by its name, such as "SDXL refiner"; of every model where none fits or is given."""
        every = tuple(sizes for family in self.all for sizes in family.usual_sizes)
        return tuple(sizes for sizes in every if (model or "").startswith(sizes.models)) or every

    def read(self, module: nn.Module) -> Any:
        """The layout of a network, read from its module tree. Raises Refusal for anything that no family knows."""
        return read(module, "network", self._readers)

    def of(self, layout: Any) -> Family:
        """The family that has read it."""
        return next(family for family in self.all if isinstance(layout, family.layout))

    def output(self, layout: Any, weights: Weights, ops: Operators, call: Call) -> Tensor:
        """See Family.output."""
        return self.of(layout).output(layout, weights, ops, call)

    def units(self, layout: Any, call: Call) -> list[tuple[str, ...]]:
        """See Family.units."""
        return self.of(layout).units(layout, call)


class DecoderFamilies:
    """The families of VAEs that are served."""

    def __init__(self, families: Iterable[DecoderFamily]) -> None:
        self.all = tuple(families)
        self._readers = [reader for family in self.all for reader in family.readers]

    def take_reader(self, reader: LayoutReader) -> None:
        """As of Families."""
        self._readers.append(reader)

    def read(self, decoder: nn.Module) -> Any:
        """The layout of a VAE's decoder or encoder, read from its module tree. Raises Refusal for anything that no
        family knows, or with parameters that it does not know: a tiny autoencoder, one that takes a mask."""
        return read(decoder, "VAE decoder", self._readers)

    def of(self, layout: Any) -> DecoderFamily:
        """The family that has read it."""
        return next(family for family in self.all if isinstance(layout, family.layout))

    def output(self, layout: Any, weights: Weights, ops: Operators, latent: Tensor, *how: Any) -> Tensor:
        """See DecoderFamily.output."""
        return self.of(layout).output(layout, weights, ops, latent, *how)


# A new family is a file or a folder beside this, and a name here.
FAMILIES = Families((UNets(), Animas(), Krea2s(), ZImages()))
DECODERS = DecoderFamilies((Autoencoders(),))


def read(module: nn.Module, what: str, readers: Iterable[LayoutReader]) -> Any:
    """The layout by the first of these that knows the module. Raises Refusal for another network, and what is a fault
    of ours as it is."""
    kind = type(module)
    try:
        for knows, reader in readers:
            if knows(module):
                return reader(module)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if not is_torchs(error):
            raise
        # A member that every module of this class has is missing: not the network we know.
        raise Refusal(f"this {kind.__name__} is built in a way that OneDiff does not know ({error})") from error
    raise Refusal(f"{kind.__module__}.{kind.__qualname__} is not a {what} that OneDiff knows")


def is_torchs(error: BaseException) -> bool:
    """Whether torch has raised an exception: a module without that attribute, a list of modules that is shorter."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    return where is not None and package(where.tb_frame.f_globals.get("__name__", "")) == "torch"
