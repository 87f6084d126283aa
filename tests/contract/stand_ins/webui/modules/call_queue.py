"""The lock that a thread holds while it makes images."""
from __future__ import annotations

import threading

queue_lock = threading.Lock()
