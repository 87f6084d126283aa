"""Version numbers of a network: what was derived from it at other versions must not be used."""
from __future__ import annotations

from typing import NamedTuple


class Epoch(NamedTuple):
    """Three versions of a network, each raised by one kind of change. What is derived from the network keeps the epoch
    that it was made at, and holds as long as the versions do that it depends on.

    structure: what the module tree computes. Graphs, plans and the layout depend on it.
    addresses: where weights lie. A graph that was captured over others must not be replayed.
    values: what the weights are, edited in place or not. Copies in eight bits and what a cut keeps depend on them.
    """

    structure: int = 0
    addresses: int = 0
    values: int = 0
