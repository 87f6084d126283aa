"""A small WebUI over a diffusers pipeline: how a newcomer sees the product. It loads the script that A1111 loads."""
from __future__ import annotations

from pathlib import Path

# The models that ship; their README says how they were trained. The second is a transformer, with the first one's other
# parts.
SHIPPED = Path(__file__).with_name("emoji-sd")
EMOJI_DIT = Path(__file__).with_name("emoji-dit")
