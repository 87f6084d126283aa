"""sgm's VAE classes. They are copies of ldm's, so this module executes the code of ldm's file."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

origin = find_spec("ldm.modules.diffusionmodules.model").origin
exec(compile(Path(origin).read_text(), origin, "exec"))
