"""How the REST API answers: JSON that any client can read, and one sentence for whatever is wrong."""
from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException as StarletteHTTPException

from ..core.logs import one_line

LARGEST_BODY = 64 * 1024
# No request of ours comes near. Deeper ones would end what repeats or copies them, after the work is done.
DEEPEST_JSON = 50
LONGEST_SENTENCE = 300
# What pydantic 2 puts into the place of an error for a field that may be of several kinds.
KINDS = ("constrained-", "list[", "str", "nullable[")
log = logging.getLogger("onediff")


class BoundedRequest(Request):
    """A request whose body is read up to so many bytes, because it is read before anyone has shown a password."""

    largest_body = LARGEST_BODY

    async def body(self) -> bytes:
        """The whole body. Raises HTTPException 413."""
        if not hasattr(self, "_body"):
            body = bytearray()
            async for chunk in self.stream():
                body += chunk
                if len(body) > self.largest_body:
                    raise HTTPException(413, f"The request body is larger than {self.largest_body} bytes.")
            self._body = bytes(body)
        return self._body

    async def json(self) -> Any:
        """The body's values. Raises HTTPException 400 where they lie in each other without end."""
        try:
            values = await super().json()
        except RecursionError:
            values = None
        else:
            if not is_deeper(values, DEEPEST_JSON):
                return values
        raise HTTPException(400, f"The request body is nested more than {DEEPEST_JSON} deep.")


def is_deeper(values: Any, limit: int) -> bool:
    """Whether lists and mappings lie in each other more than so deep."""
    level = [values]
    for _ in range(limit):
        parts = [value for value in level if isinstance(value, (dict, list))]
        if not parts:
            return False
        level = [inner for part in parts for inner in (part.values() if isinstance(part, dict) else part)]
    return any(isinstance(value, (dict, list)) for value in level)


class SentenceRoute(APIRoute):
    """A route that answers everything that is wrong with {"detail": one sentence}, the same in every WebUI.

    Their own handlers fail over values that are no JSON (NaN, half a surrogate pair) and drop headers.
    """

    request_class = BoundedRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_sentences(request: Request) -> Response:
            try:
                return await handle(self.request_class(request.scope, request.receive))
            except RequestValidationError as error:
                return refusal(422, sentence_of(error))
            except StarletteHTTPException as error:
                return refusal(error.status_code, str(error.detail), error.headers)
            except Exception:
                log.exception("a fault of ours in %s", self.path)
                return refusal(500, "A fault of OneDiff, please report it; the WebUI's console shows more.")

        return handle_with_sentences


def json_answer(content: Any, status: int = 200) -> Response:
    """Plain values as JSON; numbers that JSON lacks (NaN, infinity) become null. Fast: no model looks at them."""
    return Response(json.dumps(finite(content), allow_nan=False), status, media_type="application/json")


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """{"detail": sentence}."""
    answer = json_answer({"detail": readable(sentence)}, status)
    answer.headers.update(headers or {})
    return answer


def finite(content: Any) -> Any:
    """The same values, with None for every number that is not finite."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [finite(value) for value in content]
    return content


def readable(sentence: str) -> str:
    """A sentence on one line and of bearable length, whatever a client wrote into it."""
    shown = one_line(sentence)
    return shown if len(shown) <= LONGEST_SENTENCE else f"{shown[:LONGEST_SENTENCE]}..."


def sentence_of(error: RequestValidationError) -> str:
    """The most precise of what is wrong with a request."""
    places = [
        ([part for part in found["loc"][1:] if not str(part).startswith(KINDS)], found["msg"])
        for found in error.errors()
    ]
    place, message = max(places, key=lambda found: len(found[0]))
    # Where JSON ends early, the place is a number of letters.
    if not place or isinstance(place[0], int):
        return f"The request body is not usable: {message}."
    return f"{'.'.join(map(str, place))}: {message}."
