"""The pre-warm queue as markup, and watching it."""
from __future__ import annotations

import re

import pytest
from panel_builders import Seen, text_of

from lib_onediff.options.sizes import Size
from lib_onediff.prewarm.job import Job
from lib_onediff.ui import progress

JOBS = [
    Job(1, Size(64, 64), "panel", "done", 6, 6, seconds=0.44),
    Job(2, Size(72, 64, 2), "panel", "running", 3, 6, what="measuring", estimated_seconds=2.0),
    Job(3, Size(80, 64), "panel", "failed", 0, 6, "too large"),
    Job(4, Size(88, 64), "panel", "queued", 0, 6, tokens=154),
    Job(5, Size(96, 64), "panel", "queued", 0, 6, estimated_seconds=12.0),
]


def test_jobs_show_progress_and_reasons() -> None:
    markup = progress.jobs_html(JOBS)
    assert text_of(markup) == (
        "64x64 done in 0.4 s 80x64 failed: too large 72x64 x2 50 %, measuring, about 2.0 s left "
        "88x64, 154 tokens queued 96x64 queued, takes about 12 s"
    )
    assert 'aria-valuenow="50"' in markup and markup.count('role="progressbar"') == 3, "bars of what is pending"
    assert "<button" not in markup and progress.jobs_html([]) == ""


def test_pending_jobs_can_be_cancelled_and_moved() -> None:
    markup = progress.jobs_html(JOBS, controls=True)
    buttons = re.findall(r'data-onediff="(\w+ \d)" aria-label="([^"]*)" title="\w+"( disabled)?', markup)
    assert buttons == [
        ("cancel 2", "Cancel: 72x64 x2", ""),
        ("earlier 4", "Earlier: 88x64, 154 tokens", " disabled"), ("later 4", "Later: 88x64, 154 tokens", ""),
        ("cancel 4", "Cancel: 88x64, 154 tokens", ""),
        ("earlier 5", "Earlier: 96x64", ""), ("later 5", "Later: 96x64", " disabled"),
        ("cancel 5", "Cancel: 96x64", ""),
    ]


def test_many_jobs_are_cut_short_and_pending_ones_stay() -> None:
    jobs = [Job(number, Size(64 + 8 * number, 64), "panel", "done" if number < 30 else "queued", 0, 6)
            for number in range(40)]
    text = text_of(progress.jobs_html(jobs))
    assert text.count("queued") == 10 and text.count("done in") == 8 and "more jobs" not in text
    text = text_of(progress.jobs_html(jobs[30:] * 3))
    assert text.count("queued") == 25 and "and 5 more jobs" in text


def test_reasons_are_shown_as_text() -> None:
    evil = "<script>alert('x')</script>"
    assert "<script" not in progress.job_html(Job(1, Size(64, 64), "panel", "failed", reason=evil))
    assert "<script" not in progress.sentence(evil)


@pytest.mark.parametrize("size", [Size(72, 64), Size(64, 64)])
def test_watching_one_size(seen: Seen, size: Size) -> None:
    with seen.webui.lock:
        seen.warmup.add([Size(64, 64), Size(72, 64)], "panel")
        assert [job.size for job in next(progress.watch(seen.warmup, [size]))] == [size]
