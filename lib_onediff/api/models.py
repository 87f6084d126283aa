"""The bodies of the REST API. Written for pydantic 1 and 2 alike, and strict: neither true nor "1" is a number."""
from __future__ import annotations

from typing import Any, Literal

from pydantic import VERSION, BaseModel, Field, StrictBool, conint, conlist, constr

from ..options.sizes import MOST_SIZES
from ..prewarm.job import TOKEN_CHOICES, TOKENS

MOST_RESOLUTIONS, LONGEST_NAME, LONGEST_SIZES = 1000, 200, 4000
SECONDS_TO_WAIT, MOST_SECONDS_TO_WAIT = 30, 600
LARGEST_NUMBER = 2**31 - 1
LENGTHS = ("min_items", "max_items") if VERSION.startswith("1.") else ("min_length", "max_length")


def a_list(kind: Any, least: int, most: int) -> Any:
    """The type of a list of so many; pydantic renamed the words for that."""
    lengths: dict[str, Any] = dict(zip(LENGTHS, (least, most), strict=True))
    return conlist(kind, **lengths)


Resolution = constr(strict=True, min_length=1, max_length=20)
ModelName = constr(strict=True, min_length=1, max_length=LONGEST_NAME)
SizesText = constr(strict=True, min_length=1, max_length=LONGEST_SIZES)
Whole = conint(strict=True, ge=1, le=LARGEST_NUMBER)
SomeResolutions = a_list(Resolution, 1, MOST_RESOLUTIONS)
Seconds = conint(strict=True, ge=1, le=MOST_SECONDS_TO_WAIT)
WAIT = f"How many seconds to wait for an image in progress, 1 to {MOST_SECONDS_TO_WAIT}; after them the answer is 409."


class Body(BaseModel, extra="forbid"):
    """A request; a field that it does not have is refused."""


class Answer(BaseModel, extra="allow"):
    """A response, as documented; the next version may say more."""


# --- requests ------------------------------------------------------------------------------------------------------


class SizeBody(Body):
    """One size in pixels; batch counts the images that are made at once."""

    width: Whole = Field(..., description="Pixels, a multiple of 8.")
    height: Whole = Field(..., description="Pixels, a multiple of 8.")
    batch: Whole = Field(1, description="Images at once.")


SomeSizes = a_list(SizeBody, 1, MOST_SIZES)


class PrewarmBody(Body):
    """What to make ready."""

    sizes: SizesText | SomeSizes = Field(
        ..., description='"1024x1024, 832x1216 x2" (x2: two images at once), or a list of objects.',
    )
    tokens: Whole = Field(TOKENS, description=f"The length of prompts, one of {TOKEN_CHOICES}: 77 for each begun 75.")
    order: Literal["first", "last"] = Field("last", description="Before or behind the sizes that wait already.")


class PurgeBody(Body):
    """What to purge: one of resolutions (of all models, or of one model), model, disk and all."""

    resolutions: SomeResolutions | None = Field(None, description='Such as ["512x512"], as GET shapes names them.')
    model: ModelName | None = Field(None, description="As GET shapes names it; alone: every resolution of it.")
    disk: StrictBool = Field(False, description="What is kept on the disk; graphs in memory live on.")
    all: StrictBool = Field(False, description="Every resolution of every model, and the disk.")
    wait: Seconds = Field(default=SECONDS_TO_WAIT, description=WAIT)


class PinBody(Body):
    """A pinned resolution keeps its graphs when memory runs short, also after a restart."""

    resolution: Resolution = Field(..., description='Such as "512x512", as GET shapes names it.')
    model: ModelName = Field(..., description="As GET shapes names it.")
    pinned: StrictBool = Field(True, description="false: no longer pinned.")


class ReleaseBody(Body):
    """How long to wait."""

    wait: Seconds = Field(default=SECONDS_TO_WAIT, description=WAIT)


# --- answers -------------------------------------------------------------------------------------------------------


class TimesAnswer(Answer):
    """How long steps take; null where that is not known."""

    step_ms: float | None = Field(None, description="Milliseconds of a step with OneDiff; of a shape, its own calls'.")
    host_ms: float | None = Field(None, description="The same with the WebUI's own UNet.")
    ratio: float | None = Field(None, description="How many times as fast as the WebUI's own.")
    ratio_range: tuple[float, float] | None = Field(None, description="Between what the spread of the times puts it.")


class ShapeAnswer(TimesAnswer):
    """One kind of UNet call at a resolution; a decode of the VAE has 0 tokens."""

    batch: int = Field(..., description="Latents in one call: twice the images where guidance is batched.")
    tokens: int
    dtype: str
    state: str
    reason: str = Field(..., description="Why the state is not a better one.")
    bytes: int = Field(..., description="GPU memory.")
    uses: int
    last_used: float = Field(..., description="Seconds since 1970.")
    relative_error: float | None = Field(None, description="Distance from the WebUI's own output.")
    control: bool = Field(..., description="Whether a ControlNet or an adapter adds to the call.")
    part: str = Field("", description="Pass of DeepCache: full or cached; empty without DeepCache.")
    backend: str = Field("", description="Who computes it; empty where that is not known.")
    lossy: str = Field("", description='What of that is less exact: "8-bit"; empty where all is exact.')


class ResolutionAnswer(TimesAnswer):
    """One resolution of one model."""

    resolution: str
    model: str
    state: str = Field(
        ..., description='"cold", "proved", "ready", "failed", "on disk", "queued" or "warming 33 %".'
    )
    reason: str
    bytes: int = Field(..., description="GPU memory that purging this resolution alone gives back.")
    needs: int = Field(..., description="GPU memory that its graphs take of what all graphs share.")
    pinned: bool
    uses: int
    last_used: float = Field(..., description="Seconds since 1970.")
    shapes: list[ShapeAnswer]


class ClassAnswer(Answer):
    """A class of layers of the transformer blocks."""

    name: str
    kinds: str = Field(..., description='"fp8", "int8", or both; empty where it gains nothing at the last size.')
    error: float | None = Field(None, description="Of the step's output with this class alone in eight bits, relative.")
    is_used: bool = Field(..., description="Whether it is in eight bits.")


class LowBitAnswer(Answer):
    """What Low-bit does to a checkpoint, as was measured on it."""

    model: str
    budget: float = Field(..., description="The largest error that a step may have.")
    error: float | None = Field(None, description="Of the step with all classes that are used; null where none is.")
    classes: list[ClassAnswer]


class TotalsAnswer(Answer):
    """The sums over everything."""

    vram: int = Field(..., description="Bytes of GPU memory that all graphs hold.")
    budget: int = Field(..., description="Bytes of GPU memory that they may hold; 0 without a GPU.")
    disk: int = Field(..., description="Bytes on the disk.")
    calls: dict[str, int] = Field(..., description="UNet calls by route.")
    hit_rate: float | None = Field(None, description="The share of calls that a ready entry served.")
    low_bit: int = Field(0, description="Bytes of GPU memory of the weights in eight bits.")
    low_bit_layers: int = Field(0, description="How many layers have weights in eight bits.")
    offloaded: int = Field(0, description="Bytes of the computer's memory of the WebUI's weights that they stand for.")
    compiled: dict[str, dict[str, int]] = Field(
        {}, description="By a backend that compiles graphs of its own (oneflow): how many, and the most that may be."
    )
    low_bit_errors: list[LowBitAnswer] = Field([], description="As low_bit in GET status.")


class ShapesAnswer(Answer):
    """The last used resolution first."""

    rows: list[ResolutionAnswer]
    totals: TotalsAnswer


class JobAnswer(Answer):
    """One size that is made ready."""

    id: int
    size: str = Field(..., description='Such as "832x1216 x2".')
    width: int
    height: int
    batch: int
    tokens: int
    source: str = Field(..., description="Who asked.")
    state: str = Field(..., description='"queued", "running", "done", "failed" or "cancelled".')
    what: str = Field(..., description="What is being done now.")
    done: int = Field(..., description="UNet calls made so far, of total.")
    total: int
    share: float = Field(..., description="How much of the job is done, from 0 to 1.")
    seconds: float = Field(..., description="What the calls took so far.")
    estimated_seconds: float | None = Field(None, description="What is left, where that can be told.")
    reason: str = Field(..., description="Why it failed.")


class JobsAnswer(Answer):
    """The jobs that wait or run, in the queue's order, among the last that are over."""

    jobs: list[JobAnswer]


class PurgedAnswer(Answer):
    """What is gone."""

    vram: int = Field(..., description="Bytes of GPU memory that were given back.")
    disk: int = Field(..., description="Bytes of disk that were freed; 0 unless disk or all was asked for.")
    purged: list[dict[str, str]] = Field(..., description="The resolution and model of every row that is gone.")


class PinnedAnswer(Answer):
    """The row as it is now."""

    resolution: str
    model: str
    pinned: bool


class ReleasedAnswer(Answer):
    """What is free now."""

    vram: int = Field(..., description="Bytes of GPU memory that were given back.")


class StatusAnswer(TimesAnswer):
    """What the last UNet call was, by which route it went and why."""

    host: str = Field(..., description='"a1111", "forge" or "standalone".')
    hooks: int
    ready: bool = Field(..., description="Whether the checkpoint is loaded and no size waits to be made ready.")
    ready_reason: str = Field(..., description="What is waited for; empty where it is ready.")
    enabled: bool
    model: str | None = None
    backend: str
    lossy: str = Field("", description='What it computes less exactly: "8-bit"; empty where all is exact.')
    low_bit_layers: int = Field(0, description="How many layers have weights in eight bits.")
    resolution: str | None = None
    route: str | None = Field(None, description='"graph", "plain", "blocks" or "host".')
    reason: str
    served: bool = Field(True, description="Whether the loaded model's network is one that OneDiff serves.")
    image: dict[str, Any] = Field(
        {}, description="Of the last image: seconds, the WebUI's own for one like it, and UNet calls by kind.",
    )
    calls: dict[str, int] = Field(..., description="UNet calls by route.")
    vae: dict[str, Any] = Field(..., description="The same of the last decode.")
    hint: str = Field("", description="How to get the torch and the Triton that OneDiff's kernels lack; empty: none.")
    low_bit: list[LowBitAnswer] = Field([], description="What Low-bit was measured to do to the checkpoints in use.")


class Problem(BaseModel):
    """Why a request was refused, in one sentence."""

    detail: str
