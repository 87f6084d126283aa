"""The host's shared objects: command line, options, the loaded model, and what the host is doing now."""
from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from .options import OptionInfo, Options

__all__ = ["OptionInfo", "cmd_opts", "config_filename", "opts", "sd_model", "state"]


@dataclass
class State:
    """What is made now, one generation at a time, as queue_lock guarantees. job: "" for nothing. job_no: how many of
    job_count batches are done. sampling_step: how many of the batch's sampling_steps are done."""

    job: str = ""
    interrupted: bool = False
    skipped: bool = False
    job_no: int = 0
    job_count: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0

    def begin(self, job: str) -> None:
        """Start a job; what was interrupted before is forgotten."""
        vars(self).update(vars(State(job)))

    def end(self) -> None:
        """Finish the job."""
        vars(self).update(vars(State(interrupted=self.interrupted)))

    def interrupt(self) -> None:
        """Stop after the current step."""
        self.interrupted = True

    def share_done(self) -> float:
        """How far the job is, from 0 to 1."""
        batch = self.sampling_step / max(1, self.sampling_steps)
        return min(1.0, (self.job_no + batch) / max(1, self.job_count))


cmd_opts = argparse.Namespace()
config_filename = ""
opts = Options()
state = State()
sd_model: Any = None
