"""How the REST API answers: JSON that any client can read, and one sentence for whatever is wrong."""
from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ..core.logs import readable

# What pydantic 2 puts into the place of an error for a field that may be of several kinds.
KINDS = ("constrained-", "list[", "str", "nullable[")
log = logging.getLogger("onediff")


class SentenceRoute(APIRoute):
    """A route that answers everything that is wrong with {"detail": one sentence}, the same in every WebUI.

    Their own handlers fail over values that are no JSON (NaN, half a surrogate pair) and drop headers.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_with_sentences(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as error:
                return refusal(422, sentence_of(error))
            except HTTPException as error:
                return refusal(error.status_code, str(error.detail), error.headers)
            except Exception:
                log.exception("a fault of ours in %s", self.path)
                return refusal(500, "A fault of OneDiff, please report it; the WebUI's console shows more.")

        return handle_with_sentences


def json_answer(content: Any, status: int = 200) -> Response:
    """Plain values as JSON; numbers that JSON lacks (NaN, infinity) become null. Fast: no model looks at them."""
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    return Response(json.dumps(finite), status, media_type="application/json")


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """{"detail": sentence}."""
    answer = json_answer({"detail": readable(sentence)}, status)
    answer.headers.update(headers or {})
    return answer


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
