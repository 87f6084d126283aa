"""The REST API's request bodies and answers: JSON that any client can read, and one sentence for an error.

The bodies work with pydantic 1 and 2. They are strict: neither true nor "1" is accepted as a number.
"""
from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, StrictBool, conint, constr
from starlette.exceptions import HTTPException

from ..core.logs import readable
from ..core.refusal import NotKept
from ..core.sizes import TOKEN_CHOICES, TOKENS

# The most characters of a model's name, and of the sizes to pre-warm.
LONGEST_NAME = 200
LONGEST_SIZES = 4000
# The default and the largest value of the field `wait`.
SECONDS_TO_WAIT = 30
MOST_SECONDS_TO_WAIT = 600
LARGEST_NUMBER = 2**31 - 1

# The types of fields. Strict: no other type is converted.
Resolution = constr(strict=True, min_length=1, max_length=20)
ModelName = constr(strict=True, min_length=1, max_length=LONGEST_NAME)
SizesText = constr(strict=True, min_length=1, max_length=LONGEST_SIZES)
Whole = conint(strict=True, ge=1, le=LARGEST_NUMBER)
Seconds = conint(strict=True, ge=1, le=MOST_SECONDS_TO_WAIT)
WAIT = (
    f"How many seconds to wait for an image in progress, 1 to {MOST_SECONDS_TO_WAIT}; after them, nothing is done, "
    "and the answer is 409."
)
# pydantic 2 adds these to the path of an error if a field has several types.
KINDS = ("constrained-", "list[", "str", "nullable[")
NO_TEXT = "The request body is not usable: it is no UTF-8 text."
log = logging.getLogger("onediff")


class Body(BaseModel, extra="forbid"):
    """A request body; fields that it does not define are refused."""


class PrewarmBody(Body):
    """The sizes to pre-warm: their graphs are made before an image needs them."""

    sizes: SizesText = Field(..., description='Such as "1024x1024, 832x1216 x2"; x2: two images at once.')
    tokens: Whole = Field(
        TOKENS, description=f"The length of prompts, one of {TOKEN_CHOICES}: 77 for each begun 75 tokens."
    )
    order: Literal["first", "last"] = Field(
        "last", description="first: before the sizes that already wait; last: after them."
    )


class PurgeBody(Body):
    """What to purge, exactly one of: resolutions (of all models, or of one), a model, the disk, or all."""

    resolutions: list[Resolution] | None = Field(None, description='Such as ["512x512"], as GET shapes names them.')
    model: ModelName | None = Field(None, description="As GET shapes names it; alone: all its resolutions.")
    disk: StrictBool = Field(False, description="Everything on the disk but pins; graphs in memory stay.")
    all: StrictBool = Field(False, description="Every resolution of every model, and the disk (but pins).")
    wait: Seconds = Field(default=SECONDS_TO_WAIT, description=WAIT)


class PinBody(Body):
    """A resolution to pin: its graphs stay when another model needs memory. The pin is remembered after a restart, when
    its graphs are captured anew."""

    resolution: Resolution = Field(..., description='Such as "512x512", as GET shapes names it.')
    model: ModelName = Field(..., description="As GET shapes names it.")
    pinned: StrictBool = Field(True, description="false: unpin it.")


class ReleaseBody(Body):
    """The optional body of a request to free GPU memory: how long to wait for an image in progress."""

    wait: Seconds = Field(default=SECONDS_TO_WAIT, description=WAIT)


class SentenceRoute(APIRoute):
    """A FastAPI route (its route class) that answers every error with {"detail": one sentence}, the same in every
    WebUI: HTTPException with its own status, sentence and headers, a body that does not fit its model with 422, and
    NotKept (the disk has refused a change) with 507 and its sentence. Any other exception is a fault of ours, which is
    logged; the answer is 500, and does not quote it.

    The WebUIs' own error handlers fail for values that are not valid JSON (NaN, half a surrogate pair) and drop
    headers.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler of the route, whose exceptions become answers. Called by FastAPI for each new route."""
        handle = super().get_route_handler()

        async def handle_with_sentences(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return refusal(422, sentence_of(error))
            except HTTPException as error:
                is_text = not isinstance(error.__cause__, UnicodeDecodeError)
                return refusal(error.status_code, str(error.detail) if is_text else NO_TEXT, error.headers)
            except NotKept as problem:
                return refusal(507, str(problem))
            except Exception:
                log.exception("A fault of OneDiff in %s, please report it.", self.path)
                return refusal(500, "A fault of OneDiff, please report it; the WebUI's console shows more.")

        return handle_with_sentences


def json_answer(content: Any, status: int = 200) -> Response:
    """A response with plain values as JSON. Numbers that JSON lacks (NaN, infinity) become null. Faster than FastAPI's
    own conversion, which would validate the values."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return Response(json.dumps(finite), status, media_type="application/json")


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """A response with an HTTP status for an error, and {"detail": sentence}. The sentence may quote text from a client:
    a long one is cut, and unprintable characters become "?" (core.logs.readable)."""
    answer = json_answer({"detail": readable(sentence)}, status)
    answer.headers.update(headers or {})
    return answer


def sentence_of(error: RequestValidationError) -> str:
    """One sentence for a request body that does not fit its model, such as "sizes: ...". Of several errors, it tells
    the one with the longest path: a field that takes a list or null has an error for each of these types. If no field
    is at fault, for example if the body is no JSON, the sentence begins with "The request body is not usable"."""
    path: list[Any] = []
    message = ""
    for found in error.errors():
        names = [name for name in found["loc"][1:] if not str(name).startswith(KINDS)]
        if not message or len(names) > len(path):
            path = names
            message = found["msg"]
    # If the JSON is cut off, the path is a number of letters.
    if not path or isinstance(path[0], int):
        return f"The request body is not usable: {message}."
    return f"{'.'.join(map(str, path))}: {message}."
