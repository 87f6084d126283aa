"""See diffusionmodules.openaimodel."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

origin = find_spec("ldm.modules.attention").origin
exec(compile(Path(origin).read_text(), origin, "exec"))
