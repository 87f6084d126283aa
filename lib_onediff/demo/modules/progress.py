"""The generations that wait for their turn, and the one in progress."""
from __future__ import annotations

import threading
import time

# The time of each request (time.time()), by the unique name of its task.
pending_tasks: dict[str, float] = {}
# The task in progress; "" if there is none.
current_task = ""
# The tasks that were withdrawn while they waited, until their turn would come.
withdrawn_tasks: set[str] = set()
lock = threading.Lock()


def add_task_to_queue(task: str) -> None:
    """Note that a task waits."""
    pending_tasks[task] = time.time()


def withdraw(task: str) -> None:
    """Withdraw a waiting task, so that start_task returns False at its turn. Does nothing if it does not wait."""
    with lock:
        if pending_tasks.pop(task, None) is not None:
            withdrawn_tasks.add(task)


def start_task(task: str) -> bool:
    """Note that it is a task's turn. Returns False if it was withdrawn."""
    global current_task
    with lock:
        pending_tasks.pop(task, None)
        if task in withdrawn_tasks:
            withdrawn_tasks.discard(task)
            return False
        current_task = task
        return True


def finish_task() -> None:
    """Note that the task in progress is over."""
    global current_task
    current_task = ""
