"""Makes Stable Diffusion's UNet fast without changing its images.

For users of diffusers: compile_pipe(pipe), compile_unet(unet), sampling(unet) for their own loops, and
quality.compare(image, other). The WebUI extension in scripts/ uses the same code.
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
    """The object of public.py with this name, for names in __all__; any other name raises AttributeError.

    The first use imports public.py, and with it torch. So `python -m lib_onediff.demo` can report a wrong argument or a
    port in use, and handle Ctrl-C, without waiting for torch.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import public

    return getattr(public, name)


def __dir__() -> list[str]:
    """The module's names for dir(), including those that __getattr__ has not imported yet."""
    return sorted({*globals(), *__all__})
