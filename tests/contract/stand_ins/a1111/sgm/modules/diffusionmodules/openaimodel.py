"""sgm's are ldm's layers in classes of their own: the same code once more, under this name."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

origin = find_spec("ldm.modules.diffusionmodules.openaimodel").origin
source = Path(origin).read_text().replace("from ldm.modules.attention import", "from sgm.modules.attention import")
exec(compile(source, origin, "exec"))
