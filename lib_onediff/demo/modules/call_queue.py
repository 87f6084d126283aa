"""One generation at a time; gradio's queue keeps their order."""
from __future__ import annotations

import threading

queue_lock = threading.Lock()
