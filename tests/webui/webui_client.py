"""A WebUI as a client over HTTP sees it."""
from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy
import requests
from PIL import Image

PICTURE = {
    "prompt": "a red fox in the snow", "seed": 7, "steps": 3, "width": 64, "height": 64, "sampler_name": "Euler a",
}
SECONDS_FOR_A_PICTURE = 180


class WebUI:
    """One running WebUI at url; is_standalone says whether it is this project's own small host."""

    def __init__(self, url: str, is_standalone: bool) -> None:
        self.url = url.rstrip("/")
        self.is_standalone = is_standalone

    def get(self, path: str) -> Any:
        answer = requests.get(self.url + path, timeout=30)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any = None) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=SECONDS_FOR_A_PICTURE)

    def txt2img(self, **changes: Any) -> Pictures:
        return Pictures(self.post("/sdapi/v1/txt2img", {**PICTURE, **changes}))

    def img2img(self, image: Image.Image, **changes: Any) -> Pictures:
        body = {**PICTURE, "init_images": [encode(image)], "denoising_strength": 0.6, "steps": 5, **changes}
        return Pictures(self.post("/sdapi/v1/img2img", body))

    def status(self) -> dict[str, Any]:
        return self.get("/onediff/v1/status")

    def calls(self) -> dict[str, int]:
        """How many UNet calls went by each route so far."""
        return self.status()["calls"]


class Pictures:
    """The answer to a generation; AssertionError when it is none."""

    def __init__(self, answer: requests.Response) -> None:
        assert answer.status_code == 200, answer.text[:500]
        body = answer.json()
        self.files = [base64.b64decode(text) for text in body["images"]]
        self.images = [Image.open(io.BytesIO(file)) for file in self.files]
        self.parameters = body["parameters"]
        self.info = json.loads(body["info"])

    @property
    def image(self) -> Image.Image:
        return self.images[0]

    @property
    def pixels(self) -> numpy.ndarray:
        """(pictures, height, width, 3) integers from 0 to 255, wide enough to subtract."""
        return numpy.stack([numpy.asarray(image.convert("RGB"), dtype=numpy.int16) for image in self.images])


def one_run(**options: Any) -> dict[str, Any]:
    """The request field that sets OneDiff's options for one generation."""
    return {"alwayson_scripts": {"OneDiff": {"args": [options]}}}


def largest_difference(one: Pictures, other: Pictures) -> int:
    return int(numpy.abs(one.pixels - other.pixels).max())


def encode(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def gradient(width: int, height: int) -> Image.Image:
    """A colourful picture to start from."""
    across = numpy.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = numpy.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(numpy.stack([across, down, 255 - across], axis=-1).astype(numpy.uint8))
