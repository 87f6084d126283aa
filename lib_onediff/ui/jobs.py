"""The list of jobs as markup, which several pages show, and the clicks in it."""
from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.jobs import CANCELLED, COMPARISON, DONE, IMAGE, PREWARM, RUNNING, Job, JobQueue
from .amounts import counted, seconds
from .markup import bar_html

MOST_WAITING_SHOWN = 25
MOST_FINISHED_SHOWN = 8
KINDS = {IMAGE: "Image", COMPARISON: "Compare", PREWARM: "Pre-warm"}
# Of a time left that is shorter, nothing is said.
LEAST_SECONDS_LEFT = 2.0


class Clicks(NamedTuple):
    """What somebody has clicked on a page since the last look. cancelled: ids of jobs. clear: whether to take those
    that are over out of their list. shown: the id of the comparison to show; 0: the newest. sizes: to pre-warm. sort:
    the column by which the table is sorted, and whether the largest comes first. asked: the size in the txt2img tab."""

    cancelled: Sequence[int] = ()
    clear: bool = False
    shown: int = 0
    sizes: Sequence[str] = ()
    sort: tuple[str, bool] = ("", False)
    asked: str = ""


def read_clicks(text: Any) -> Clicks:
    """The clicks that javascript/onediff.js sends, as JSON; none for anything else."""
    try:
        sent = dict(json.loads(text))
    except (TypeError, ValueError):
        return Clicks()
    shown = sent.get("shown")
    column = sent.get("sort")
    asked = sent.get("asked")
    return Clicks(
        values_of(int, sent.get("cancelled")), sent.get("clear") is True, shown if type(shown) is int else 0,
        values_of(str, sent.get("sizes")), (column if isinstance(column, str) else "", sent.get("descending") is True),
        asked if isinstance(asked, str) else "",
    )


def values_of(kind: type, sent: Any) -> tuple[Any, ...]:
    """The values of this type in a list that a page has sent; none in anything else."""
    return tuple(value for value in sent if type(value) is kind) if isinstance(sent, list) else ()


def do(clicks: Clicks, queue: JobQueue) -> None:
    """Do what was clicked. A job that is over, or unknown, is none to cancel."""
    for job in clicks.cancelled:
        queue.cancel(job)
    if clicks.clear:
        queue.clear()


def jobs_html(jobs: Sequence[Job]) -> str:
    """One line per job with its progress and a button to cancel it, for javascript/onediff.js; "" for none."""
    pending = [job for job in jobs if job.pending]
    over = [job for job in jobs if not job.pending]
    shown = [*over[-MOST_FINISHED_SHOWN:], *pending[:MOST_WAITING_SHOWN]]
    if not shown:
        return ""
    more = len(pending) - MOST_WAITING_SHOWN
    rest = f'<p class="onediff-reason">and {counted(more, "more job")}</p>' if more > 0 else ""
    clear = '<button type="button" class="onediff-small" data-onediff-clear>Clear finished</button>' if over else ""
    return (
        f'<div class="onediff-jobs-head"><h2>Jobs</h2>{clear}</div>'
        f'<div class="onediff-jobs" role="list" aria-label="Jobs">{"".join(map(job_html, shown))}</div>{rest}'
    )


def job_html(job: Job) -> str:
    """One job: what it is for, how far it is, what came of it, and what can be done with it."""
    name = html.escape(f"{KINDS[job.kind]} {job.title}".strip())
    bar = bar_html(100 * job.share, name) if job.state == RUNNING else ""
    buttons = ""
    if getattr(job, "early", None):
        buttons += small_button("show", job.id, "Show", f"Show: {name}")
    # An image that waits is in the WebUI's own queue.
    if job.state == RUNNING or (job.pending and job.kind != IMAGE):
        buttons += small_button("job", job.id, "Cancel", f"Cancel: {name}")
    return (
        f'<div class="onediff-job onediff-job-{job.state}" role="listitem" data-onediff-kind="{job.kind}">'
        f"<b>{name}</b>{bar}<span>{html.escape(job_sentence(job))}</span>{buttons}</div>"
    )


def small_button(what: str, job: int, text: str, label: str) -> str:
    """A button for javascript/onediff.js. label: markup, for screen readers."""
    return (
        f'<button type="button" class="onediff-small" data-onediff-{what}="{job}" aria-label="{label}">{text}</button>'
    )


def job_sentence(job: Job) -> str:
    """A job's state in words, for beside its name."""
    if job.state == DONE:
        return f"done in {seconds(job.seconds)}{f': {job.reason}' if job.reason else ''}"
    if job.state == CANCELLED or job.reason:
        return f"{job.state}{f': {job.reason}' if job.reason else ''}"
    if job.state != RUNNING:
        return ", ".join(filter(None, (job.state, job.what)))
    left = job.seconds_left
    said = [
        f"{100 * job.share:.0f} %", f"step {job.done} of {job.total}" if job.unit == "step" and job.total else "",
        job.what, "" if left is None or left < LEAST_SECONDS_LEFT else f"about {seconds(left)} left",
    ]
    return ", ".join(filter(None, said))
