"""The runtime's status for users: as JSON for the API, and as the status line of the accordion."""
from __future__ import annotations

import html
from functools import partial
from typing import Any

from ..hosts.contract import WebUI
from ..options.settings import OFF_IN_SETTINGS
from ..runtime.call_stats import CallStats
from ..runtime.runtime import runtime
from ..runtime.vae.route import described as decode_described
from .amounts import NOTHING, milliseconds, seconds, times
from .texts import (
    NO_IMAGE_YET,
    NOT_SERVED,
    OFF,
    ROUTES,
    SHORT_NOT_SERVED,
    SHORT_ROUTES,
    an_image,
    mean_step,
    not_compared,
)
from .texts import UNREADABLE as UNREADABLE_TEXT

# What a status says of the last image, which is of no use beside a model that OneDiff does not serve.
OF_THE_LAST_CALL = (
    "model", "resolution", "step_ms", "host_ms", "ratio", "ratio_range", "relative_error", "image", "second_gpu",
)
# The same of what leaves steps out; each is a mapping of counts and texts.
OF_THE_STEPS = ("deepcache", "guidance", "forecast")
# In place of both status lines where a fault of ours keeps them from being made.
UNREADABLE = ("", f'<p class="onediff-reason">{UNREADABLE_TEXT}</p>')


def current_status(webui: WebUI) -> dict[str, Any]:
    """runtime.status() with what the WebUI's adapter adds: who the host is, how many hooks are in place, and notes on
    its settings. Where OneDiff is off, or does not serve the model, with that reason in place of the last call: what
    another model's took says nothing of this one."""
    part: Any = partial(runtime.guard.attempt, "the status")
    status = {
        "host": webui.name, "release": webui.release, "hooks": part(webui.hooks, 0), "notes": part(webui.notes, []),
        **runtime.status(),
    }
    why_not = part(webui.why_not_served)
    reason = why_not if runtime.settings.enabled else f"{OFF_IN_SETTINGS}."
    status["served"] = not why_not
    if not reason:
        return status
    nothing = CallStats().status()
    steps = {name: {key: type(value)() for key, value in status[name].items()} for name in OF_THE_STEPS}
    return {**status, **{name: nothing[name] for name in OF_THE_LAST_CALL}, **steps, "route": "host", "reason": reason}


def summary_html(status: dict[str, Any]) -> str:
    """The status in the accordion's title, in a few words: "1.2 s/image, 29 ms/step, 2.0x faster, graph"."""
    route = status["route"]
    if not runtime.settings.enabled:
        words = OFF
    elif not status.get("served", True):
        words = SHORT_NOT_SERVED
    elif route is None:
        words = NO_IMAGE_YET
    else:
        ours = route != "host" and status["step_ms"] is not None
        took = (status.get("image") or {}).get("seconds")
        image = [] if took is None else [f"{seconds(took)}/image"]
        step = [f"{milliseconds(status['step_ms'])}/step"] if ours else []
        speed = [times(status["ratio"], status.get("ratio_range"))] if ours and status["ratio"] is not None else []
        words = ", ".join([*image, *step, *speed, SHORT_ROUTES[route]])
    return f'<span class="onediff-summary onediff-route-{route or "none"}" role="status">{html.escape(words)}</span>'


def status_html(status: dict[str, Any]) -> str:
    """The status line: what was made last, by which route and why, and how fast."""
    decode, second = (status.get(part) or {} for part in ("vae", "second_gpu"))
    lines = dict.fromkeys((
        *reasons_of(status), gpus_sentence(second), *status.get("notes", ()), *status.get("faults", ()),
        status.get("hint"), decode_described(decode.get("route"), decode.get("reason", "")),
    ))
    reason = "".join(f'<p class="onediff-reason">{html.escape(line)}</p>' for line in lines if line)
    route = status["route"] or "none"
    return f'<div class="onediff-status onediff-route-{route}">{facts_html(described(status))}{reason}</div>'


def reasons_of(status: dict[str, Any]) -> list[str]:
    """Why the last call was not computed in a faster way: its route, then what rests though it is chosen."""
    resting = [(status.get(part) or {}).get("reason") for part in ("deepcache", "guidance", "forecast")]
    if why := (status.get("deepcache") or {}).get("reused"):
        resting.append(f"DeepCache reuses deep layers instead of extrapolating them: {why}")
    return [reason for reason in (status.get("reason"), *resting) if reason]


def gpus_sentence(second: dict[str, Any]) -> str:
    """Which GPUs computed the last call, or why one did though two are wanted; "" where one is."""
    if second.get("split"):
        return f"Two GPUs: {second['split']}; {second['bytes'] / 2**20:.0f} MiB of weights on the second."
    return f"One GPU: {second['reason']}." if second.get("reason") else ""


def facts_html(facts: list[tuple[str, str]]) -> str:
    """(label, value) pairs side by side; those without a value are left out."""
    cells = "".join(fact_html(label, value) for label, value in facts if value)
    return f'<div class="onediff-facts">{cells}</div>'


def fact_html(label: str, value: str, below: str = "", meaning: str = "") -> str:
    """A value under its label. below: markup."""
    title = f' title="{html.escape(meaning)}"' if meaning else ""
    name = label.lower().replace(" ", "-")
    return (
        f'<div class="onediff-fact onediff-{name}"{title}><span>{html.escape(label)}</span>'
        f"<b>{html.escape(value)}</b>{below}</div>"
    )


def described(status: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, value) pairs of a status; values that are not known yet are shown as such."""
    image = status.get("image") or {}
    took = image.get("seconds")
    return [
        ("Route", ROUTES.get(status["route"], NOTHING) if status.get("served", True) else NOT_SERVED),
        ("Image", "" if took is None else an_image(took, image.get("host_seconds"))),
        ("Step", mean_step(status["step_ms"], image.get("steps", {}))),
        ("Speed", ratio_sentence(status)),
        ("Resolution", status["resolution"] or NOTHING),
        ("Model", status["model"] or NOTHING),
        ("Backend", backend_sentence(status)),
    ]


def backend_sentence(status: dict[str, Any]) -> str:
    """For example "native, 8-bit (70 layers)"."""
    lossy, layers = status.get("lossy", ""), status.get("low_bit_layers", 0)
    counted = f" ({layers} layers)" if layers and "8-bit" in lossy else ""
    return ", ".join(filter(None, (status["backend"], lossy))) + counted


def ratio_sentence(status: dict[str, Any]) -> str:
    """How our mean step compares with the WebUI's, which is timed when a shape is first used."""
    ratio, own = status["ratio"], status["host_ms"]
    if ratio is not None:
        return f"{times(ratio, status.get('ratio_range'))} ({milliseconds(status['step_ms'])} vs {milliseconds(own)})"
    return NOTHING if status["route"] in (None, "host") else not_compared(own)
