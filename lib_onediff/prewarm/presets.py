"""Which sizes users of a model ask for, each by one click."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One kind of model. model: the first word of its layout's model_name. sizes: what it was trained at, then what
    hires fix makes of that."""

    name: str
    model: str
    sizes: tuple[str, ...]


FAMILIES = (
    Family("SD 1.5", "SD1", ("512x512", "512x768", "768x512", "768x768", "1024x1024", "1024x1536", "1536x1024")),
    Family("SD 2", "SD2", ("768x768", "1536x1536")),
    Family("SDXL", "SDXL", (
        "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x640", "640x1536",
        "1536x1536", "1248x1824", "1824x1248",
    )),
    Family("Anima", "Anima", (
        "1024x1024", "1152x896", "896x1152", "1216x832", "832x1216", "1344x768", "768x1344", "1536x1536",
    )),
)


def families_for(model: str | None) -> tuple[Family, ...]:
    """The families that fit a model's name, such as "SDXL refiner"; all where none does or none is loaded."""
    # As small and unusual ones are called.
    first_word = (model or "").replace("SD 1.x", "SD1").split(" ")[0]
    return tuple(known for known in FAMILIES if known.model == first_word) or FAMILIES
