"""The status for users: as plain values for the API, and as markup for the accordion. The argument `status` of the
functions here is the result of current_status()."""
from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from ..core.image import DONE, FAILED, INTERRUPTED
from ..core.settings import OFF_IN_SETTINGS
from ..runtime.cache import Fingerprint
from ..runtime.call_stats import CallStats
from ..runtime.runtime import runtime
from ..runtime.services import SWITCHED_OFF
from ..runtime.vae.route import decode_sentence
from .amounts import NOTHING, counted, milliseconds, seconds, speedup
from .markup import fact_html
from .presets import PRESETS

# The names of routes (status["route"]) in the accordion's title, and inside the accordion.
SHORT_ROUTES = {"graph": "graph", "plain": "no graph", "host": "WebUI alone"}
ROUTES = {"graph": "CUDA graph", "plain": "without CUDA graphs", "host": "the WebUI alone"}
# The names of the kinds of steps, by the keys of status["image"]["steps"].
STEPS = {
    "whole": "whole", "cached": "cached", "prompt alone": "without negative prompt", "forecast": "extrapolated",
    "host": "by the WebUI alone",
}
# The keys of a status for the policies that skip steps, and for the second GPU. The value of each key is a mapping of
# counts and texts.
OF_THE_STEPS = ("deepcache", "guidance", "forecast", "second_gpu")
# The names of the parts of an image's time, by the keys of status["image"]["spent"].
SPENT = {
    "unet": "steps", "first_use": "first use of this size", "slower": "slower steps", "vae": "VAE",
    "inside": "images inside it", "rest": "other",
}
# The title names a part besides the steps from this share of the image's time on.
MUCH = 0.25
# Parts that took less time are not named.
LEAST_SECONDS = 0.05
# Shown in place of the two status lines if making them fails.
UNREADABLE = ("", '<p class="onediff-reason">OneDiff cannot show its status: see the console.</p>')


def current_status(webui: Any) -> dict[str, Any]:
    """runtime.status() together with the WebUI's name and release, the number of hooks in place, notes on the WebUI's
    settings, the machine, and the names of the presets, the exact one first. webui: the adapter.

    While OneDiff is off or does not serve the model, "route" is "host", "reason" says why, and all other data on the
    last call are empty, because that call was made with another model or setting. "served" is whether the model is
    served.
    """
    part: Any = partial(runtime.guard.attempt, "the status")
    status = {
        "host": webui.name, "release": webui.release, "hooks": part(webui.hooks, 0), "notes": part(webui.notes, []),
        "machine": part(lambda: asdict(Fingerprint.of()), {}), "presets": list(PRESETS), **runtime.status(),
    }
    why_not = part(webui.why_not_served)
    reason = why_not if runtime.settings.enabled else f"{OFF_IN_SETTINGS}."
    status["served"] = not why_not
    if not reason:
        return status
    nothing = {**CallStats().status(), "backend": "", "calls": status["calls"]}
    steps = {name: {key: type(value)() for key, value in status[name].items()} for name in OF_THE_STEPS}
    if not runtime.settings.enabled:
        # Only then: OneDiff may serve the VAE of a model that it does not serve.
        steps["vae"] = {**status["vae"], "route": None, "reason": ""}
    return {**status, **nothing, **steps, "route": "host", "reason": reason}


def summary_html(status: dict[str, Any]) -> str:
    """Markup of the status in the accordion's title: "0.9 s/image (WebUI 1.6 s), 29 ms/step (WebUI 57 ms), 1.8x faster,
    graph"; or that OneDiff is off, that the model is not supported, or that there is no image yet.

    The title has room for two lines. So a part that took much of the image's time, such as the VAE, replaces the step:
    "4.4 s/image, VAE 1.3 s, 1.6x faster, no graph". On a phone: "0.9 s/image, 1.8x faster, graph".
    """
    route = status["route"]
    if not runtime.settings.enabled:
        words = "off in the settings"
    elif not status.get("served", True):
        words = "not supported"
    elif route is None:
        words = "no image yet"
    else:
        words = ""
        taken, alone = image_times(status, "/image")
        if taken:
            words += f"{taken}{on_wide(alone)}, "
        largest = largest_beside_steps(status)
        if largest:
            words += on_wide(f"{largest}, ")
        elif status["step_ms"] is not None:
            words += on_wide(f"{milliseconds(status['step_ms'])}/step{beside_step(status)}, ")
        if route != "host" and gain_of(status) is not None:
            words += f"{speedup(gain_of(status))}, "
        words += SHORT_ROUTES[route]
    return f'<span class="onediff-summary onediff-route-{route or "none"}" role="status">{words}</span>'


def beside(own: float | None, written: Callable[[float], str]) -> str:
    """The WebUI's own value in brackets, to follow ours, for example " (WebUI 1.6 s)"; "" for None. written: formats
    the value."""
    return "" if own is None else f" (WebUI {written(own)})"


def beside_step(status: dict[str, Any]) -> str:
    """The duration of a step by the WebUI alone, as in beside(); "" if it is not known, or if the WebUI made the image.
    """
    return "" if status["route"] == "host" else beside(status["host_ms"], milliseconds)


def on_wide(words: str) -> str:
    """Markup of a part of the title for which a phone has no room: style.css hides it there. "" for ""."""
    return f'<span class="onediff-on-wide">{words}</span>' if words else ""


def image_sentence(status: dict[str, Any]) -> str:
    """The duration of the last image, and in brackets, if known, of a similar one by the WebUI alone: "0.9 s (WebUI
    1.6 s)". Words for an image that failed or was interrupted, see image_times; "" if the duration is unknown."""
    return "".join(image_times(status))


def image_times(status: dict[str, Any], unit: str = "") -> tuple[str, str]:
    """The duration of the last image, and the duration of a similar one by the WebUI alone, to follow it:
    ("0.9 s/image", " (WebUI 1.6 s)"); "" for each that is unknown. ("interrupted after 2 s", "") for an interrupted
    image, ("failed", "") for a failed one. unit: follows our duration, such as "/image"."""
    image = status.get("image") or {}
    took = image.get("seconds")
    if image.get("state") == FAILED:
        return FAILED, ""
    if took is None:
        return "", ""
    if image.get("state") == INTERRUPTED:
        return f"interrupted after {seconds(took)}", ""
    return f"{seconds(took)}{unit}", beside(image.get("host_seconds"), seconds)


def spent_beside_steps(status: dict[str, Any]) -> dict[str, float]:
    """The seconds that each part of the last image took (by the keys of SPENT), except its steps and parts of up to
    LEAST_SECONDS, longest first; {} if the steps took nearly all, or if the parts are not known."""
    image = status.get("image") or {}
    spent = {name: took or 0.0 for name, took in (image.get("spent") or {}).items()}
    took = image.get("seconds")
    steps = spent.pop("unet", 0.0)
    if not took or not steps or took - steps < max(0.1 * took, LEAST_SECONDS):
        return {}
    return {name: spent[name] for name in sorted(spent, key=lambda name: -spent[name]) if spent[name] > LEAST_SECONDS}


def largest_beside_steps(status: dict[str, Any]) -> str:
    """The longest part of the last image's time besides the steps, if this part took at least the share MUCH of the
    time: "VAE 13 s"; otherwise ""."""
    found = next(iter(spent_beside_steps(status).items()), None)
    if found is None or found[1] < MUCH * status["image"]["seconds"]:
        return ""
    return f"{SPENT[found[0]]} {seconds(found[1])}"


def parts_sentence(status: dict[str, Any]) -> str:
    """The steps of the last image at each of its sizes and models: "512x512: 20 steps, 30 ms; 1024x1024: ...". "" if it
    has only one size and model."""
    parts = (status.get("image") or {}).get("parts") or []
    if len(parts) < 2:
        return ""
    are_several = len({part["model"] for part in parts}) > 1
    sentences = []
    for part in parts:
        name = part["resolution"] or NOTHING
        if are_several:
            name = f"{name} {part['model'] or NOTHING}"
        steps = counted(sum(part["steps"].values()), "step")
        sentences.append(f"{name}: {steps}, {milliseconds(part['step_ms'])}")
    return "; ".join(sentences)


def inside_sentence(status: dict[str, Any]) -> str:
    """The images that an extension such as ADetailer made within the last image, with their sizes and durations:
    "512x512 1.2 s"; "" for none."""
    inside = (status.get("image") or {}).get("inside") or []
    return ", ".join(f"{one['resolution'] or NOTHING} {seconds(one['seconds'] or 0.0)}" for one in inside)


def route_sentence(status: dict[str, Any]) -> str:
    """The route of the last call, and, if the image's calls had several routes, how many had this one: "CUDA graph (18
    of 20 calls)"; NOTHING if there was no call. The WebUI alone for a model that is not served."""
    if not status.get("served", True):
        return ROUTES["host"]
    calls = (status.get("image") or {}).get("calls") or {}
    some = f" ({calls.get(status['route'], 0)} of {counted(sum(calls.values()), 'call')})" if len(calls) > 1 else ""
    return f"{ROUTES.get(status['route'], NOTHING)}{some}"


def gain_of(status: dict[str, Any]) -> float | None:
    """The speedup, as the WebUI's time divided by ours: of the last image if a similar image was made without OneDiff,
    otherwise of a step. None if neither speedup is known."""
    image = status.get("image") or {}
    took = image.get("seconds")
    alone = image.get("host_seconds")
    ratio: float | None = status["ratio"]
    return alone / took if took and alone is not None else ratio


def status_html(status: dict[str, Any]) -> str:
    """The status inside the accordion, as markup: how the last image was made, how fast, and why not faster."""
    decode, second = (status.get(part) or {} for part in ("vae", "second_gpu"))
    lines = dict.fromkeys((
        *reasons_of(status), gpus_sentence(second),
        *status.get("notes", ()), *status.get("faults", ()),
        decode_sentence(decode.get("route"), decode.get("reason", "")),
    ))
    known = image_facts(status) if status["route"] is not None else []
    facts = "".join(fact_html(label, value) for label, value in known if value not in ("", NOTHING))
    reason = "".join(f'<p class="onediff-reason">{html.escape(line)}</p>' for line in lines if line)
    route = status["route"] or "none"
    if status.get("reason") == SWITCHED_OFF:
        # The user has switched it off, so it is not shown as a warning.
        route = "off"
    return (
        f'<div class="onediff-status onediff-route-{route}"><div class="onediff-facts">{facts}</div>'
        f'<div class="onediff-spent">{spent_html(status)}</div>{reason}</div>'
    )


def spent_html(status: dict[str, Any]) -> str:
    """Markup of a bar with the parts of the last image's time and, if known, a bar with the WebUI's time for a similar
    image; "" before the first image, and if the last one failed or was interrupted."""
    image = status.get("image") or {}
    took = image.get("seconds")
    spent = {name: seconds_of for name, seconds_of in (image.get("spent") or {}).items() if seconds_of}
    if not took or image.get("state") != DONE or not spent:
        return ""
    alone = image.get("host_seconds") if status["route"] != "host" else None
    longest = max(took, sum(spent.values()), alone or 0.0)
    ours = {SPENT[name]: (name.replace("_", "-"), spent[name]) for name in SPENT if name in spent}
    bars = one_bar_html("OneDiff" if status["route"] != "host" else "WebUI", ours, longest)
    if alone:
        bars += one_bar_html("WebUI", {"whole image": ("webui", alone)}, longest)
    return bars


def one_bar_html(name: str, parts: dict[str, tuple[str, float]], longest: float) -> str:
    """Markup of a bar; if the bar has several parts, their names and seconds are below it, except for parts of less
    than LEAST_SECONDS. name: the bar's, such as "WebUI".

    parts: by name, the style (the end of a class of style.css, onediff-of-...) and the seconds of each part. longest:
        the seconds of a bar of full width.
    """
    total = seconds(sum(took for _, took in parts.values()))
    pieces = "".join(
        f'<i class="onediff-of-{kind}" style="width: {100 * took / longest:.1f}%"></i>' for kind, took in parts.values()
    )
    legend = "".join(
        f'<span><i class="onediff-of-{kind}"></i>{part} {seconds(took)}</span>' for part, (kind, took) in parts.items()
        if took >= LEAST_SECONDS
    )
    bar = f'<b>{name}, {total}</b><div class="onediff-spent-bar" aria-hidden="true">{pieces}</div>'
    return bar if len(parts) == 1 else f'{bar}<p class="onediff-spent-parts">{legend}</p>'


def reasons_of(status: dict[str, Any]) -> list[str]:
    """Why the last call was not faster: the reason for its route, then the reasons for which policies that skip steps,
    or the second GPU, were inactive; [] if there are no reasons."""
    inactive = [(status.get(part) or {}).get("reason") for part in OF_THE_STEPS]
    return [reason for reason in (status.get("reason"), *inactive) if reason]


def gpus_sentence(second: dict[str, Any]) -> str:
    """How two GPUs shared the last call, or why only one computed it; "" if the settings ask for one GPU. second:
    status["second_gpu"]."""
    if second.get("split"):
        return f"Two GPUs: {second['split']}; {second['bytes'] / 2**20:.0f} MiB of weights on the second."
    return f"One GPU: {second['reason']}." if second.get("reason") else ""


def image_facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts on the last image as (label, text) pairs, in the order of the accordion. The text of an unknown fact is
    "" or NOTHING."""
    steps = (status.get("image") or {}).get("steps", {})
    kinds = ", ".join(f"{count} {STEPS.get(kind, kind)}" for kind, count in steps.items())
    mixed = f", mean of {kinds}" if status["step_ms"] is not None and len(steps) > 1 else ""
    return [
        ("Route", route_sentence(status)),
        ("Image", image_sentence(status)),
        ("Step", f"{milliseconds(status['step_ms'])}{beside_step(status)}{mixed}"),
        ("Sizes", parts_sentence(status)),
        ("Images inside it", inside_sentence(status)),
        ("Speed", speed_sentence(status)),
        ("Resolution", status["resolution"] or NOTHING),
        ("Model", status["model"] or NOTHING),
        ("Backend", backend_sentence(status)),
        ("Weights", ", ".join(status.get("weights", ())) or NOTHING),
    ]


def backend_sentence(status: dict[str, Any]) -> str:
    """The backend and what it computes lossily, for example "native, 8-bit (70 layers)"; "" if unknown."""
    lossy = status.get("lossy", "")
    layers = status.get("low_bit_layers", 0)
    counted = f" ({layers} layers)" if layers and "8-bit" in lossy else ""
    return ", ".join(filter(None, (status["backend"], lossy))) + counted


def speed_sentence(status: dict[str, Any]) -> str:
    """The speedup over the WebUI in words (see gain_of), or why it is unknown; NOTHING if it is unknown and the WebUI
    made the image or no image is made. The WebUI's step is timed when a shape is first used."""
    if (gain := gain_of(status)) is not None:
        return speedup(gain)
    if status["route"] in (None, "host"):
        return NOTHING
    return "the WebUI was not timed for these steps" if status["host_ms"] is None else "too few steps timed yet"
