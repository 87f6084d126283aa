"""Make Stable Diffusion's UNet fast without changing its images.

compile_pipe(pipe) and compile_unet(unet) for users of diffusers, sampling(unet) for loops of their own, and
quality.compare(image, other); the WebUI extension in scripts/ uses the same parts.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import (
        Settings,
        __version__,
        compile_pipe,
        compile_unet,
        quality,
        sampling,
        status,
        uncompile_pipe,
        uncompile_unet,
    )

__all__ = [
    "Settings", "__version__", "compile_pipe", "compile_unet", "quality", "sampling", "status", "uncompile_pipe",
    "uncompile_unet",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is asked for: `python -m lib_onediff.demo` must first tell of a wrong
    argument or a port in use, and be ready for Ctrl-C."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import public

    return getattr(public, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
