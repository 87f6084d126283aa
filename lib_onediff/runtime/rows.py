"""The table as users see it: one row for each model and resolution, with its shapes."""
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

# (model, resolution), as a tuple or a core.table.Place.
Name = tuple[Any, ...]
# Returns the bytes of GPU memory that dropping the graphs of these shapes would free.
GivesBack = Callable[[Collection[ShapeKey]], int]
# The state of a resolution that only earlier processes have used.
ON_DISK = "on disk"
# The order by which a row shows the best state of its shapes: the next image most likely uses that shape.
BEST_FIRST = (State.READY, State.PROVED, State.COLD, State.FAILED)


@dataclass(frozen=True)
class LowBitErrors:
    """The measured relative errors of Low-bit on a checkpoint.

    model: the model's name for users ("SDXL").
    budget: the largest error that the settings allow.
    error: the error of the UNet's output with all classes in use together; None if none is in use, and if it was not
        measured.
    classes: the error of each class of layers alone, whether or not it is in use.
    """

    model: str
    budget: float
    error: float | None
    classes: tuple[ClassError, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over all resolutions, in plain values.

    vram: bytes of GPU memory that OneDiff takes, mostly for graphs.
    budget: bytes of GPU memory that OneDiff may take; 0 without a GPU.
    disk: bytes of the cache folder.
    calls: the number of UNet calls by route, in this process.
    hit_rate: the part of these calls that a graph served, from 0 to 1; None before the first call.
    low_bit: bytes of the 8-bit weights that were made for the option Low-bit.
    low_bit_layers: the number of layers with such weights.
    offloaded: bytes of the weights that are streamed; 0 unless the WebUI keeps a part of the weights in main memory.
    low_bit_errors: the measured errors of each checkpoint that uses Low-bit.
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

    batch: rows of one UNet call: twice the number of images if prompt and negative prompt are batched.
    tokens: the context length; 0 for a decode or encode of the VAE.
    dtype: the dtype's name without "torch.".
    state: a State's value, or ON_DISK.
    reason: why the shape is not computed faster, for users; "" if there is no reason.
    step_ms, host_ms: median milliseconds of a call by OneDiff and by the host; None without times.
    ratio: host_ms / step_ms, the speedup; None until step_ms and host_ms are from enough calls.
    bytes: GPU memory that dropping this shape's graph alone would free; 0 without a graph.
    uses: the number of calls.
    needs: bytes that the shape's graph takes in the memory pool that graphs share; 0 if unknown.
    last_used: time.time() of the last call.
    relative_error: of our output against the host's own; None if they were not compared.
    pinned: whether the user has pinned the resolution.
    label: see core.call.Call.label.
    part: the pass of a network that a step policy has cut; "" for the whole network.
    backend: the backend's name; "" if unknown.
    lossy: words for the backend's lossy computation; see core.key.Lossy.
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
    """All shapes of one model at one resolution ("512x512", in pixels).

    state: the state of the best shape; ON_DISK if this process has not used the resolution.
    reason: why images are not faster here: the reason of the most recently used shape that has one, even if another
        shape is ready; "" if no shape has one.
    images: the number of images that this process has made here.
    uses: the number of this process's calls here; if it made none, of the calls of earlier processes.
    last_used: time.time() of the last call here.
    prewarm_s: seconds of the last pre-warm here by this process; None if there was none.
    saved_s: seconds by which that pre-warm has shortened the first image; None if unknown.
    step_ms, host_ms, ratio: means over all steps of the last image that OneDiff has made here, cached and extrapolated
        steps included; before the first image, the values of the most used shape.
    bytes: GPU memory that purging this row would free. It is not the sum over the shapes, and rows do not add up,
        because graphs overlap in one memory pool, which shrinks only when its largest graph is removed.
    needs: bytes that the row's largest graph takes in that pool.
    pinned: whether the user has pinned the resolution.
    shapes: the model's shapes, the most recently used first, and after them the shapes of the VAE's decodes and encodes
        at this resolution, which do not count in the other fields.
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
        """Whether this is a row of the VAE: no UNet has used its resolution, as for the tiles of a tiled decode. False
        for a row without shapes."""
        return bool(self.shapes) and not any(shape.tokens for shape in self.shapes)


def rows_of(
    entries: Iterable[Entry], history: Iterable[HistoryRow] = (), pins: Collection[Name] = (),
    gives_back: GivesBack = lambda keys: 0,
    parts: Mapping[Any, ImagePart] = MappingProxyType({}), images: Mapping[Any, int] = MappingProxyType({}),
) -> list[ResolutionRow]:
    """One row for each model and resolution in the entries and the history, except that the VAE's shapes are in the
    rows of the models at their resolution (with_decodes_below). Rows, and shapes in a row, are sorted with the most
    recently used first.

    history: rows of earlier processes, used for a model and resolution without an entry. pins: the pinned (model,
    resolution) pairs. gives_back: see GivesBack. parts, images: by (model, resolution), the steps of the last image and
    the number of images; see CallStats.
    """
    groups = grouped(entries, attrgetter("place"))
    rows = [
        replace(resolution_row(group, name in pins, gives_back, parts.get(name)), images=images.get(name, 0))
        for name, group in groups.items()
    ]
    for name, known in grouped(history, lambda row: (row.model, row.resolution)).items():
        if name not in groups:
            rows.append(row_of(name, ON_DISK, tuple(remembered_shape(row, name in pins) for row in known)))
    return with_decodes_below(sorted(rows, key=lambda row: -row.last_used))


def grouped(found: Iterable[Any], name: Callable[[Any], Name]) -> dict[Name, list[Any]]:
    """The items of `found` in groups by the result of name(item). found: objects with last_used, such as entries. The
    groups, and the items of a group, are sorted with the most recently used first."""
    groups: dict[Name, list[Any]] = {}
    for one in sorted(found, key=lambda one: -one.last_used):
        groups.setdefault(name(one), []).append(one)
    return groups


def with_decodes_below(rows: list[ResolutionRow]) -> list[ResolutionRow]:
    """The rows, with the shapes of the VAE's rows (is_decode) appended to the shapes of each model's row at the same
    resolution. A row of the VAE is left out if a model has a row at its resolution, else it stays."""
    decodes: dict[str, tuple[ShapeRow, ...]] = {}
    for row in rows:
        if row.is_decode:
            # A VAE's decoder and its encoder have a row each.
            decodes[row.resolution] = decodes.get(row.resolution, ()) + row.shapes
    models = {row.resolution for row in rows if not row.is_decode}
    return [
        row if row.is_decode else replace(row, shapes=row.shapes + decodes.get(row.resolution, ()))
        for row in rows if not (row.is_decode and row.resolution in models)
    ]


def resolution_row(
    entries: list[Entry], pinned: bool = False, gives_back: GivesBack = lambda keys: 0,
    part: ImagePart | None = None,
) -> ResolutionRow:
    """The row of one model and resolution. entries: the entries of its shapes, at least one, the most recently used
    first. part: the steps of the last image at this place, whose times the row gets; None: the row gets the times of
    usual_shape()."""
    state = min((entry.state for entry in entries), key=BEST_FIRST.index).value
    shapes = tuple(shape_row(entry, pinned, gives_back({entry.key})) for entry in entries)
    row = row_of((entries[0].model, entries[0].key.resolution), state, shapes)
    if part is not None:
        row = replace(row, step_ms=part.step_ms, host_ms=part.host_ms, ratio=part.ratio)
    return replace(row, bytes=gives_back({entry.key for entry in entries}))


def usual_shape(shapes: tuple[ShapeRow, ...]) -> ShapeRow:
    """The most used one of the shapes that have times and are no cached passes; if there is no such shape, the most
    used one of all."""
    timed = [shape for shape in shapes if shape.step_ms is not None and shape.part != CACHED]
    return max(timed or shapes, key=lambda shape: (shape.uses, shape.batch, shape.last_used))


def row_of(name: Name, state: str, shapes: tuple[ShapeRow, ...]) -> ResolutionRow:
    """A row with these shapes, at least one, the most recently used first. The row's times are those of
    usual_shape()."""
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
    """A ShapeRow with the state ON_DISK, for a row of the history whose resolution this process has not used."""
    return ShapeRow(
        batch=row.batch, tokens=row.tokens, dtype=row.dtype, state=ON_DISK, reason="", step_ms=row.step_ms,
        host_ms=row.host_ms, ratio=ratio_of(row.step_ms, row.host_ms), bytes=0, uses=row.uses, last_used=row.last_used,
        relative_error=row.relative_error, pinned=pinned,
    )


def shape_row(entry: Entry, pinned: bool, gives_back: int) -> ShapeRow:
    """A ShapeRow of an entry. gives_back: bytes of GPU memory that dropping the entry's graph alone would free."""
    key = entry.key
    return ShapeRow(
        batch=key.batch, tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), state=entry.state.value,
        reason=entry.reason or entry.no_graph or entry.waits, step_ms=entry.own.median_ms,
        host_ms=entry.host.median_ms, ratio=entry.ratio, bytes=gives_back, uses=entry.uses,
        last_used=entry.last_used, relative_error=entry.relative_error, label=key.label, needs=entry.needs,
        pinned=pinned, part=key.part, backend=key.backend, lossy=str(key.lossy),
    )
