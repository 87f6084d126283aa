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

# (model, resolution): also a core.table.Place.
Name = tuple[Any, ...]
GivesBack = Callable[[Collection[ShapeKey]], int]
# The state of a resolution that only earlier processes have used.
ON_DISK = "on disk"
# A row shows the best state of its shapes, because the next image most likely uses that shape.
BEST_FIRST = (State.READY, State.PROVED, State.COLD, State.FAILED)


@dataclass(frozen=True)
class LowBitErrors:
    """The measured relative errors of Low-bit on a checkpoint.

    model: the model's name for users ("SDXL").
    budget: the largest error that the settings allow.
    error: of the UNet's output with all classes in use; None if none is in use, or if it was not measured.
    classes: each class of layers alone, used or not.
    """

    model: str
    budget: float
    error: float | None
    classes: tuple[ClassError, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over all resolutions, in plain values.

    vram: bytes of GPU memory that OneDiff takes, mostly for graphs.
    budget: bytes that it may take; 0 without a GPU.
    disk: bytes of the cache folder.
    calls: the number of UNet calls by route, in this process.
    hit_rate: the part of them that a graph served; None before the first.
    low_bit: bytes of the 8-bit weights, beside the WebUI's own or instead of them.
    low_bit_layers: the number of their layers.
    offloaded: bytes of streamed weights, if the WebUI keeps a part of the weights in main memory.
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
    tokens: the context length; 0 for a decode of the VAE.
    state: a State's value, or ON_DISK.
    reason: why it is not a better one, for users.
    step_ms, host_ms: median milliseconds of a call by OneDiff and by the host; None without times.
    ratio: host_ms / step_ms, the speedup; None until both have enough times.
    bytes: GPU memory that dropping this graph alone would free; 0 without a graph.
    uses: the number of calls.
    needs: bytes that its graph takes of the memory that graphs share.
    last_used: time.time() of the last call.
    relative_error: against the host's own output; None if it was not compared.
    label: see core.call.Call.label.
    part: the pass of a network that a step policy has cut; "" for the whole network.
    backend: the backend's name; "" if unknown.
    lossy: words for what it computes lossily; see core.key.Lossy.
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

    state: of the best shape.
    reason: why it is not faster, from the most recently used shape that has a reason, even if another shape is ready;
        "" for none.
    images: the number of images that this process has made here.
    uses: the number of calls, also by earlier processes if this one made none.
    prewarm_s: seconds of its last pre-warm; None if there was none.
    saved_s: seconds by which pre-warming has shortened the first image; None if unknown.
    step_ms, host_ms, ratio: means over all steps of the last image that OneDiff has made here, with cached and
        extrapolated ones; before the first image, those of the most used shape.
    bytes: GPU memory that purging this row would free. It is not the sum over the shapes, and rows do not add up,
        because graphs overlap in one memory pool, which shrinks only when its largest graph is removed.
    needs: bytes that its largest graph takes of that pool.
    shapes: the most recently used first. The VAE's shapes come last, in the row of each model with their resolution,
        and do not count in the other fields.
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
        """Whether only the VAE has used this resolution, as for the tiles of a tiled decode."""
        return bool(self.shapes) and not any(shape.tokens for shape in self.shapes)


def rows_of(
    entries: Iterable[Entry], history: Iterable[HistoryRow] = (), pins: Collection[Name] = (),
    gives_back: GivesBack = lambda keys: 0,
    parts: Mapping[Any, ImagePart] = MappingProxyType({}), images: Mapping[Any, int] = MappingProxyType({}),
) -> list[ResolutionRow]:
    """One row for each model and resolution in the entries and the history. Rows, and shapes in a row, are sorted with
    the most recently used first.

    history: rows of earlier processes, used for resolutions without an entry. pins: the pinned (model, resolution)
    pairs. gives_back: returns the bytes that dropping the graphs of some shapes would free. parts, images: by (model,
    resolution), the steps of the last image and the number of images; see CallStats.
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
    """Entries, or rows of the history, in groups of the same name(). The groups, and the members of a group, are sorted
    with the most recently used first."""
    groups: dict[Name, list[Any]] = {}
    for one in sorted(found, key=lambda one: -one.last_used):
        groups.setdefault(name(one), []).append(one)
    return groups


def with_decodes_below(rows: list[ResolutionRow]) -> list[ResolutionRow]:
    """The rows, with the VAE's shapes appended to the rows of all models with the same resolution. A row of the VAE
    stays if no model has used its resolution."""
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
    """The row of one model and resolution. entries: its shapes, at least one, the most recently used first. part: the
    steps of the last image here, whose times the row gets; None: the times are those of usual_shape()."""
    state = min((entry.state for entry in entries), key=BEST_FIRST.index).value
    shapes = tuple(shape_row(entry, pinned, gives_back({entry.key})) for entry in entries)
    row = row_of((entries[0].model, entries[0].key.resolution), state, shapes)
    if part is not None:
        row = replace(row, step_ms=part.step_ms, host_ms=part.host_ms, ratio=part.ratio)
    return replace(row, bytes=gives_back({entry.key for entry in entries}))


def usual_shape(shapes: tuple[ShapeRow, ...]) -> ShapeRow:
    """The most used of the shapes that have times and are no cached passes; the most used of all if there is none."""
    timed = [shape for shape in shapes if shape.step_ms is not None and shape.part != CACHED]
    return max(timed or shapes, key=lambda shape: (shape.uses, shape.batch, shape.last_used))


def row_of(name: Name, state: str, shapes: tuple[ShapeRow, ...]) -> ResolutionRow:
    """A row with these shapes, at least one, the most recently used first. Its times are those of usual_shape()."""
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
    """A ShapeRow of an entry. gives_back: bytes of GPU memory that dropping its graph alone would free."""
    key = entry.key
    return ShapeRow(
        batch=key.batch, tokens=key.tokens, dtype=str(key.dtype).removeprefix("torch."), state=entry.state.value,
        reason=entry.reason or entry.no_graph or entry.waits, step_ms=entry.own.median_ms,
        host_ms=entry.host.median_ms, ratio=entry.ratio, bytes=gives_back, uses=entry.uses,
        last_used=entry.last_used, relative_error=entry.relative_error, label=key.label, needs=entry.needs,
        pinned=pinned, part=key.part, backend=key.backend, lossy=str(key.lossy),
    )
