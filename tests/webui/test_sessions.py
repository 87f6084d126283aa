"""Changes within one sampling. Its first UNet calls make plans: a CUDA graph, with all that is known about calls of one
signature. Later calls replay the plan of their signature. Images are compared with those of the WebUI alone: no pixel
differs by more than 1 of 255.

For A1111, the Forge family and reForge. On a CPU, tests/webui/extensions/onediff-graphs must be linked into the
extensions folder of the WebUI at --webui; the cases of other extensions need onediff-neighbours as well.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from test_exact_images import WORDS_110
from test_in_progress import InBackground
from test_neighbours import need_neighbours, planned
from webui_client import PICTURE, WebUI
from webui_compare import GRAPHS, Run, assert_different, assert_same, graphs_on_a_cpu, run_off, run_on
from webui_models import Models

STEPS = 8
FOX = "a red fox in the snow"
# Of a LoRA of random numbers; at its whole weight, eight steps make more of rounding than a pixel's step.
WEIGHT = 0.3


@pytest.fixture(autouse=True, scope="module")
def graphs(webui: WebUI) -> Iterator[None]:
    with graphs_on_a_cpu(webui):
        yield


def route_lookups(webui: WebUI) -> int:
    return int(webui.get(GRAPHS)["route_lookups"])


def assert_replayed_and_same(webui: WebUI, request: dict[str, Any], moves: int = 0) -> Run:
    """Make a request whose shapes are all ready, with the extension on and off. Asserts that most calls replay a plan,
    all by a graph, and that the image is the WebUI's.

    A shape becomes ready in two calls: the first is proved, the second is captured. moves: how often the WebUI moves
    the weights meanwhile; after each move, one call is launched and captured anew.
    """
    request = {"steps": STEPS, **request}
    for _ in range(2):
        run_on(webui, request)
    before = route_lookups(webui)
    on = run_on(webui, request, routes=("graph", "plain") if moves else ("graph",))
    assert on.calls["plain"] <= moves
    lookups = route_lookups(webui) - before
    calls = sum(on.calls.values())
    assert 0 < lookups <= calls // 2 + 2 * moves and lookups < calls, f"{lookups} of {calls} calls had no plan"
    assert_same(on, run_off(webui, request))
    return on


@pytest.mark.parametrize("prompt", [
    FOX,
    "[a fox:a castle at night:0.5]",
    "[a fox:a castle at night:3]",
    "[a fox|a castle at night]",
    f"[a fox:{WORDS_110}:0.5]",
    "a fox AND a castle at night",
    "[a fox:a sea:0.5] AND [a castle|a tower]",
], ids=["plain", "at half", "at step 3", "in turn", "longer at half", "AND", "AND of both"])
def test_a_prompt_that_changes_within_a_sampling_is_replayed_with_the_image_of_the_webui(
    webui: WebUI, sd15: Models, prompt: str
) -> None:
    """prompt: in the WebUI's syntax, changed from a step on, at every step, or to another length; or several prompts
    joined by AND."""
    plain = assert_replayed_and_same(webui, {"prompt": "a fox"})
    changed = assert_replayed_and_same(webui, {"prompt": prompt})
    assert_different(plain, changed, "the prompt")


def test_a_lora_whose_weight_changes_within_a_sampling_gives_the_image_of_the_webui(webui: WebUI, sd15: Models) -> None:
    """Another extension halves the weight at step 2, and sets it to 0 at step 5. An image without such changes then
    equals the one before."""
    need_neighbours(webui)
    request = {"prompt": f"{FOX} <lora:{sd15.need('lora-a')}:{WEIGHT}>"}
    plain = assert_replayed_and_same(webui, request)
    # A1111 merges into the weights where they are; the Forge family puts merged ones in their place, at first too.
    moves = 0 if webui.kind == "a1111" else 3
    changing = {**request, **planned(weight_of_lora={"2": WEIGHT / 2, "5": 0.0})}
    scheduled = assert_replayed_and_same(webui, changing, moves=moves)
    assert_different(plain, scheduled, "the schedule")
    assert_same(run_on(webui, {"steps": STEPS, **request}), plain)


def test_nothing_of_an_interrupted_sampling_reaches_the_next_one(webui: WebUI, sd15: Models) -> None:
    """The same request gives the same image before and after an interrupted one."""
    plain = assert_replayed_and_same(webui, {})
    for seed in (1, 2):
        many = {"prompt": "a castle at night", "steps": 60, "seed": seed, "width": 128, "height": 128}
        before = sum(webui.calls().values())
        sampling = InBackground(webui, {**PICTURE, **many})
        sampling.wait_for_step(10)
        webui.post("/sdapi/v1/interrupt")
        sampling.pictures()
        assert sum(webui.calls().values()) - before < 60
        assert_same(run_on(webui, {"steps": STEPS}, routes=("graph",)), plain)
