"""The host's shared objects: command line, options, state and the loaded model."""
from __future__ import annotations

import argparse
from typing import Any

from .options import OptionInfo, Options, options_section
from .shared_state import State

__all__ = ["OptionInfo", "cmd_opts", "config_filename", "opts", "options_section", "sd_model", "state"]

cmd_opts = argparse.Namespace(
    api=True, nowebui=False, api_auth=None, gradio_auth=None, gradio_auth_path=None, data_dir=None,
    freeze_settings=False,
)
config_filename = ""
opts = Options(
    options_section(
        ("saving-images", "Saving images"),
        {"samples_save": OptionInfo(True, "Save every picture made on the page to the data folder")},
    )
)
state = State()
sd_model: Any = None
