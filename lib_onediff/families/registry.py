"""The families of networks and of VAEs that OneDiff serves: reads a host's module into a layout, or refuses it with a
reason, and finds the family of a layout."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..core.call import Call
from ..core.family import DecoderFamily, Family, LayoutReader, UsualSizes
from ..core.layer_weights import Weights
from ..core.operators import Operators
from ..core.origins import package
from ..core.refusal import Refusal, unsupported_model
from .anima.family import Animas
from .krea2.family import Krea2s
from .unet.family import UNets
from .vae import Autoencoders
from .z_image.family import ZImages


class Families:
    """The families of denoising networks that OneDiff serves, and the readers of all hosts' modules.

    families: one object of each. Attribute all: the same.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self.all = tuple(families)
        self._readers = [reader for family in self.all for reader in family.readers]

    def take_reader(self, reader: LayoutReader) -> None:
        """Register a reader of one host's modules. read() tries it after those registered before. The host's package
        calls this when it is imported, because no family imports a host."""
        self._readers.append(reader)

    def usual_sizes(self, model: str | None = None) -> tuple[UsualSizes, ...]:
        """The usual image sizes to offer for a model, by the beginning of its Layout.model_name: "SDXL refiner" gets
        the sizes of "SDXL". The sizes of all models if the name is None or unknown. Never empty."""
        every = tuple(sizes for family in self.all for sizes in family.usual_sizes)
        return tuple(sizes for sizes in every if (model or "").startswith(sizes.models)) or every

    def read(self, module: nn.Module) -> Any:
        """The layout of a network, read from its module tree; see read_by_first. Raises Refusal if no reader is for
        this class of module, or if the network is built in an unknown way."""
        return read_by_first(module, "UNet or transformer", self._readers)

    def of(self, layout: Any) -> Family:
        """The family to which a layout belongs, by the layout's class. Every layout that read() returns has one."""
        return next(family for family in self.all if isinstance(layout, family.layout))

    def output(self, layout: Any, weights: Weights, ops: Operators, call: Call) -> Tensor:
        """The output of a call by the forward of the layout's family; see core.family.Family.output."""
        return self.of(layout).output(layout, weights, ops, call)

    def units(self, layout: Any, call: Call) -> list[tuple[str, ...]]:
        """The names of the layers whose weights a call reads, in groups, in the order in which the forward of the
        layout's family reads them; see core.family.Family.units."""
        return self.of(layout).units(layout, call)


class DecoderFamilies:
    """The families of VAEs that OneDiff serves, and the readers of all hosts' decoders and encoders.

    families: one object of each. Attribute all: the same.
    """

    def __init__(self, families: Iterable[DecoderFamily]) -> None:
        self.all = tuple(families)
        self._readers = [reader for family in self.all for reader in family.readers]

    def take_reader(self, reader: LayoutReader) -> None:
        """Register a reader of one host's decoders or encoders. The host's package calls this when it is imported."""
        self._readers.append(reader)

    def read(self, decoder: nn.Module) -> Any:
        """The layout of a VAE's decoder or encoder, read from its module tree; see read_by_first. Raises Refusal if no
        reader is for this class of module, such as a tiny autoencoder, or if the module is built in an unknown way,
        such as a decoder that takes a mask."""
        return read_by_first(decoder, "VAE decoder", self._readers)

    def of(self, layout: Any) -> DecoderFamily:
        """The family to which a layout belongs, by the layout's class. Every layout that read() returns has one."""
        return next(family for family in self.all if isinstance(layout, family.layout))

    def output(self, layout: Any, weights: Weights, ops: Operators, latent: Tensor, *how: Any) -> Tensor:
        """The image of a latent, or the latent's mean and log variance for an image if the layout is an encoder's, by
        the forward of the layout's family. how: the arguments of core.family.DecoderFamily.output after the latent."""
        return self.of(layout).output(layout, weights, ops, latent, *how)


# A new family is a file or a folder beside this one, and an entry here.
FAMILIES = Families((UNets(), Animas(), Krea2s(), ZImages()))
DECODERS = DecoderFamilies((Autoencoders(),))


def read_by_first(module: nn.Module, what: str, readers: Iterable[LayoutReader]) -> Any:
    """The layout of a module, by the first reader whose `matches` returns True for it (core.family.LayoutReader). If
    that reader refuses the module, no other one is tried.

    what: the kind of module in words for the Refusal, such as "VAE decoder". Raises Refusal if no reader matches, if
    the reader refuses, or if the module lacks a submodule that the reader expects: then torch's own code raises an
    exception (was_raised_by_torch). An exception from our own code is a fault of ours, and is not turned into a
    Refusal.
    """
    kind = type(module)
    try:
        for matches, reader in readers:
            if matches(module):
                return reader(module)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        if not was_raised_by_torch(error):
            raise
        # A submodule is missing that every network of this class has: it was changed.
        raise unsupported_model(f"a part of its {kind.__name__} is missing or unusual ({error})") from error
    raise Refusal(f"OneDiff does not support this kind of {what}: {kind.__module__}.{kind.__qualname__}")


def was_raised_by_torch(error: BaseException) -> bool:
    """Whether torch's own code raised an exception, by the innermost frame of its traceback. nn.Module does so for a
    missing submodule (AttributeError), and nn.ModuleList for a missing index (IndexError)."""
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    return where is not None and package(where.tb_frame.f_globals.get("__name__", "")) == "torch"
