"""What users put on a UNet that our forward computes itself: image prompts."""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class ImagePrompt:
    """What an IP-Adapter (Ye et al. 2023, arXiv 2308.06721) adds to cross attentions: a second attention, from the same
    queries to the tokens of an image.

    key_values: (batch, tokens, sum of the widths of all parts); of each part keys, then values. The adapter's scale is
    a factor of the values.
    parts: first column and width of each cross attention's part, by the path of its query.
    """

    key_values: Tensor
    parts: Mapping[str, tuple[int, int]]

    def key_value(self, query_path: str) -> tuple[Tensor, Tensor] | None:
        """Keys and values for a cross attention, (batch, tokens, width) each; None where the adapter leaves it
        alone."""
        part = self.parts.get(query_path)
        if part is None:
            return None
        key, value = self.key_values.narrow(-1, *part).chunk(2, dim=-1)
        return key, value

    def map(self, change: Callable[[Tensor], Tensor]) -> ImagePrompt:
        """The same with change(key_values) in their place."""
        return replace(self, key_values=change(self.key_values))

    @cached_property
    def structure(self) -> str:
        tokens = self.key_values.shape[1]
        return f"an image prompt of {tokens} tokens in {len(self.parts)} attentions ({digest(self.parts)})"


def digest(names: Collection[str]) -> str:
    """What tells one set of layers from another, in eight letters."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:8]
