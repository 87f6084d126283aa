"""Every hook of ours made to fail in turn, in a real WebUI: the image is the host's own to the bit, with a reason.

Needs tests/webui/extensions/onediff-faults linked into the extensions folder of the WebUI at --webui.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from webui_client import WebUI, largest_difference, start_from
from webui_client import gradient as gradient_image
from webui_compare import Run, run, run_off, run_on
from webui_models import Models

ROUTE = "/onediff-faults/v1"
# These run when the image has been made; what they cost is no part of it.
AFTER_THE_IMAGE = {"end of a generation"}
# These are no part of the decision who makes an image, only of how DeepCache counts its steps.
BESIDE_THE_IMAGE = {"sampler's schedule"}


def hooks_of(webui: WebUI) -> list[str]:
    if not webui.has(ROUTE):
        pytest.skip("link tests/webui/extensions/onediff-faults into the WebUI's extensions folder")
    return webui.get(ROUTE)["hooks"]


@contextlib.contextmanager
def failing(webui: WebUI, hook: str) -> Iterator[None]:
    assert webui.post(ROUTE, {"hook": hook}).status_code == 200
    try:
        yield
    finally:
        webui.post(ROUTE, {"hook": None})


def exactly(one: Run, other: Run) -> bool:
    return largest_difference(one.pictures, other.pictures) == 0


def test_each_hook_in_turn_costs_a_reason_and_no_image(webui: WebUI, sd15: Models) -> None:
    hooks = hooks_of(webui)
    hosts, ours = run_off(webui, {}), run_on(webui, {})
    assert len(hooks) >= 10
    for hook in hooks:
        before = webui.get(ROUTE)["tracebacks"]
        with failing(webui, hook):
            made = [run(webui, {}, enabled=True) for _ in range(2)]
            faults = webui.status()["faults"]
        told = [fault for fault in faults if fault.endswith(f"onediff-faults made this fail: {hook}")]
        # A sampler's schedule is only read where DeepCache wants it.
        assert len(told) == 1 or hook in BESIDE_THE_IMAGE, f"{hook}: {faults}"
        logged = webui.get(ROUTE)["tracebacks"] - before
        assert logged == len(told), f"{hook}: {logged} tracebacks, however many calls"
        for run_ in made:
            if hook in AFTER_THE_IMAGE | BESIDE_THE_IMAGE:
                assert exactly(run_, ours), hook
            elif hook.startswith("VAE"):
                assert run_.served(("host",)) == 0 and largest_difference(run_.pictures, hosts.pictures) <= 1, hook
            else:
                assert exactly(run_, hosts), hook
                assert run_.served(("graph", "plain")) == 0 and "a fault of OneDiff" in run_.reason, hook
        again = run_on(webui, {})
        assert exactly(again, ours), f"after {hook}"


def test_a_failing_decode_and_encode_are_the_hosts(webui: WebUI, sd15: Models) -> None:
    hooks_of(webui)
    request = start_from(gradient_image(64, 64))
    hosts = run_off(webui, request, 1)
    with failing(webui, "VAE, the route"):
        made = run(webui, request, enabled=True)
    assert largest_difference(made.pictures, hosts.pictures) <= 1
    assert webui.status()["vae"]["route"] is not None


def test_switching_off_works_whatever_fails(webui: WebUI, sd15: Models) -> None:
    hooks_of(webui)
    hosts = run_off(webui, {})
    with failing(webui, "UNet, before the route"), webui.options(onediff_enabled=False):
        assert webui.status()["hooks"] == 0
        made = run(webui, {}, enabled=True)
        assert exactly(made, hosts) and sum(made.calls.values()) == 0
    with failing(webui, "end of a generation"), webui.options(onediff_enabled=False):
        assert webui.status()["hooks"] == 0
    run_on(webui, {})
