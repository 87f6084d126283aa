"""The REST API and requests that nobody means well with: always one sentence, never a fault."""
from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from api_builders import Api, command_line, remember
from fastapi import FastAPI
from fastapi.testclient import TestClient

from lib_onediff.api import answers, models
from lib_onediff.runtime.runtime import runtime

JSON = {"Content-Type": "application/json"}
PATHS = ("prewarm", "purge", "pin", "release")
NUMBERS = [
    "true", "false", "1.0", "64.5", '"64"', "NaN", "Infinity", "-Infinity", "1e400", "-1", "0", "9" * 4000, "9" * 5000,
    "[]", "{}", "null", "-0",
]
WHOLE_BODIES = [
    b"", b"null", b"[]", b'"x"', b"1", b"NaN", b"{", b'{"sizes":', b"\xff\xfe", b'{"\xff": 1}', b"\x00", b"{} {}",
    b'{"sizes": ' + b"[" * 600 + b"]" * 600 + b"}", b"[" * 30_000, b'{"sizes":' * 6_000,
    b'{"sizes": "\\ud800"}', b'{"\\ud800": 1}', b'{"sizes": [{"\\udfff": 1}]}',
    b'{"model": "\\ud800", "resolution": "\\ud800"}', b'{"resolutions": ["\\ud800"]}', b'{"__class__": 1}',
    b'{"sizes": "64x64", "sizes": NaN}', b"sizes=64x64",
]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    remember(tmp_path, [("512x512", "SD1")])
    made = Api()
    with made.webui.lock:
        yield made
        made.warmup.stop()


def refused(api: Api, path: str, body: bytes, content_type: str | None = "application/json") -> str:
    """The sentence with which a body is refused; nothing has happened."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    answer = api.client.post(f"/onediff/v1/{path}", content=body, headers=headers)
    assert 400 <= answer.status_code < 500, (answer.status_code, path, body[:80])
    told = answer.json()
    assert set(told) == {"detail"} and told["detail"].isprintable(), (told, path, body[:80])
    assert len(told["detail"]) <= answers.LONGEST_SENTENCE + 3, (path, body[:80])
    assert not api.warmup.jobs() and [row.resolution for row in runtime.rows()] == ["512x512"], (path, body[:80])
    return told["detail"]


def test_what_is_no_number(api: Api) -> None:
    for number in NUMBERS:
        batch = "" if number == "null" else ', "batch": 1'
        for body in (
            f'{{"sizes": [{{"width": {number}, "height": 64{batch}}}]}}', f'{{"sizes": "64x64", "tokens": {number}}}',
            f'{{"sizes": [{{"width": 64, "height": 64, "batch": {number}}}]}}',
        ):
            refused(api, "prewarm", body.encode())
        refused(api, "purge", f'{{"all": true, "wait": {number}}}'.encode())
        refused(api, "release", f'{{"wait": {number}}}'.encode())


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", "application/x-www-form-urlencoded", None])
def test_what_is_no_request(api: Api, content_type: str | None) -> None:
    for body in WHOLE_BODIES:
        for path in PATHS[:3]:
            refused(api, path, body, content_type)
        if body not in (b"", b"null"):  # All that release takes is how long to wait.
            refused(api, "release", body, content_type)


NO_SIZES: list[Any] = [
    "", " ", ",", "0x0", "63x64", "100x100", "8192x8192", "64", "64x64x", "64x64 x65", "64x64; rm -rf /", "../../etc",
    "64x64\u0000", "６４x６４", "1e3x64", "-64x64", ", ".join(f"{64 + 8 * step}x64" for step in range(101)), "x" * 4001,
    "\u202e64x64",
    [], [{}], [{"width": 64}], ["64x64"], [[64, 64]], [{"width": 64, "height": 64, "depth": 1}], 5, None, {"64x64": 1},
    [{"width": 64, "height": 64}] * 101, [{"width": 65, "height": 64}], [{"width": 2**31 - 8, "height": 64}],
]


def test_what_is_no_size(api: Api) -> None:
    for sizes in NO_SIZES:
        refused(api, "prewarm", json.dumps({"sizes": sizes}).encode())


@pytest.mark.parametrize("more", [
    {"tokens": 76}, {"tokens": 78}, {"tokens": 77 * 100}, {"order": "middle"}, {"order": None}, {"order": ["first"]},
    {"source": "settings"}, {"path": "/etc/passwd"}, {"tokens": None},
])
def test_what_else_no_job_takes(api: Api, more: dict[str, Any]) -> None:
    refused(api, "prewarm", json.dumps({"sizes": "64x64", **more}).encode())


def test_sentences_name_the_place(api: Api) -> None:
    ask = lambda path, body: refused(api, path, json.dumps(body).encode())  # noqa: E731
    assert "100x100: the width must be a multiple of 8" in ask("prewarm", {"sizes": "100x100"})
    assert "100x100: the width must be a multiple of 8" in ask("prewarm", {"sizes": [{"width": 100, "height": 100}]})
    assert ask("prewarm", {"sizes": [{"width": 64, "height": 64}, {"width": 64, "height": "x"}]}).startswith(
        "sizes.1.height: "
    )
    assert ask("prewarm", {"sizes": "64x64", "tokens": 100}) == "A prompt takes 77, 154 or 231 tokens, not 100."
    assert ask("pin", {"resolution": "512x512"}).startswith("model: ")
    assert ask("purge", {"everything": True}).startswith("everything: ")
    assert ask("purge", {}).startswith("Say what to purge")


def test_large_bodies_are_not_read(api: Api) -> None:
    pieces_read = 0

    def pieces() -> Iterator[bytes]:
        nonlocal pieces_read
        for _ in range(1000):
            pieces_read += 1
            yield b" " * answers.LARGEST_BODY

    answer = api.client.post("/onediff/v1/release", content=pieces(), headers=JSON)
    assert answer.status_code == 413
    assert "larger than" in refused(api, "prewarm", b" " * (answers.LARGEST_BODY + 1))
    largest = json.dumps({"wait": 1}).encode().ljust(answers.LARGEST_BODY)
    assert api.client.post("/onediff/v1/release", content=largest, headers=JSON).status_code == 409


def test_what_is_no_json_becomes_null() -> None:
    """Numbers that JSON lacks, and halves of surrogate pairs, in what the runtime itself says."""
    odd = {"ratio": float("inf"), "reason": "half \ud800", 3: [float("nan"), (1.5, None, True)]}
    api = Api()
    app = FastAPI()
    from lib_onediff.api import routes as rest

    rest.add_routes(app, command_line(), runtime, api.warmup, api.webui, lambda: odd, str)
    answer = TestClient(app).get("/onediff/v1/status")
    assert answer.status_code == 200
    said = {"ratio": None, "reason": "half \ud800", "3": [None, [1.5, None, True]]}
    assert answer.json() == {**said, "ready": True, "ready_reason": ""}


def test_a_fault_of_ours_is_one_sentence_and_in_the_log(
    api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Any]:
        raise RuntimeError("secret")

    monkeypatch.setattr(api.warmup, "jobs", broken)
    app = FastAPI()
    from lib_onediff.api import routes as rest

    rest.add_routes(app, command_line(), runtime, api.warmup, api.webui, dict, str)
    answer = TestClient(app, raise_server_exceptions=False).get("/onediff/v1/jobs")
    assert answer.status_code == 500 and set(answer.json()) == {"detail"} and "secret" not in answer.text
    assert "secret" in caplog.text


def test_a_working_request_is_taken_as_it_is_meant(api: Api) -> None:
    """So that the refusals above are not for another reason."""
    body = {"sizes": [{"width": 64, "height": 64, "batch": 1}], "tokens": 77, "order": "first"}
    assert models.PrewarmBody(**body).tokens == 77
    assert api.client.post("/onediff/v1/prewarm", json=body).status_code == 202
    assert api.client.post("/onediff/v1/release", json={"wait": 1}).status_code == 409  # The lock is held: a picture.
