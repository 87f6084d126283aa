"""Make Stable Diffusion's UNet fast without changing its images.

compile_pipe(pipe) and compile_unet(unet) for users of diffusers; the WebUI extension in scripts/ uses the same parts.
"""
from __future__ import annotations

from .options.settings import Settings
from .public import compile_pipe, compile_unet, status, uncompile_pipe, uncompile_unet
from .version import __version__

__all__ = ["Settings", "__version__", "compile_pipe", "compile_unet", "status", "uncompile_pipe", "uncompile_unet"]
