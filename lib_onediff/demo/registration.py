"""Makes the host's `modules` importable under the name that scripts know, while the host runs."""
from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import modules as package

TOP_NAME = "modules"
OLD_NAMES = {"generation_parameters_copypaste": "infotext_utils"}


@contextmanager
def modules_importable() -> Iterator[None]:
    """Inside, `import modules.shared` and the like give this host's modules. Not for use inside a real WebUI."""
    if TOP_NAME in sys.modules:
        raise RuntimeError("another WebUI's modules are loaded in this process")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    added = {TOP_NAME: package}
    added.update({f"{TOP_NAME}.{name}": importlib.import_module(f"{package.__name__}.{name}") for name in names})
    for old, name in OLD_NAMES.items():
        added[f"{TOP_NAME}.{old}"] = added[f"{TOP_NAME}.{name}"]
        setattr(package, old, added[f"{TOP_NAME}.{name}"])
    sys.modules.update(added)
    try:
        yield
    finally:
        for name in added:
            sys.modules.pop(name, None)
        for old in OLD_NAMES:
            delattr(package, old)
