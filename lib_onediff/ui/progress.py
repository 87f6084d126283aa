"""The pre-warm queue on the page: one line per job, renewed while jobs are pending."""
from __future__ import annotations

import html

from ..core.sizes import TOKENS
from ..prewarm.job import CANCELLED, DONE, FAILED, QUEUED, Job
from .amounts import counted, seconds
from .markup import bar_html

MOST_JOBS_SHOWN, MOST_FINISHED_SHOWN = 25, 8


def jobs_html(jobs: list[Job]) -> str:
    """One line per job with its progress and, while it is pending, a button to cancel it, for javascript/onediff.js."""
    pending = [job for job in jobs if job.pending]
    finished = [job for job in jobs if not job.pending][-MOST_FINISHED_SHOWN:]
    shown = [*finished, *pending[:MOST_JOBS_SHOWN]]
    more = len(pending) - MOST_JOBS_SHOWN
    rest = f'<p class="onediff-reason">and {counted(more, "more job")}</p>' if more > 0 else ""
    lines = "".join(map(job_html, shown))
    return f'<div class="onediff-jobs" role="list" aria-label="Pre-warming">{lines}{rest}</div>' if shown else ""


def job_html(job: Job) -> str:
    """One job: its size, with what is not usual about it, how far it is, and what came of it."""
    name = html.escape(str(job.size) if job.tokens == TOKENS else f"{job.size}, {job.tokens} tokens")
    bar = bar_html(100 * job.share, f"Pre-warming {name}") if job.pending else ""
    cancel = (
        f'<button type="button" class="onediff-small" data-onediff-job="{job.id}" aria-label="Cancel: {name}" '
        'title="Cancel">✕</button>' if job.pending else ""
    )
    return (
        f'<div class="onediff-job onediff-job-{job.state}" role="listitem"><b>{name}</b>'
        f"{bar}<span>{html.escape(job_sentence(job))}</span>{cancel}</div>"
    )


def job_sentence(job: Job) -> str:
    """What there is to say of a job beside its size."""
    if job.state == DONE:
        return f"done in {seconds(job.seconds)}{f': {job.reason}' if job.reason else ''}"
    if job.state == FAILED:
        return f"failed: {job.reason}"
    if job.state in (QUEUED, CANCELLED):
        return job.state
    return ", ".join(filter(None, (f"{100 * job.share:.0f} %", job.what)))
