"""A1111's option "FP8 weight": weights in float8 are ours, and as near to the host's images as its own roundings.

On a CPU the host then computes in bfloat16, and another order of the same sums makes another image: what another of
its attention functions makes of the same request is the yardstick.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from test_controlnet import ROUTES, controlled, controlnet  # noqa: F401
from test_loras import PROMPT, with_lora
from webui_client import PICTURE, WebUI, largest_difference
from webui_compare import Run, graphs_on_a_cpu, run, run_off, run_on
from webui_models import Models

OTHER_ATTENTION = "sdp - scaled dot product"
# Mean distances of 255: what no eye sees, and how much of the distance between with and without FP8 ours may be.
UNSEEN, SHARE_OF_FP8 = 0.5, 0.25
MOST_OF_ROUNDING = 1.5


def store(webui: WebUI, how: str) -> None:
    webui.set_options(fp8_storage=how)


@pytest.fixture
def a1111(webui: WebUI, sd15: Models) -> Iterator[WebUI]:
    """With the option off, after it was on: from then on the host holds the checkpoint's weights in half precision."""
    if webui.kind != "a1111":
        pytest.skip("this is A1111's: give its address with --webui URL")
    store(webui, "Enable")
    store(webui, "Disable")
    yield webui
    webui.set_options(fp8_storage="Disable", cache_fp16_weight=False)


@pytest.fixture(params=[False, True], ids=["", "cached"])
def fp8(request: pytest.FixtureRequest, a1111: WebUI) -> WebUI:
    """With the option on, and the weights for LoRAs cached in float16 or not."""
    a1111.set_options(cache_fp16_weight=request.param)
    store(a1111, "Enable")
    return a1111


def distance(one: Run, other: Run) -> float:
    """The mean of all differences between two runs' pixels, of 255. A ControlNet's map may come after the images."""
    pairs = zip(one.pictures.arrays, other.pictures.arrays, strict=False)
    return float(numpy.mean([numpy.abs(mine - yours).mean() for mine, yours in pairs]))


def rounding(webui: WebUI, request: dict[str, Any], off: Run) -> float:
    """How far the host's image is from that of another of its attention functions."""
    webui.set_options(cross_attention_optimization=OTHER_ATTENTION)
    try:
        return distance(run(webui, request, enabled=False), off)
    finally:
        webui.set_options(cross_attention_optimization="Automatic")


def assert_near(webui: WebUI, request: dict[str, Any], on: Run, off: Run) -> float:
    """That OneDiff's run is no farther from the host's than that; how far it is."""
    far = distance(on, off)
    assert far <= max(UNSEEN, MOST_OF_ROUNDING * rounding(webui, request, off))
    return far


@pytest.mark.parametrize(
    "changes", [{}, {"batch_size": 2, "width": 72, "height": 88}, {"prompt": "a " * 110}, {"sampler_name": "DDIM"}],
    ids=["", "batch", "long prompt", "DDIM"],
)
def test_images_are_the_hosts(a1111: WebUI, changes: dict[str, Any]) -> None:
    without = run_off(a1111, changes)
    store(a1111, "Enable")
    on, off = run_on(a1111, changes), run_off(a1111, changes)
    far = assert_near(a1111, changes, on, off)
    assert far < SHARE_OF_FP8 * distance(off, without), "the option changes no more than we do"


def test_switched_off_it_leaves_no_trace(a1111: WebUI) -> None:
    hosts, plain = run_off(a1111, {}), run_on(a1111, {})
    for _ in range(2):
        store(a1111, "Enable")
        assert largest_difference(run_on(a1111, {}).pictures, plain.pictures) > 1
        store(a1111, "Disable")
        assert largest_difference(run_on(a1111, {}).pictures, plain.pictures) == 0
        assert largest_difference(run_off(a1111, {}).pictures, hosts.pictures) == 0


def test_it_is_switched_by_a_request(a1111: WebUI) -> None:
    """As its XYZ axis and override_settings do."""
    request = {"override_settings": {"fp8_storage": "Enable"}, "override_settings_restore_afterwards": False}
    run_on(a1111, request)
    on = run_on(a1111, request)
    assert_near(a1111, request, on, run_off(a1111, request))


def test_loras(fp8: WebUI, sd15: Models) -> None:
    """Ours first, so that no run of the host's own merges a LoRA for us."""
    one, other = sd15.need("lora-a"), sd15.need("lora-b")
    prompts = [
        PROMPT, with_lora(one, 1), with_lora(one, 0.5), with_lora(one, 0.7) + f" <lora:{other}:0.7>", PROMPT,
        with_lora(sd15.need("locon"), 1), PROMPT,
    ]
    on = [run_on(fp8, {"prompt": prompt}) for prompt in prompts]
    off = [run_off(fp8, {"prompt": prompt}) for prompt in prompts]
    for prompt, mine, hosts in zip(prompts, on, off, strict=True):
        far = assert_near(fp8, {"prompt": prompt}, mine, hosts)
        if prompt != PROMPT:
            assert far < distance(mine, on[0]) / 2, "the LoRA changes no more than we do"
    for runs in (on, off):
        assert largest_difference(runs[0].pictures, runs[4].pictures) == 0
        assert largest_difference(runs[0].pictures, runs[6].pictures) == 0


def test_graphs_read_what_loras_have_left_in_the_weights(fp8: WebUI, sd15: Models) -> None:
    one, other = sd15.need("lora-a"), sd15.need("locon")
    prompts = [PROMPT, with_lora(one, 1), with_lora(one, 0.5), with_lora(other, 1), PROMPT]
    plain = [run_on(fp8, {"prompt": prompt}) for prompt in prompts]
    with graphs_on_a_cpu(fp8):
        for _ in range(2):
            # The first use of a shape is proved, the second is recorded.
            run_on(fp8, {"prompt": PROMPT})
        for prompt, expected in zip(prompts, plain, strict=True):
            made = run_on(fp8, {"prompt": prompt}, routes=("graph",))
            assert largest_difference(made.pictures, expected.pictures) <= 1, prompt


def test_another_checkpoint(fp8: WebUI, sd15: Models) -> None:
    # What is loaded beneath FP8 has gone through half precision, the VAE too.
    sd15.use("sd15-b")
    sd15.use("sd15")
    first = run_on(fp8, {})
    sd15.use("sd15-b")
    assert_near(fp8, {}, run_on(fp8, {}), run_off(fp8, {}))
    sd15.use("sd15")
    assert largest_difference(run_on(fp8, {}).pictures, first.pictures) == 0


def test_controlnet(fp8: WebUI, sd15: Models, controlnet: str) -> None:  # noqa: F811
    request, plain = controlled(fp8, controlnet), run_on(fp8, {})
    try:
        on = run_on(fp8, request, routes=ROUTES["a1111"])
        off = run(fp8, request, enabled=False)
        assert off.served(("graph", "plain", "blocks")) == 0, off.calls
        assert assert_near(fp8, request, on, off) < distance(on, plain) / 2
        assert largest_difference(run_on(fp8, {}).pictures, plain.pictures) == 0
    finally:
        # Its extension keeps a ControlNet in float8, with which it fails once the option is off, until it sees another
        # checkpoint.
        store(fp8, "Disable")
        sd15.use("sd15-b")
        run(fp8, request, enabled=False)


def test_a_lora_of_the_old_method_is_the_hosts(fp8: WebUI, sd15: Models) -> None:
    request = {"prompt": with_lora(sd15.need("lora-a"), 1)}
    with fp8.options(lora_functional=True):
        made = run(fp8, request, enabled=True)
        assert made.served(("host",)) and not made.served(("plain", "graph")), made.calls
        assert "LoRA is set to the old method" in made.reason
    run_on(fp8, request)


def test_for_sdxl_alone(a1111: WebUI, sd15: Models) -> None:
    sd15.use("sdxl")
    without = run_off(a1111, {})
    store(a1111, "Enable for SDXL")
    try:
        if a1111.post("/sdapi/v1/txt2img", PICTURE).status_code != 200:
            pytest.skip("this host cannot make the image itself: on a CPU, SDXL's text encoder fails in bfloat16")
        on, off = run_on(a1111, {}), run_off(a1111, {})
        assert assert_near(a1111, {}, on, off) < SHARE_OF_FP8 * distance(off, without)
    finally:
        store(a1111, "Disable")
