"""The host's shared objects: command line, options, the loaded model, and what the host is doing now."""
from __future__ import annotations

import argparse
import datetime
from typing import Any

from .options import OptionInfo, Options

__all__ = ["OptionInfo", "cmd_opts", "config_filename", "opts", "sd_model", "state"]


class State:
    """One generation at a time, as queue_lock guarantees; read by the page."""

    def __init__(self) -> None:
        self.begin()
        self.end()

    def begin(self, job: str = "(unknown)") -> None:
        """Start a job; what was interrupted before is forgotten."""
        self.skipped = self.interrupted = False
        self.job, self.job_no, self.job_count = job, 0, -1
        self.job_timestamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S%f")
        self.sampling_step = self.sampling_steps = 0

    def end(self) -> None:
        """Finish the job."""
        self.job, self.job_count = "", 0
        self.sampling_step = self.sampling_steps = 0

    def nextjob(self) -> None:
        """Count a finished batch."""
        self.job_no += 1
        self.sampling_step = 0

    def interrupt(self) -> None:
        """Stop after the current step."""
        self.interrupted = True

    def share_done(self) -> float:
        """How far the job is, from 0 to 1."""
        if self.job_count <= 0:
            return 0.0
        batch = self.sampling_step / self.sampling_steps if self.sampling_steps else 0.0
        return min(1.0, (self.job_no + batch) / self.job_count)


cmd_opts = argparse.Namespace(
    api=True, nowebui=False, gradio_auth=None, data_dir=None, freeze_settings=False
)
config_filename = ""
opts = Options({})
state = State()
sd_model: Any = None
