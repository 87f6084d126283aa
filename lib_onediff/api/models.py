"""The bodies of the REST API. Written for pydantic 1 and 2 alike, and strict: neither true nor "1" is a number."""
from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, StrictBool, conint, constr

from ..core.sizes import TOKEN_CHOICES, TOKENS
from ..runtime.rows import ResolutionRow, Totals

LONGEST_NAME, LONGEST_SIZES = 200, 4000
SECONDS_TO_WAIT, MOST_SECONDS_TO_WAIT = 30, 600
LARGEST_NUMBER = 2**31 - 1

Resolution = constr(strict=True, min_length=1, max_length=20)
ModelName = constr(strict=True, min_length=1, max_length=LONGEST_NAME)
SizesText = constr(strict=True, min_length=1, max_length=LONGEST_SIZES)
Whole = conint(strict=True, ge=1, le=LARGEST_NUMBER)
Seconds = conint(strict=True, ge=1, le=MOST_SECONDS_TO_WAIT)
WAIT = f"How many seconds to wait for an image in progress, 1 to {MOST_SECONDS_TO_WAIT}; after them the answer is 409."


class Body(BaseModel, extra="forbid"):
    """A request; a field that it does not have is refused."""


class SizeBody(Body):
    """One size in pixels; batch counts the images that are made at once."""

    width: Whole = Field(..., description="Pixels, a multiple of 8.")
    height: Whole = Field(..., description="Pixels, a multiple of 8.")
    batch: Whole = Field(1, description="Images at once.")


class PrewarmBody(Body):
    """What to make ready."""

    sizes: SizesText | list[SizeBody] = Field(
        ..., description='"1024x1024, 832x1216 x2" (x2: two images at once), or a list of objects.',
    )
    tokens: Whole = Field(TOKENS, description=f"The length of prompts, one of {TOKEN_CHOICES}: 77 for each begun 75.")
    order: Literal["first", "last"] = Field("last", description="Before or behind the sizes that wait already.")


class PurgeBody(Body):
    """What to purge: one of resolutions (of all models, or of one model), model, disk and all."""

    resolutions: list[Resolution] | None = Field(None, description='Such as ["512x512"], as GET shapes names them.')
    model: ModelName | None = Field(None, description="As GET shapes names it; alone: every resolution of it.")
    disk: StrictBool = Field(False, description="What is kept on the disk; graphs in memory live on.")
    all: StrictBool = Field(False, description="Every resolution of every model, and the disk.")
    wait: Seconds = Field(default=SECONDS_TO_WAIT, description=WAIT)


class PinBody(Body):
    """A pinned resolution keeps its graphs when another model needs memory, also after a restart."""

    resolution: Resolution = Field(..., description='Such as "512x512", as GET shapes names it.')
    model: ModelName = Field(..., description="As GET shapes names it.")
    pinned: StrictBool = Field(True, description="false: no longer pinned.")


class ReleaseBody(Body):
    """How long to wait."""

    wait: Seconds = Field(default=SECONDS_TO_WAIT, description=WAIT)


# --- answers, as /docs show them --------------------------------------------------------------------------------------


class ShapesAnswer(BaseModel):
    """The last used resolution first."""

    rows: list[ResolutionRow]
    totals: Totals


class JobAnswer(BaseModel):
    """One size that is made ready. state: queued, running, done, failed or cancelled."""

    id: int
    size: str = Field(..., description='Such as "832x1216 x2".')
    width: int
    height: int
    batch: int
    tokens: int
    source: str = Field(..., description="Who asked.")
    state: str
    what: str = Field(..., description="What is being done now.")
    done: int = Field(..., description="UNet calls made so far, of total.")
    total: int
    share: float = Field(..., description="How much of the job is done, from 0 to 1.")
    seconds: float = Field(..., description="What the calls took so far.")
    reason: str = Field(..., description="Why it failed.")


class JobsAnswer(BaseModel):
    """The jobs that wait or run, in the queue's order, among the last that are over."""

    jobs: list[JobAnswer]


class PurgedAnswer(BaseModel):
    """What is gone."""

    vram: int = Field(..., description="Bytes of GPU memory that were given back.")
    disk: int = Field(..., description="Bytes of disk that were freed; 0 unless disk or all was asked for.")
    purged: list[dict[str, str]] = Field(..., description="The resolution and model of every row that is gone.")


class ReleasedAnswer(BaseModel):
    """What is free now."""

    vram: int = Field(..., description="Bytes of GPU memory that were given back.")


class StatusAnswer(BaseModel):
    """What the last UNet call was, by which route it went and why; the last decode in vae, the last image in image.

    More fields name what was on: each says what it is, and is empty where there is nothing to say.
    """

    host: str = Field(..., description='"a1111", "forge" or "standalone".')
    ready: bool = Field(..., description="Whether the checkpoint is loaded and no size waits to be made ready.")
    ready_reason: str = Field(..., description="What is waited for; empty where it is ready.")
    enabled: bool
    served: bool = Field(True, description="Whether the loaded model's network is one that OneDiff serves.")
    model: str | None = None
    resolution: str | None = None
    backend: str
    route: str | None = Field(None, description='"graph", "plain", "blocks" or "host".')
    reason: str
    lossy: str = Field("", description='What it computes less exactly: "8-bit"; empty where all is exact.')
    step_ms: float | None = Field(None, description="Milliseconds of a step with OneDiff; null where not known.")
    host_ms: float | None = Field(None, description="The same with the WebUI's own UNet.")
    ratio: float | None = Field(None, description="How many times as fast as the WebUI's own.")
    image: dict[str, Any] = Field(
        {}, description="Of the last image: seconds, the WebUI's own for one like it, and UNet calls by kind.",
    )
    calls: dict[str, int] = Field(..., description="UNet calls by route.")
    vae: dict[str, Any]
