"""The demo: a small WebUI over a diffusers pipeline, which runs the same script of OneDiff as A1111."""
from __future__ import annotations

from pathlib import Path

# The models that ship with OneDiff; a README in each folder says how it was trained. emoji-dit is a transformer, which
# is used with the text encoder and the VAE of emoji-sd.
SHIPPED = Path(__file__).with_name("emoji-sd")
EMOJI_DIT = Path(__file__).with_name("emoji-dit")
# A CFG scale that suits emoji-sd and emoji-dit.
SHIPPED_CFG_SCALE = 4.0
