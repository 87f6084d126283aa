"""The pre-warm queue on the page: one line per job, renewed while jobs are pending."""
from __future__ import annotations

import html
import time
from collections.abc import Collection, Iterator

from ..shapes.sizes import Size
from ..shapes.warmup import CANCELLED, DONE, FAILED, QUEUED, Job, WarmUp
from .amounts import counted, seconds

SECONDS_BETWEEN_LOOKS = 0.3
LONGEST_WAIT = 2.0
MOST_JOBS_SHOWN = 25


def watch(warmup: WarmUp, sizes: Collection[Size] = (), alone: bool = False) -> Iterator[list[Job]]:
    """The jobs as they change, until none of them is pending.

    They are the latest job of each of these sizes and, unless those are to be watched alone, every pending one.
    """
    watched = set({job.size: job.id for job in warmup.jobs() if job.size in sizes}.values())
    version = -1
    while True:
        version = warmup.wait_for_change(version, LONGEST_WAIT)
        jobs = warmup.jobs()
        if not alone:
            watched.update(job.id for job in jobs if job.pending)
        jobs = [job for job in jobs if job.id in watched]
        yield jobs
        if not any(job.pending for job in jobs):
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def jobs_html(jobs: list[Job]) -> str:
    """One line per job with its progress; the pending ones are never left out in favour of finished ones."""
    shown = [job for job in jobs if job.pending][:MOST_JOBS_SHOWN]
    finished = [job for job in jobs if not job.pending]
    room = MOST_JOBS_SHOWN - len(shown)
    shown = sorted([*shown, *finished[len(finished) - min(room, len(finished)):]], key=lambda job: job.id)
    more = len(jobs) - len(shown)
    rest = f'<p class="onediff-reason">and {counted(more, "more job")}</p>' if more else ""
    return f'<div class="onediff-jobs">{"".join(map(job_html, shown))}{rest}</div>' if jobs else ""


def job_html(job: Job) -> str:
    """One job: its size, how far it is, and what came of it."""
    share = 100 * job.done // max(job.total, 1)
    size = html.escape(str(job.size))
    return (
        f'<div class="onediff-job onediff-job-{job.state}"><b>{size}</b>'
        f'<div class="onediff-bar" role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{share}" '
        f'aria-label="Pre-warming {size}"><div style="width: {share}%"></div></div>'
        f"<span>{html.escape(job_sentence(job))}</span></div>"
    )


def job_sentence(job: Job) -> str:
    """What there is to say of a job beside its size."""
    if job.state == QUEUED:
        return "queued"
    if job.state == DONE:
        return f"done in {seconds(job.seconds)}"
    if job.state == FAILED:
        return f"failed: {job.reason}"
    if job.state == CANCELLED:
        return "cancelled"
    return f"call {job.done + 1} of {job.total}"


def sentence(text: str, wrong: bool = False) -> str:
    """A result for the user, announced by screen readers."""
    kind = "onediff-wrong" if wrong else "onediff-right"
    return f'<p class="onediff-result {kind}" role="status">{html.escape(text)}</p>'
