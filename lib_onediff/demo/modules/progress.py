"""The generations that wait for their turn, and the one in progress. A task is the unique name of a generation."""
from __future__ import annotations

import threading
import time

# The time of each request (time.time()), by the unique name of its task.
pending_tasks: dict[str, float] = {}
# The task in progress; "" if there is none.
current_task = ""
# The tasks that users have withdrawn while they waited; each is removed when its turn would have come.
withdrawn_tasks: set[str] = set()
lock = threading.Lock()


def add_task_to_queue(task: str) -> None:
    """Add a task to those that wait."""
    pending_tasks[task] = time.time()


def withdraw(task: str) -> None:
    """Withdraw a waiting task, so that start_task returns False at its turn. Does nothing if the task does not wait."""
    with lock:
        if pending_tasks.pop(task, None) is not None:
            withdrawn_tasks.add(task)


def start_task(task: str) -> bool:
    """Make a task the one in progress and return True; return False if it was withdrawn, and then it must not run. Its
    turn has come: the caller holds call_queue.queue_lock."""
    global current_task
    with lock:
        pending_tasks.pop(task, None)
        if task in withdrawn_tasks:
            withdrawn_tasks.discard(task)
            return False
        current_task = task
        return True


def finish_task() -> None:
    """Set that no task is in progress: the current one is over."""
    global current_task
    current_task = ""
