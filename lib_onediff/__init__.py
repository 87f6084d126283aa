"""Make Stable Diffusion's UNet fast without changing its pictures.

compile_pipe(pipe) and compile_unet(unet) for users of diffusers; the WebUI extension in scripts/ uses the same parts.
"""
from __future__ import annotations

from .public import compile_pipe, compile_unet, status, uncompile_pipe, uncompile_unet
from .settings import Settings

__version__ = "0.1.0"
__all__ = ["Settings", "compile_pipe", "compile_unet", "status", "uncompile_pipe", "uncompile_unet"]
