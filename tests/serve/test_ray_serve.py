"""Two replicas of Ray Serve behind HTTP, on a CPU with the demo's model: a killed replica, warming up, refusals, and
the end of the service."""
from __future__ import annotations

import collections
import io
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
from PIL import Image

pytest.importorskip("ray", reason="Ray is not installed; see .ci/nightly")

from ray import serve
from serve_model import LOADING_SECONDS, Load

from lib_onediff.serving.ray_serve import Config, Limits, app, build, end

SIZES = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128), (96, 96)]
REQUESTS = 200
CLIENTS = 24
KILLED_AFTER = 60
WARM = ", ".join(f"{width}x{height}" for width, height in SIZES)
SECONDS = 300


class Made(NamedTuple):
    """An image that was begun."""

    pid: int
    seed: int
    width: int
    height: int


class Service:
    """Two replicas that answer at url."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._file = folder / "made"

    def start(self, **changes: Any) -> None:
        config = Config(replicas=2, gpus=0, options={"backend": "eager"}, **{"sizes": WARM, **changes})
        serve.run(build(config, Load(self._file)), name="default")

    def ready(self) -> requests.Response:
        return requests.get(f"{self.url}/ready", timeout=30)

    def wait_until_ready(self, replicas: int) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while True:
            answer = self.ready()
            if answer.status_code == 200 and answer.json()["replicas"] >= replicas:
                said: dict[str, Any] = answer.json()
                return said
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)

    def ask(self, seed: int, size: tuple[int, int], /, **more: Any) -> requests.Response:
        body = {"prompt": f"fox {seed}", "width": size[0], "height": size[1], "steps": 3, "seed": seed, **more}
        return requests.post(f"{self.url}/image", json=body, timeout=SECONDS)

    def made(self) -> list[Made]:
        """The images that were begun, without those of the warm-up, whose seed is 0."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return [made for line in lines if (made := Made(*map(int, line.split()))).seed]

    def warmed(self) -> collections.Counter[int]:
        """How many sizes each process has made ready, by process id."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return collections.Counter(int(pid) for pid, seed, *_ in map(str.split, lines) if seed == "0")


@pytest.fixture
def service(url: str, tmp_path: Path) -> Iterator[Service]:
    yield Service(url, tmp_path)
    serve.delete("default")


def size_of(answer: requests.Response) -> tuple[int, int]:
    assert answer.status_code == 200, answer.text
    size: tuple[int, int] = Image.open(io.BytesIO(answer.content)).size
    return size


def test_every_request_gets_its_own_image_though_a_replica_is_killed(service: Service) -> None:
    """After 60 of 200 answers, the replica that most recently began an image is killed. The other replica makes this
    image again, equal to the bit, and a new replica takes the place of the killed one."""
    service.start(limits=Limits(waiting=REQUESTS))
    service.wait_until_ready(2)
    assert list(service.warmed().values()) == [len(SIZES)] * 2
    draw = random.Random(0)
    wanted = {seed: draw.choice(SIZES) for seed in range(1, REQUESTS + 1)}
    answers: dict[int, list[requests.Response]] = collections.defaultdict(list)
    killed: list[int] = []
    enough = threading.Event()

    def client(seed: int) -> None:
        answers[seed].append(service.ask(seed, wanted[seed]))
        if len(answers) >= KILLED_AFTER:
            enough.set()

    with ThreadPoolExecutor(CLIENTS) as clients:
        asked = [clients.submit(client, seed) for seed in wanted]
        assert enough.wait(SECONDS)
        # The replica that has begun an image last is most likely in the middle of it.
        killed.append(service.made()[-1].pid)
        os.kill(killed[0], signal.SIGKILL)
        for done in asked:
            done.result()
    assert set(answers) == set(wanted) and all(len(got) == 1 for got in answers.values())
    for seed, (answer,) in answers.items():
        assert size_of(answer) == wanted[seed] and answer.headers["X-OneDiff-Seed"] == str(seed)
    # Images differ by their seeds: no request got another's image.
    assert len({answer.content for (answer,) in answers.values()}) == REQUESTS
    made = service.made()
    assert {now.seed for now in made} == set(wanted)
    twice = [seed for seed, count in collections.Counter(now.seed for now in made).items() if count > 1]
    # At most the image that the replica was making, and the one whose answer was on its way.
    assert len(twice) <= 2 and len(made) == REQUESTS + len(twice)
    before = {now.pid for now in made}
    assert killed[0] in before
    status = service.wait_until_ready(2)
    assert status["answered"] == REQUESTS and status["waiting"] == 0
    # Either replica makes the same image for the same request.
    for seed in (1, 2, *twice):
        assert service.ask(seed, wanted[seed]).content == answers[seed][0].content


def test_the_service_is_ready_only_after_a_replica_has_warmed_up_every_size(service: Service) -> None:
    """Until then, /ready answers with 503, or with 404 before Ray Serve knows the application's routes."""
    began = time.monotonic()
    starting = threading.Thread(target=service.start)
    starting.start()
    answers: list[requests.Response] = []
    while not answers or answers[-1].status_code != 200:
        answers.append(service.ready())
        if answers[-1].status_code == 200:
            assert answers[-1].json()["ready"] is True and max(service.warmed().values()) == len(SIZES)
        assert time.monotonic() - began < SECONDS
        time.sleep(0.02)
    assert time.monotonic() - began > LOADING_SECONDS
    starting.join()
    # 404: Ray Serve does not know the application's routes yet.
    assert {answer.status_code for answer in answers[:-1]} <= {503, 404} and len(answers) > 1


def test_requests_beyond_the_limits_or_with_unknown_arguments_are_refused(service: Service) -> None:
    """They are refused with status 422. The limits are 5 steps and as many pixels as 96x96 has."""
    service.start(sizes="64x64", limits=Limits(pixels=96 * 96, steps=5))
    service.wait_until_ready(1)
    for changes, status in (
        ({"steps": 6}, 422), ({"width": 104, "height": 96}, 422), ({"width": 65}, 422), ({"step": 3}, 422),
        ({"steps": "many"}, 422), ({"seed": None}, 200), ({"guidance": 1.0}, 200),
    ):
        answer = service.ask(1, (64, 64), **changes)
        assert answer.status_code == status, (changes, answer.text)


def test_the_service_refuses_foreign_hosts_and_origins_and_invalid_bodies(service: Service) -> None:
    """403: another name in the Host header, or a request from a page of another site. 413: too large a body. 422: a
    content type other than JSON, JSON that is nested too deeply, or an unknown argument. Every refusal is JSON with a
    sentence."""
    service.start(sizes="64x64", allowed_hosts="images.example")
    service.wait_until_ready(1)
    small = {"width": 64, "height": 64, "steps": 3, "prompt": "a fox"}
    deep = b'{"prompt": ' + b"[" * 600 + b"]" * 600 + b"}"
    for status, headers, body in (
        (200, {"Host": "images.example:8000"}, small), (403, {"Host": "evil.example"}, small),
        (403, {"Origin": "http://evil.example"}, small), (403, {"Sec-Fetch-Site": "cross-site"}, small),
        (422, {"Sec-Fetch-Site": "same-origin", "Content-Type": "text/plain"}, small),
        (413, {}, {**small, "prompt": "a" * 70_000}), (422, {}, deep), (422, {}, {**small, "step": 3}),
    ):
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        answer = requests.post(f"{service.url}/image", data=sent, headers=headers, timeout=SECONDS)
        assert answer.status_code == status, (headers, answer.text[:200])
        assert status == 200 or set(answer.json()) == {"detail"}
    assert requests.get(f"{service.url}/ready", headers={"Host": "evil.example"}, timeout=30).status_code == 403


def test_the_end_of_the_service_waits_for_all_earlier_requests(service: Service) -> None:
    """end() is called with 24 requests in progress or waiting. All 24 get their images; a later request is refused."""
    service.start()
    service.wait_until_ready(2)
    with ThreadPoolExecutor(24) as clients:
        asked = [clients.submit(service.ask, seed, SIZES[seed % 6], steps=8) for seed in range(1, 25)]
        while len(service.made()) < 3:
            time.sleep(0.02)
        end()
        assert len(service.made()) == 24
        assert [size_of(answer.result()) for answer in asked] == [SIZES[seed % 6] for seed in range(1, 25)]
    assert service.ask(99, SIZES[0]).status_code in (404, 503)


def test_without_configured_sizes_a_replica_warms_up_those_in_the_cache_folder(
    service: Service, tmp_path: Path
) -> None:
    """An earlier service with the same cache folder has served two sizes."""
    service.start(sizes="64x64, 96x64", cache=str(tmp_path))
    service.wait_until_ready(2)
    serve.delete("default")
    before = service.warmed()
    service.start(sizes="", cache=str(tmp_path))
    service.wait_until_ready(2)
    assert list((service.warmed() - before).values()) == [2, 2]


def test_serve_run_takes_the_fields_of_config_as_arguments() -> None:
    """The command "serve run" passes arguments to app() as text. An unknown name raises ValueError with this name;
    pack, an argument of version 0.2.0, is ignored."""
    assert app({"model": "folder", "replicas": "2", "gpus": "0", "pack": "of 0.2.0"}) is not None
    with pytest.raises(ValueError, match="replica_count"):
        app({"replica_count": 2})
    with pytest.raises(ValueError, match="step"):
        Config(limits={"step": 3})
    assert Config(limits={"steps": 3}).limits == Limits(steps=3)
