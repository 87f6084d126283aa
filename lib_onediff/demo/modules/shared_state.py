"""What the host is doing now: the job, the step, and whether the user asked it to stop."""
from __future__ import annotations

import datetime
import time
from typing import Any

from torch import Tensor

STOP = "stop"


class State:
    """One generation at a time, as queue_lock guarantees; read by the progress endpoint and the page."""

    def __init__(self) -> None:
        self.skipped = False
        self.interrupted = False
        self.stopping_generation = False
        self.job = ""
        self.job_no = 0
        self.job_count = 0
        self.job_timestamp = "0"
        self.sampling_step = 0
        self.sampling_steps = 0
        self.current_latent: Tensor | None = None
        self.current_image = None
        self.textinfo: str | None = None
        self.time_start: float | None = None
        self.server_start = time.time()
        # A1111's name: STOP once the server ends.
        self.server_command: str | None = None

    def begin(self, job: str = "(unknown)") -> None:
        """Start a job; what was interrupted before is forgotten."""
        self.skipped = self.stopping_generation = False
        self.interrupted = self.server_command == STOP
        self.job, self.job_no, self.job_count = job, 0, -1
        self.job_timestamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        self.sampling_step = self.sampling_steps = 0
        self.current_latent = self.current_image = self.textinfo = None
        self.time_start = time.time()

    def end(self) -> None:
        """Finish the job."""
        self.job, self.job_count = "", 0
        self.sampling_step = self.sampling_steps = 0
        self.current_latent = None

    def nextjob(self) -> None:
        """Count a finished batch."""
        self.job_no += 1
        self.sampling_step = 0

    def interrupt(self) -> None:
        """Stop after the current step."""
        self.interrupted = True

    def stop_server(self) -> None:
        """Stop after the current step, and begin nothing more."""
        self.server_command = STOP
        self.interrupt()

    def skip(self) -> None:
        """Stop the current batch after its current step."""
        self.skipped = True

    def dict(self) -> dict[str, Any]:
        """The state as the progress endpoint shows it."""
        return {
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "stopping_generation": self.stopping_generation,
            "job": self.job,
            "job_count": self.job_count,
            "job_timestamp": self.job_timestamp,
            "job_no": self.job_no,
            "sampling_step": self.sampling_step,
            "sampling_steps": self.sampling_steps,
        }
