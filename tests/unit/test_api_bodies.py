"""Invalid and malicious requests to the REST API: each is refused in one sentence, and changes nothing. Values that
JSON lacks, and internal errors, in its answers."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import api_builders
from api_builders import Api, remember

from lib_onediff.core.logs import LONGEST_SENTENCE
from lib_onediff.runtime.runtime import runtime

WHOLE_BODIES = [
    b"", b"null", b"[]", b"NaN", b"{", b"\xff\xfe", b"\x00", b"{} {}", b"sizes=64x64", b'{"__class__": 1}',
    b'{"sizes": ' + b"[" * 600 + b"]" * 600 + b"}", b"[" * 30_000, b'{"sizes":' * 6_000,
    b'{"sizes": "\\ud800"}', b'{"\\ud800": 1}', b'{"model": "\\ud800", "resolution": "\\ud800"}',
    b'{"sizes": "64x64", "sizes": NaN}', b'{"sizes": "64x64", "tokens": ' + b"9" * 5000 + b"}",
    b'{"sizes": "64x64", "tokens": Infinity}', b'{"sizes": 1e400, "wait": 1.5}', b'{"all": {"": [{}]}, "wait": []}',
]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """The API of a WebUI that is making an image: a job that a request has queued wrongly would still be pending."""
    remember(tmp_path, [("512x512", "SD1")])
    made = Api()
    with made.webui.lock:
        yield made
        made.warmup.stop()


def refused(api: Api, path: str, body: bytes, content_type: str | None = "application/json") -> str:
    """Post a body that must be refused, with a status of 4xx, no job queued and no stored size deleted. Returns the
    sentence of the refusal."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = api.client.post(f"/onediff/v1/{path}", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, (answer.status_code, path, body[:80])
    content = answer.json()
    assert set(content) == {"detail"} and content["detail"].isprintable(), (content, path, body[:80])
    assert len(content["detail"]) <= LONGEST_SENTENCE + 3, (path, body[:80])
    assert not api.warmup.jobs() and [row.resolution for row in runtime.rows()] == ["512x512"], (path, body[:80])
    return content["detail"]


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
def test_invalid_requests_are_refused_in_one_sentence(api: Api, content_type: str | None) -> None:
    """Each body of WHOLE_BODIES is sent to each route that takes one; see refused()."""
    for body in WHOLE_BODIES:
        for path in ("prewarm", "purge", "pin"):
            refused(api, path, body, content_type)
        if body not in (b"", b"null"):  # For release, a body is optional.
            refused(api, "release", body, content_type)


@pytest.mark.parametrize("body", [b'{"sizes": "\xff"}', b"\xc3"])
def test_a_body_that_is_not_utf_8_is_refused_in_a_sentence_that_says_so(api: Api, body: bytes) -> None:
    for path in ("prewarm", "purge", "pin", "release"):
        answer = api.client.post(f"/onediff/v1/{path}", content=body, headers={"Content-Type": "application/json"})
        sentence = "The request body is not usable: it is no UTF-8 text."
        assert (answer.status_code, answer.json()) == (400, {"detail": sentence})


def test_numbers_that_json_lacks_are_answered_as_null(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinity and NaN become null, and a key that is a number becomes a string. Half of a surrogate pair, which UTF-8
    cannot encode, does not make the answer fail."""
    odd = {"ratio": float("inf"), "reason": "half \ud800", 3: [float("nan"), (1.5, None, True)]}
    monkeypatch.setattr(api_builders, "STATUS", odd)
    said = {"ratio": None, "reason": "half \ud800", "3": [None, [1.5, None, True]]}
    assert api.get("status") == {**said, "ready": True, "ready_reason": ""}


def test_an_internal_error_is_answered_in_one_sentence_and_logged(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the log has the exception's text, which may contain a path or a name. The answer has status 500."""

    def broken() -> list[Any]:
        raise RuntimeError("secret")

    monkeypatch.setattr(api.jobs, "jobs", broken)
    answer = api.get("jobs", 500)
    assert set(answer) == {"detail"} and "secret" not in str(answer) and "secret" in caplog.text
