"""The part of A1111's `modules` package that scripts/onediff.py and the demo use, with the names and signatures of
A1111 1.10.1.

Scripts import it as top-level `modules`: see modules_importable. The demo's state is in attributes of these modules,
because scripts read and set them there.
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
    """A context in which `import modules.shared` and the like import these modules; not any more after it. Raises
    RuntimeError if the process already has a package of this name, as in a real WebUI, or in such a context."""
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
