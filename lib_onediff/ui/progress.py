"""The pre-warm queue on the page: one line per job, renewed while jobs are pending."""
from __future__ import annotations

import html
import time
from collections.abc import Collection, Iterator
from typing import Any

from ..options.sizes import Size
from ..prewarm.job import CANCELLED, DONE, FAILED, QUEUED, TOKENS, Job
from ..prewarm.worker import WarmUp
from . import texts
from .amounts import counted, seconds

SECONDS_BETWEEN_LOOKS = 0.3
LONGEST_WAIT = 2.0
MOST_JOBS_SHOWN, MOST_FINISHED_SHOWN = 25, 8


def watch(warmup: WarmUp, sizes: Collection[Size]) -> Iterator[list[Job]]:
    """The latest job of each of these sizes as it changes, until none of them is pending."""
    watched = set({job.size: job.id for job in warmup.jobs() if job.size in sizes}.values())
    version = -1
    while True:
        version = warmup.wait_for_change(version, LONGEST_WAIT)
        jobs = [job for job in warmup.jobs() if job.id in watched]
        yield jobs
        if not any(job.pending for job in jobs):
            return
        time.sleep(SECONDS_BETWEEN_LOOKS)


def jobs_html(jobs: list[Job], controls: bool = False) -> str:
    """One line per job with its progress. controls: with buttons to cancel and to move, for javascript/onediff.js."""
    pending = [job for job in jobs if job.pending]
    finished = [job for job in jobs if not job.pending][-MOST_FINISHED_SHOWN:]
    shown = [*finished, *pending[:MOST_JOBS_SHOWN]]
    more = len(pending) - len(pending[:MOST_JOBS_SHOWN])
    rest = f'<p class="onediff-reason">and {counted(more, "more job")}</p>' if more else ""
    queue = [job.id for job in jobs if job.state == QUEUED]
    lines = "".join(job_html(job, controls_html(job, queue) if controls else "") for job in shown)
    return f'<div class="onediff-jobs" role="list" aria-label="Pre-warming">{lines}{rest}</div>' if shown else ""


def job_html(job: Job, controls: str = "") -> str:
    """One job: its size, how far it is, and what came of it; a bar only while it is pending. controls: markup."""
    name = html.escape(job_name(job))
    bar = bar_html(int(100 * job.share), f"Pre-warming {name}") if job.pending else ""
    return (
        f'<div class="onediff-job onediff-job-{job.state}" role="listitem"><b>{name}</b>'
        f"{bar}<span>{html.escape(job_sentence(job))}</span>"
        f"{controls}</div>"
    )


def bar_html(percent: int, label: str) -> str:
    """How far something is. label: for screen readers."""
    return (
        f'<div class="onediff-bar" role="progressbar" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}" '
        f'aria-label="{label}"><div style="width: {percent}%"></div></div>'
    )


def controls_html(job: Job, queue: list[int]) -> str:
    """Buttons for a pending job. queue: the ids of those that wait, in their order."""
    if not job.pending:
        return ""
    place = queue.index(job.id) if job.id in queue else None
    moves = "" if place is None else (
        button_html("earlier", job, "↑", "Earlier", disabled=place == 0)
        + button_html("later", job, "↓", "Later", disabled=place == len(queue) - 1)
    )
    return f'<span class="onediff-job-controls">{moves}{button_html("cancel", job, "✕", "Cancel")}</span>'


def button_html(action: str, job: Job, sign: str, name: str, disabled: bool = False) -> str:
    label = html.escape(f"{name}: {job_name(job)}")
    return (
        f'<button type="button" data-onediff="{action} {job.id}" aria-label="{label}" title="{name}"'
        f'{" disabled" if disabled else ""}>{sign}</button>'
    )


def job_name(job: Job) -> str:
    """A job's size for people, with what is not usual about it."""
    return str(job.size) if job.tokens == TOKENS else f"{job.size}, {job.tokens} tokens"


def job_sentence(job: Job) -> str:
    """What there is to say of a job beside its size."""
    if job.state == QUEUED:
        return "queued" if job.estimated_seconds is None else f"queued, takes about {seconds(job.estimated_seconds)}"
    if job.state == DONE:
        return f"done in {seconds(job.seconds)}{f': {job.reason}' if job.reason else ''}"
    if job.state == FAILED:
        return f"failed: {job.reason}"
    if job.state == CANCELLED:
        return "cancelled"
    left = "" if job.estimated_seconds is None else f"about {seconds(job.estimated_seconds)} left"
    return ", ".join(part for part in (f"{100 * job.share:.0f} %", job.what, left) if part)


def sentence(text: str, wrong: bool = False) -> str:
    """A result for the user, announced by screen readers."""
    kind = "onediff-wrong" if wrong else "onediff-right"
    return f'<p class="onediff-result {kind}" role="status">{html.escape(text)}</p>' if text else ""


def whole_number(value: Any, name: str) -> int:
    """A number that somebody has typed or chosen. Raises ValueError with a sentence."""
    try:
        number = float(value)
        if number == int(number):
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(texts.wrong_number(name, value, "a whole number"))
