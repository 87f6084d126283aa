"""The generations that wait for their turn, and the one in progress. A task is the unique name of a generation."""
from __future__ import annotations

import threading
import time

# The tasks that wait, and the time.time() at which each was added.
pending_tasks: dict[str, float] = {}
# The task in progress; "" if there is none.
current_task = ""
# The tasks that users have withdrawn while they waited; each is removed when its turn would have come.
withdrawn_tasks: set[str] = set()
# Held while a task is withdrawn or started, so that only one of the two happens to it.
lock = threading.Lock()


def add_task_to_queue(task: str) -> None:
    """Add a task to pending_tasks."""
    pending_tasks[task] = time.time()


def withdraw(task: str) -> None:
    """Withdraw a waiting task, so that start_task returns False at its turn. Does nothing if the task does not wait."""
    with lock:
        if pending_tasks.pop(task, None) is not None:
            withdrawn_tasks.add(task)


def start_task(task: str) -> bool:
    """Make a task current_task and return True; return False if it was withdrawn, and then it must not run. In either
    case, it does not wait any more. The caller holds call_queue.queue_lock, so it is the task's turn."""
    global current_task
    with lock:
        pending_tasks.pop(task, None)
        if task in withdrawn_tasks:
            withdrawn_tasks.discard(task)
            return False
        current_task = task
        return True


def finish_task() -> None:
    """Set current_task to "", because it is over."""
    global current_task
    current_task = ""
