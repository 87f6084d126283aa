"""The table as users see it: one row per model and resolution, with its shapes below."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from ..core.call import CACHED
from ..core.image import ImagePart
from ..core.key import ShapeKey
from ..core.table import Entry, State, ratio_of
from ..store.history import HistoryRow
from .low_bit_errors import ClassError

# (model, resolution): also a core.table.Place.
Name = tuple[Any, ...]
GivesBack = Callable[[Collection[ShapeKey]], int]
# The state of a resolution that only earlier processes have used.
ON_DISK = "on disk"
# What a row says of its shapes: the best of them, for that is what the next image most likely gets.
BEST_FIRST = (State.READY, State.PROVED, State.COLD, State.FAILED)


@dataclass(frozen=True)
class LowBitErrors:
    """What Low-bit does to a checkpoint of a model ("SDXL"), as was measured. classes: of layers. error: of the whole
    step with those that are used, at most budget; None where none is."""

    model: str
    budget: float
    error: float | None
    classes: tuple[ClassError, ...]


@dataclass(frozen=True)
class Totals:
    """Everything together, in plain values.

    vram: bytes of GPU memory that all graphs hold.
    budget: bytes that they may hold; 0 without a GPU.
    disk: bytes of the cache folder.
    calls: how many UNet calls went by each route.
    hit_rate: the share of them that a graph served; None before the first.
    low_bit: bytes of the weights in eight bits, which lie beside the WebUI's own or stand for them. low_bit_layers: of
    how many layers they are.
    offloaded: bytes of weights in main memory, where the WebUI keeps a part of its UNet's.
    low_bit_errors: what was measured of Low-bit on the checkpoints that use it.
    """

    vram: int
    budget: int
    disk: int
    calls: dict[str, int]
    hit_rate: float | None
    low_bit: int = 0
    low_bit_layers: int = 0
    offloaded: int = 0
    low_bit_errors: list[LowBitErrors] = field(default_factory=list)


@dataclass(frozen=True)
class ShapeRow:
    """One shape of a resolution, in plain values.

    batch: latents of one UNet call, twice the images where guidance is batched.
    tokens: of the prompt; 0 for a decode of the VAE.
    state: a State's value, or ON_DISK. reason: why it is not a better one.
    step_ms, host_ms: medians in milliseconds.
    ratio: known when both were timed often enough.
    bytes: the GPU memory that comes back when this graph alone goes. needs: what it takes of the memory that all share.
    last_used: a time.time().
    relative_error: from the host's own output.
    label: see core.call.Call.label.
    part: the pass of a network that a step policy has cut; "" for the whole network.
    backend: who computes it; "" where that is not known. lossy: what of that is less exact; see core.key.Lossy.
    """

    batch: int
    tokens: int
    dtype: str
    state: str
    reason: str
    step_ms: float | None
    host_ms: float | None
    ratio: float | None
    bytes: int
    uses: int
    last_used: float
    relative_error: float | None
    needs: int = 0
    pinned: bool = False
    part: str = ""
    backend: str = ""
    lossy: str = ""
    label: str = ""


@dataclass(frozen=True)
class ResolutionRow:
    """All shapes of one model at one resolution ("512x512" in pixels); uses is a sum of calls, images what this process
    has made. prewarm_s: how long its last pre-warming took; saved_s: how much longer the first image had taken without.

    bytes is the GPU memory that purging this row gives back: graphs lie over each other in one memory, which shrinks
    only when its largest goes, so it is no sum, and neither do rows add up. needs is what its largest graph takes.
    Times are means over all steps of the last image that OneDiff has made here, of which some may have computed less;
    before the first, those of the shape that is used most. The VAE's shapes stand last, below every
    model of their resolution, and do not count in these.
    """

    resolution: str
    model: str
    state: str
    reason: str = ""
    images: int = 0
    prewarm_s: float | None = None
    saved_s: float | None = None
    step_ms: float | None = None
    host_ms: float | None = None
    ratio: float | None = None
    bytes: int = 0
    uses: int = 0
    last_used: float = 0.0
    shapes: tuple[ShapeRow, ...] = ()
    needs: int = 0
    pinned: bool = False

    @property
    def is_decode(self) -> bool:
        """Whether only the VAE has used this resolution, no UNet (tiles, say)."""
        return bool(self.shapes) and not any(shape.tokens for shape in self.shapes)


def rows_of(
    entries: Iterable[Entry], history: Iterable[HistoryRow] = (), pins: Collection[Name] = (),
    gives_back: GivesBack = lambda keys: 0,
    parts: Mapping[Any, ImagePart] = MappingProxyType({}), images: Mapping[Any, int] = MappingProxyType({}),
) -> list[ResolutionRow]:
    """The entries as rows, the last used first, among the rows as within each.

    history: what earlier processes used; it makes the rows of resolutions that have no entry yet. pins: the pinned
    (model, resolution). gives_back: the GPU memory that comes back without these shapes.
    parts, images: see CallStats.
    """
    groups = by_name(entries, attrgetter("place"))
    rows = [
        replace(resolution_row(group, name in pins, gives_back, parts.get(name)), images=images.get(name, 0))
        for name, group in groups.items()
    ]
    for name, known in by_name(history, lambda row: (row.model, row.resolution)).items():
        if name not in groups:
            rows.append(row_of(name, ON_DISK, tuple(remembered_shape(row, name in pins) for row in known)))
    return with_decodes_below(sorted(rows, key=lambda row: -row.last_used))


def by_name(found: Iterable[Any], name: Callable[[Any], Name]) -> dict[Name, list[Any]]:
    """By model and resolution, the last used first."""
    groups: dict[Name, list[Any]] = {}
    for one in sorted(found, key=lambda one: -one.last_used):
        groups.setdefault(name(one), []).append(one)
    return groups


def with_decodes_below(rows: list[ResolutionRow]) -> list[ResolutionRow]:
    """The VAE's rows move into those of the models that have used the same resolution, and stay where none has."""
    decodes = {row.resolution: row.shapes for row in rows if row.is_decode}
    models = {row.resolution for row in rows if not row.is_decode}
    return [
        row if row.is_decode else replace(row, shapes=row.shapes + decodes.get(row.resolution, ()))
        for row in rows if not (row.is_decode and row.resolution in models)
    ]


def resolution_row(
    entries: list[Entry], pinned: bool = False, gives_back: GivesBack = lambda keys: 0,
    part: ImagePart | None = None,
) -> ResolutionRow:
    """The row of one model and resolution; entries are its shapes, the last used first. part: the steps of the last
    image here."""
    state = min((entry.state for entry in entries), key=BEST_FIRST.index).value
    shapes = tuple(shape_row(entry, pinned, gives_back({entry.key})) for entry in entries)
    row = row_of((entries[0].model, entries[0].key.resolution), state, shapes)
    if part is not None:
        row = replace(row, step_ms=part.step_ms, host_ms=part.host_ms, ratio=part.ratio)
    return replace(row, bytes=gives_back({entry.key for entry in entries}))


def usual_shape(shapes: tuple[ShapeRow, ...]) -> ShapeRow:
    """The shape that is used most, of those with times."""
    timed = [shape for shape in shapes if shape.step_ms is not None and shape.part != CACHED]
    return max(timed or shapes, key=lambda shape: (shape.uses, shape.batch, shape.last_used))


def row_of(name: Name, state: str, shapes: tuple[ShapeRow, ...]) -> ResolutionRow:
    usual = usual_shape(shapes)
    model, resolution = name
    return ResolutionRow(
        resolution=resolution, model=model, state=state, pinned=shapes[0].pinned,
        reason=next((shape.reason for shape in shapes if shape.reason), ""),
        step_ms=usual.step_ms, host_ms=usual.host_ms, ratio=usual.ratio,
        uses=sum(shape.uses for shape in shapes), last_used=shapes[0].last_used, shapes=shapes,
        needs=max(shape.needs for shape in shapes),
    )


def remembered_shape(row: HistoryRow, pinned: bool) -> ShapeRow:
    """One that this process has not used."""
    return ShapeRow(
        batch=row.batch, tokens=row.tokens, dtype=row.dtype, state=ON_DISK, reason="", step_ms=row.step_ms,
        host_ms=row.host_ms, ratio=ratio_of(row.step_ms, row.host_ms), bytes=0, uses=row.uses, last_used=row.last_used,
        relative_error=row.relative_error, pinned=pinned,
    )


def shape_row(entry: Entry, pinned: bool, gives_back: int) -> ShapeRow:
    """One entry in plain values. gives_back: bytes of GPU memory that come back without its graph."""
    key = entry.key
    return ShapeRow(
        batch=key.batch, tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), state=entry.state.value,
        reason=entry.reason or entry.no_graph or entry.waits, step_ms=entry.own.median_ms,
        host_ms=entry.host.median_ms, ratio=entry.ratio, bytes=gives_back, uses=entry.uses,
        last_used=entry.last_used, relative_error=entry.relative_error, label=key.label, needs=entry.needs,
        pinned=pinned, part=key.part, backend=key.backend, lossy=str(key.lossy),
    )
