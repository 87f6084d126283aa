"""The host's shared objects: command line, options, the loaded model, and what the host is doing now."""
from __future__ import annotations

import argparse
import datetime
import time
from typing import Any

from .options import OptionInfo, Options, options_section

__all__ = ["OptionInfo", "cmd_opts", "config_filename", "opts", "options_section", "sd_model", "state"]

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
        self.time_start: float | None = None
        # A1111's name: STOP once the server ends.
        self.server_command: str | None = None

    def begin(self, job: str = "(unknown)") -> None:
        """Start a job; what was interrupted before is forgotten."""
        self.skipped = self.stopping_generation = False
        self.interrupted = self.server_command == STOP
        self.job, self.job_no, self.job_count = job, 0, -1
        self.job_timestamp = datetime.datetime.now().strftime("%Y%m%d%H%M%S")
        self.sampling_step = self.sampling_steps = 0
        self.time_start = time.time()

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

    def stop_server(self) -> None:
        """Stop after the current step, and begin nothing more."""
        self.server_command = STOP
        self.interrupt()

    def dict(self) -> dict[str, Any]:
        """The state as the progress endpoint shows it."""
        return {name: value for name, value in vars(self).items() if name not in ("time_start", "server_command")}


cmd_opts = argparse.Namespace(
    api=True, nowebui=False, api_auth=None, gradio_auth=None, gradio_auth_path=None, data_dir=None,
    freeze_settings=False,
)
config_filename = ""
opts = Options(
    options_section(
        ("saving-images", "Saving images"),
        {"samples_save": OptionInfo(True, "Save every image made on the page to the data folder")},
    )
)
state = State()
sd_model: Any = None
