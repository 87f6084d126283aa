"""What the REST API is sent. Written for pydantic 1 and 2 alike, and strict: neither true nor "1" is a number."""
from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, StrictBool, conint, constr

from ..core.sizes import TOKEN_CHOICES, TOKENS

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
