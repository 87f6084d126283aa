"""sgm's UNet classes, which are copies of ldm's: this module executes ldm's source again, with sgm's attention."""
from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

origin = find_spec("ldm.modules.diffusionmodules.openaimodel").origin
source = Path(origin).read_text().replace("from ldm.modules.attention import", "from sgm.modules.attention import")
exec(compile(source, origin, "exec"))
