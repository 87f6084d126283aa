"""Loading a script file as a module of its own."""
from __future__ import annotations

import importlib.util
import os
from types import ModuleType


def load_module(path: str) -> ModuleType:
    """Run the script at path and return it as a module named after its file; what it raises is raised."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path), path)
    assert spec is not None and spec.loader is not None, "scripts are .py files"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
