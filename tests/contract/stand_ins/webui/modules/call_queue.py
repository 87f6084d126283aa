"""The lock of whoever makes images."""
from __future__ import annotations

import threading

queue_lock = threading.Lock()
