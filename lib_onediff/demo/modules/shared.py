"""The host's shared objects: command line, options and the file that keeps them, the loaded model, and what the host is
doing now."""
from __future__ import annotations

import argparse
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("onediff")


@dataclass
class OptionInfo:
    """One option: its default, how the settings tab shows it, and what to call when it changes."""

    default: Any
    label: str
    component: Any
    component_args: dict[str, Any]
    section: tuple[str, str]
    onchange: Callable[[], None] = lambda: None
    explanation: str = ""

    def info(self, text: str) -> OptionInfo:
        """Add an explanation."""
        self.explanation = text
        return self


class Options:
    """The values of all options, as attributes; data_labels holds their OptionInfo, data what was set, and is saved."""

    def __init__(self) -> None:
        self.data_labels: dict[str, OptionInfo] = {}
        self.data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __getattr__(self, key: str) -> Any:
        if key in self.data:
            return self.data[key]
        if key in self.data_labels:
            return self.data_labels[key].default
        raise AttributeError(key)

    def add_option(self, key: str, info: OptionInfo) -> None:
        """Register an option; a value that was loaded before stays."""
        self.data_labels[key] = info
        self.data.setdefault(key, info.default)

    def set(self, key: str, value: Any) -> bool:
        """Set an option and call its onchange, which takes back what it does not accept; whether the option changed."""
        info = self.data_labels[key]
        if getattr(self, key) == value:
            return False
        self.data[key] = value
        info.onchange()
        return bool(getattr(self, key) == value)

    def set_and_save(self, values: dict[str, Any], filename: str) -> tuple[list[str], list[str], str]:
        """Set options and save all as JSON: the labels of those that changed, a sentence for each that does not take
        its value, and why they could not be saved, or ""."""
        changed = []
        refused = []
        trouble = ""
        with self._lock:
            for key, value in values.items():
                label = self.data_labels[key].label
                if self.set(key, value):
                    changed.append(label)
                elif getattr(self, key) != value:
                    refused.append(f"{label} did not accept {value!r}.")
            try:
                self.save(filename)
            except OSError as error:
                trouble = f"The options hold until the server ends; they could not be saved ({error.strerror})."
        return changed, refused, trouble

    def save(self, filename: str) -> None:
        """Write all values, as JSON. Raises OSError."""
        path = Path(filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may share the folder.
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(self.data, indent=4), encoding="utf-8")
        os.replace(unfinished, path)

    def load(self, filename: str) -> None:
        """Read values from such a file, before options are added; a damaged file is set aside."""
        path = Path(filename)
        try:
            if path.exists() and not path.is_file():
                # A pipe would be waited for.
                raise ValueError("it is no file")
            self.data.update(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, RecursionError) as error:
            aside = path.with_suffix(".damaged")
            os.replace(path, aside)
            log.warning("the settings in %s cannot be read (%s) and are now %s; defaults are used", path, error, aside)


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
