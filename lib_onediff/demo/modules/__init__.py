"""The part of the WebUI's `modules` API that scripts/onediff.py and this host use, in A1111 1.10.1's names and shapes.

modules_importable makes them importable as top-level `modules`, which is how scripts know them. Scripts read and set
attributes of these modules, so the host's state lives in them: the API leaves no other place.
"""
from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

TOP_NAME = "modules"


@contextmanager
def modules_importable() -> Iterator[None]:
    """Inside, `import modules.shared` and the like give this host's modules. Not for use inside a real WebUI."""
    if TOP_NAME in sys.modules:
        raise RuntimeError("another WebUI's modules are loaded in this process")
    added = {TOP_NAME: sys.modules[__name__]}
    for module in pkgutil.iter_modules(__path__):
        added[f"{TOP_NAME}.{module.name}"] = importlib.import_module(f"{__name__}.{module.name}")
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)
