"""A WebUI as an HTTP client sees it."""
from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy
import requests
from PIL import Image

PICTURE = {
    "prompt": "a red fox in the snow", "seed": 7, "steps": 3, "width": 64, "height": 64, "sampler_name": "Euler a",
}
SECONDS_FOR_A_PICTURE = 600
# The defaults of the options that tests change. A1111's API does not list an option before it is saved, and Forge's
# lists none of an extension.
OPTION_DEFAULTS = {
    "onediff_enabled": True, "onediff_backend": "auto", "onediff_prewarm": "",
    "onediff_deepcache_interval": 1, "onediff_deepcache_depth": 1, "onediff_transformer_interval": 0,
    "onediff_vae_precision": "auto", "onediff_skip_negative_after": 0,
    "live_previews_enable": True, "show_progress_every_n_steps": 10, "show_progress_type": "Approx NN",
    "hypertile_enable_unet": False, "hypertile_swap_size_unet": 3, "hypertile_max_tile_unet": 256,
    "token_merging_ratio": 0, "lora_functional": False, "sd_vae": "Automatic", "forge_additional_modules": [],
    "sd_noise_schedule": "Default", "refiner_use_steps": False, "cross_attention_optimization": "Automatic",
}


class WebUI:
    """One running WebUI at url."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.kind = kind_of(self.url)

    @property
    def is_neo(self) -> bool:
        """Whether this is Forge Neo, which lacks Forge's route for Real-ESRGAN models."""
        return self.kind == "forge" and not self.has("/sdapi/v1/realesrgan-models")

    @property
    def is_standalone(self) -> bool:
        """Whether this is the demo, this project's own small WebUI."""
        return self.kind == "standalone"

    def get(self, path: str, seconds: float = 300) -> Any:
        answer = requests.get(self.url + path, timeout=seconds)
        answer.raise_for_status()
        return answer.json()

    def post(self, path: str, body: Any = None) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=SECONDS_FOR_A_PICTURE)

    def has(self, path: str) -> bool:
        """Whether a GET of this path succeeds."""
        return requests.get(self.url + path, timeout=300).status_code == 200

    # --- pictures -------------------------------------------------------------------------------------------------

    def make(self, request: dict[str, Any]) -> Pictures:
        """The images of a request: by img2img if it has images to start from, otherwise by txt2img."""
        kind = "img2img" if "init_images" in request else "txt2img"
        return Pictures(self.post(f"/sdapi/v1/{kind}", request))

    def txt2img(self, **changes: Any) -> Pictures:
        return self.make({**PICTURE, **changes})

    # --- options --------------------------------------------------------------------------------------------------

    def set_options(self, **options: Any) -> None:
        answer = self.post("/sdapi/v1/options", options)
        assert answer.status_code == 200, answer.text[:500]

    @contextlib.contextmanager
    def options(self, **options: Any) -> Iterator[None]:
        """A context in which options are set, as the settings tab saves them. Their earlier values come back at the
        end."""
        now = {**OPTION_DEFAULTS, **self.get("/sdapi/v1/options")}
        before = {name: now[name] for name in options}
        self.set_options(**options)
        try:
            yield
        finally:
            self.set_options(**before)

    # --- OneDiff --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        return self.get("/onediff/v1/status")

    def calls(self) -> dict[str, int]:
        """The number of UNet calls since the start, by route."""
        return self.status()["calls"]


def kind_of(url: str) -> str:
    """Which WebUI answers at url, by routes that only one has, independent of the extension's own answer."""
    has = lambda route: requests.get(url + route, timeout=60).status_code == 200  # noqa: E731
    if has("/sdapi/v1/sd-modules"):
        return "forge"
    if not has("/sdapi/v1/sd-vae"):
        return "standalone"
    # reForge takes A1111's routes and ComfyUI's flags.
    flags = requests.get(url + "/sdapi/v1/cmd-flags", timeout=60).text
    return "ldm_patched" if '"always_offload_from_vram"' in flags else "a1111"


class Pictures:
    """The images and infotexts of a generation; raises AssertionError if the answer is an error."""

    def __init__(self, answer: requests.Response) -> None:
        assert answer.status_code == 200, answer.text[:500]
        body = answer.json()
        self.images = [Image.open(io.BytesIO(base64.b64decode(text))) for text in body["images"]]
        self.info = json.loads(body["info"])

    @property
    def image(self) -> Image.Image:
        return self.images[0]

    @property
    def arrays(self) -> list[numpy.ndarray]:
        """Each image as a (height, width, 3) array of integers from 0 to 255, in a type wide enough for differences."""
        return [numpy.asarray(image.convert("RGB"), dtype=numpy.int16) for image in self.images]

    @property
    def pixels(self) -> numpy.ndarray:
        """The images as one (images, height, width, 3) array; they must have the same size."""
        return numpy.stack(self.arrays)


def one_run(**options: Any) -> dict[str, Any]:
    """The request field that sets OneDiff's options for one generation."""
    return {"alwayson_scripts": {"OneDiff": {"args": [options]}}}


def start_from(image: Image.Image) -> dict[str, Any]:
    """The request fields of img2img."""
    return {"init_images": [encode(image)], "denoising_strength": 0.6, "steps": 5}


def largest_difference(one: Pictures, other: Pictures) -> int:
    """The largest difference of pixels, of 255, over all images. The numbers and sizes of the images must be equal."""
    assert [image.size for image in one.images] == [image.size for image in other.images]
    pairs = zip(one.arrays, other.arrays, strict=True)
    return max(int(numpy.abs(mine - yours).max()) for mine, yours in pairs)


def encode(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def gradient(width: int, height: int) -> Image.Image:
    """A colourful image to start from."""
    across = numpy.linspace(0, 255, width)[None, :].repeat(height, 0)
    down = numpy.linspace(0, 255, height)[:, None].repeat(width, 1)
    return Image.fromarray(numpy.stack([across, down, 255 - across], axis=-1).astype(numpy.uint8))
