"""sgm's classes, which are copies of ldm's: the same code runs again in this module."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

origin = find_spec("ldm.modules.diffusionmodules.model").origin
exec(compile(Path(origin).read_text(), origin, "exec"))
