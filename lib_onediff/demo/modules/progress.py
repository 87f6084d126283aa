"""The images that wait for their turn, by the names of their tasks."""
from __future__ import annotations

import time

# name of the task -> when it was asked for
pending_tasks: dict[str, float] = {}


def add_task_to_queue(task: str) -> None:
    pending_tasks[task] = time.time()


def start_task(task: str) -> None:
    """The task has its turn."""
    pending_tasks.pop(task, None)
