"""The pre-warm queue as markup, and watching it."""
from __future__ import annotations

import re

from panel_builders import text_of

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
