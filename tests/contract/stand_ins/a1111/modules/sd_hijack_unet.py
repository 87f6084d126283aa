"""The object that A1111 puts in place of torch in the module of ldm's UNet: its cat resizes hidden states to the skip's
size first."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate


class TorchHijackForUnet:
    def __getattr__(self, item: str) -> Any:
        return getattr(torch, item)

    def cat(self, tensors: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        image, skip = tensors
        if image.shape[-2:] != skip.shape[-2:]:
            image = interpolate(image, skip.shape[-2:], mode="nearest")
        return torch.cat([image, skip], *args, **kwargs)


th = TorchHijackForUnet()
