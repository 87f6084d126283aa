"""The images that wait for their turn and the one that has it, by the names of their tasks."""
from __future__ import annotations

import threading
import time

# name of the task -> when it was asked for
pending_tasks: dict[str, float] = {}
# "" while no image is made.
current_task = ""
# Tasks that were taken back while they waited, until it would be their turn.
withdrawn_tasks: set[str] = set()
lock = threading.Lock()


def add_task_to_queue(task: str) -> None:
    pending_tasks[task] = time.time()


def withdraw(task: str) -> None:
    """Take a task back that waits; does nothing for one that does not."""
    with lock:
        if pending_tasks.pop(task, None) is not None:
            withdrawn_tasks.add(task)


def start_task(task: str) -> bool:
    """Give a task its turn; returns False for one that was taken back."""
    global current_task
    with lock:
        pending_tasks.pop(task, None)
        if task in withdrawn_tasks:
            withdrawn_tasks.discard(task)
            return False
        current_task = task
        return True


def finish_task() -> None:
    """The task that had its turn is over."""
    global current_task
    current_task = ""
