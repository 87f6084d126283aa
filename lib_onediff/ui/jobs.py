"""The list of jobs as markup for several pages, and the clicks that pages send."""
from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..core.jobs import CANCELLED, COMPARISON, DONE, IMAGE, PREWARM, RUNNING, Job, JobQueue
from .amounts import counted, duration
from .markup import bar_html

# See jobs_html.
MOST_WAITING_SHOWN = 25
MOST_FINISHED_SHOWN = 8
# The page's names of the kinds of jobs.
KINDS = {IMAGE: "Image", COMPARISON: "Compare", PREWARM: "Pre-warm"}
# A shorter remaining time is not shown.
LEAST_SECONDS_LEFT = 2.0


class Clicks(NamedTuple):
    """The clicks on a page since its last request, and the state of the page, which it sends with each request.

    cancelled: ids of jobs to cancel.
    clear: whether to remove finished jobs from the list.
    shown: the id of the comparison to show; 0: the newest.
    sizes: the sizes to pre-warm, for example "512x512".
    sort: the column by which the table is sorted ("": none), and whether the largest value comes first.
    asked: the size that is set in the txt2img tab; "" if unknown.
    """

    cancelled: Sequence[int] = ()
    clear: bool = False
    shown: int = 0
    sizes: Sequence[str] = ()
    sort: tuple[str, bool] = ("", False)
    asked: str = ""


def read_clicks(text: Any) -> Clicks:
    """The clicks in the JSON object that javascript/onediff.js sends. A value of a wrong type counts as no click; a
    text that is no JSON object, or None, as no clicks at all."""
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
    """The values of exactly this type in a list that a page has sent; () for anything that is not a list."""
    return tuple(value for value in sent if type(value) is kind) if isinstance(sent, list) else ()


def carry_out(clicks: Clicks, queue: JobQueue) -> None:
    """Carry out the clicks on the list of jobs: cancel jobs, and remove finished ones. Jobs to cancel that are unknown
    or finished are ignored. All other clicks are left to the caller."""
    for job in clicks.cancelled:
        queue.cancel(job)
    if clicks.clear:
        queue.clear()


def jobs_html(jobs: Sequence[Job]) -> str:
    """The list of jobs as markup: a line for each of the last finished jobs (at most MOST_FINISHED_SHOWN), then for
    each of the next running and waiting jobs (at most MOST_WAITING_SHOWN), with progress and buttons for
    javascript/onediff.js; "" without jobs."""
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
    """A job's name, progress bar, state and buttons as markup: Show for a comparison with an image; Cancel for a job
    that runs or waits, except an image of the WebUI that waits."""
    name = html.escape(f"{KINDS[job.kind]} {job.title}".strip())
    bar = bar_html(100 * job.share, name) if job.state == RUNNING else ""
    buttons = ""
    if getattr(job, "early", None):
        buttons += small_button("show", job.id, "Show", f"Show: {name}")
    # The WebUI's own queue, which holds waiting images, cannot cancel one.
    if job.state == RUNNING or (job.pending and job.kind != IMAGE):
        buttons += small_button("job", job.id, "Cancel", f"Cancel: {name}")
    return (
        f'<div class="onediff-job onediff-job-{job.state}" role="listitem" data-onediff-kind="{job.kind}">'
        f"<b>{name}</b>{bar}<span>{html.escape(job_sentence(job))}</span>{buttons}</div>"
    )


def small_button(action: str, job: int, text: str, label: str) -> str:
    """A button for javascript/onediff.js. action: "show", or "job" to cancel. job: the job's id. label: escaped text
    for screen readers."""
    attributes = f'class="onediff-small" data-onediff-{action}="{job}" aria-label="{label}"'
    return f'<button type="button" {attributes}>{text}</button>'


def job_sentence(job: Job) -> str:
    """A job's state in words, shown beside its name, for example "40 %, step 8 of 20, about 12 s left". Without a time
    left that is unknown or shorter than LEAST_SECONDS_LEFT."""
    if job.state == DONE:
        return f"done in {duration(job.seconds)}{f': {job.reason}' if job.reason else ''}"
    if job.state == CANCELLED or job.reason:
        return f"{job.state}{f': {job.reason}' if job.reason else ''}"
    if job.state != RUNNING:
        return ", ".join(filter(None, (job.state, job.what)))
    left = job.seconds_left
    said = [
        f"{100 * job.share:.0f} %", f"step {job.done} of {job.total}" if job.unit == "step" and job.total else "",
        job.what, "" if left is None or left < LEAST_SECONDS_LEFT else f"about {duration(left)} left",
    ]
    return ", ".join(filter(None, said))
