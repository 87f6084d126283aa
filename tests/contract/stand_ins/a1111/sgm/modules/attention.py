"""sgm's attention classes, copies of ldm's: the code of ldm.modules.attention runs again in this module."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

origin = find_spec("ldm.modules.attention").origin
exec(compile(Path(origin).read_text(), origin, "exec"))
