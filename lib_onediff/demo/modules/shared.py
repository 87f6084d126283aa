"""Objects that scripts share with the demo: the command line's options, the settings and their file, the loaded model,
and the state of the generation in progress."""
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
    """A setting: its default, its component in the settings tab, and a function that is called when it changes.

    component: a gradio class, with its arguments component_args. section: (id, title) of a WebUI's settings page; not
    used here. onchange: may set the option back, to refuse a value.
    """

    default: Any
    label: str
    component: Any
    component_args: dict[str, Any]
    section: tuple[str, str]
    onchange: Callable[[], None] = lambda: None
    explanation: str = ""

    def info(self, text: str) -> OptionInfo:
        """Set the explanation, HTML that the settings tab shows without its tags. Returns this object."""
        self.explanation = text
        return self


class Options:
    """The values of all settings, as attributes: opts.NAME.

    data_labels: each setting's OptionInfo, by name. data: the values by name, which are saved; also values of the file
        that belong to no setting.
    """

    def __init__(self) -> None:
        self.data_labels: dict[str, OptionInfo] = {}
        self.data: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __getattr__(self, key: str) -> Any:
        """The value of a setting, or its default. Raises AttributeError for an unknown one."""
        if key in self.data:
            return self.data[key]
        if key in self.data_labels:
            return self.data_labels[key].default
        raise AttributeError(key)

    def add_option(self, key: str, info: OptionInfo) -> None:
        """Add a setting, with its default value unless a value was loaded from the file before."""
        self.data_labels[key] = info
        self.data.setdefault(key, info.default)

    def set(self, key: str, value: Any) -> bool:
        """Set a value and call the setting's onchange, which may set it back. Returns whether the setting has changed
        to this value; False also if it had it before. Raises KeyError for an unknown setting."""
        info = self.data_labels[key]
        if getattr(self, key) == value:
            return False
        self.data[key] = value
        info.onchange()
        return bool(getattr(self, key) == value)

    def set_and_save(self, values: dict[str, Any], filename: str) -> tuple[list[str], list[str], str]:
        """Set values, given by name, and save all settings to a file as JSON. Returns (the labels of the settings that
        changed, a sentence for each setting that did not accept its value, a sentence on why the file could not be
        written or "")."""
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
                trouble = f"The settings could not be saved ({error.strerror}); they apply until the demo ends."
        return changed, refused, trouble

    def save(self, filename: str) -> None:
        """Write all values to a file as JSON, atomically; its folder is made if it does not exist. Raises OSError."""
        path = Path(filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The name has the process's id, because another process may use the same folder.
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        unfinished.write_text(json.dumps(self.data, indent=4), encoding="utf-8")
        os.replace(unfinished, path)

    def load(self, filename: str) -> None:
        """Read values from a file that save() has written; none if there is no file. A file that cannot be read gets
        the suffix .damaged in place of its own, and a warning is logged. Call it before settings are added."""
        path = Path(filename)
        try:
            if path.exists() and not path.is_file():
                # Reading a pipe would wait for its other end.
                raise ValueError("it is not a regular file")
            self.data.update(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError, RecursionError) as error:
            aside = path.with_suffix(".damaged")
            os.replace(path, aside)
            log.warning(
                "the file of settings %s cannot be read (%s): it is now %s; the defaults are used", path, error, aside
            )


@dataclass
class State:
    """The state of the generation in progress; call_queue.queue_lock allows one at a time.

    job: the generation's name; "" if there is none in progress.
    interrupted: whether the user has stopped it. skipped: False here; scripts read it.
    job_no, job_count: the number of batches that are done, and of all batches.
    sampling_step, sampling_steps: the number of steps of the batch that are done, and of all its steps.
    """

    job: str = ""
    interrupted: bool = False
    skipped: bool = False
    job_no: int = 0
    job_count: int = 0
    sampling_step: int = 0
    sampling_steps: int = 0

    def begin(self, job: str) -> None:
        """Start a job: set its name, and all other attributes to their defaults."""
        vars(self).update(vars(State(job)))

    def end(self) -> None:
        """End the job: set all attributes but `interrupted`, which callers read afterwards, to their defaults."""
        vars(self).update(vars(State(interrupted=self.interrupted)))

    def interrupt(self) -> None:
        """Ask the generation in progress to stop after its current step."""
        self.interrupted = True

    def share_done(self) -> float:
        """The share of the job's steps that are done, over all its batches, from 0 to 1."""
        batch = self.sampling_step / max(1, self.sampling_steps)
        return min(1.0, (self.job_no + batch) / max(1, self.job_count))


# Set by server.make_app: the command line's options, and the file of the settings.
cmd_opts = argparse.Namespace()
config_filename = ""
opts = Options()
state = State()
# The LoadedModel; set by sd_models.use_model.
sd_model: Any = None
