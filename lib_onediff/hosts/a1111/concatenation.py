"""What extensions put in the place of the function that concatenates hidden states and skips; FreeU does."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

Concatenation = Callable[..., Tensor]
# What sd-webui-freeu leaves there as long as the WebUI runs.
FREEU = "free_u_cat_hijack"


def replaced_concatenation() -> Concatenation | None:
    """What stands for torch.cat in the modules of A1111's UNets; None where that is the WebUI's own, or does now just
    what the WebUI's own does. Microseconds."""
    from modules import sd_hijack_unet

    standing: Concatenation = sd_hijack_unet.th.cat
    return None if is_the_hosts(standing, vars(sd_hijack_unet)) else standing


def is_the_hosts(standing: Any, own_globals: dict[str, Any]) -> bool:
    """Whether a function is one of the module with these globals, below FreeU's while that is switched off."""
    if getattr(getattr(standing, "__func__", None), "__globals__", None) is own_globals:
        return True
    if not isinstance(standing, functools.partial) or getattr(standing.func, "__name__", "") != FREEU:
        return False
    state = getattr(standing.func.__globals__.get("global_state"), "instance", None)
    below = standing.keywords.get("original_function")
    return not getattr(state, "enable", True) and is_the_hosts(below, own_globals)
