"""Which sizes users of a model ask for, by one click."""
from __future__ import annotations

from dataclasses import dataclass

from ..core.sizes import Size


@dataclass(frozen=True)
class SizePreset:
    """One click. label: for people; sizes: in the order in which they are made ready."""

    label: str
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Family:
    """The presets of one kind of model. model: the first word of what UNetLayout.model_name calls it."""

    name: str
    model: str
    presets: tuple[SizePreset, ...]


def family(name: str, model: str, sides: tuple[tuple[int, int], ...], hires: tuple[tuple[int, int], ...],
           factor: float) -> Family:
    """A family of single sizes, all of them together, and pairs with what hires fix makes of some by this factor."""
    sizes = tuple(Size(width, height) for width, height in sides)
    single = tuple(SizePreset(size.resolution, (size,)) for size in sizes)
    pairs = ((Size(*pair), Size(*(int(side * factor) for side in pair))) for pair in hires)
    upscaled = tuple(SizePreset(f"{one.resolution} → {other.resolution}", (one, other)) for one, other in pairs)
    together = (SizePreset(f"All {len(sizes)}", sizes),) if len(sizes) > 1 else ()
    return Family(name, model, (*single, *together, *upscaled))


FAMILIES = (
    family("SD 1.5", "SD1", ((512, 512), (512, 768), (768, 512), (768, 768)),
           ((512, 512), (512, 768), (768, 512)), 2),
    family("SD 2", "SD2", ((768, 768),), ((768, 768),), 2),
    # What SDXL was trained at, around a million pixels.
    family("SDXL", "SDXL", ((1024, 1024), (1152, 896), (896, 1152), (1216, 832), (832, 1216), (1344, 768), (768, 1344),
                            (1536, 640), (640, 1536)), ((1024, 1024), (832, 1216), (1216, 832)), 1.5),
)


def families_for(model: str | None) -> tuple[Family, ...]:
    """The families that fit a model's name, such as "SDXL refiner"; all where none does or none is loaded."""
    # As UNetLayout.model_name calls small and unusual ones.
    first_word = (model or "").replace("SD 1.x", "SD1").split(" ")[0]
    return tuple(known for known in FAMILIES if known.model == first_word) or FAMILIES
