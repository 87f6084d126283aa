"""Version numbers of a network. Anything derived from the network at other versions must not be used."""
from __future__ import annotations

from typing import NamedTuple


class Epoch(NamedTuple):
    """Three version numbers of a network, each increased by one kind of change. An object derived from the network,
    such as a captured graph, keeps the epoch at which it was made, and is valid while the versions that it depends on
    are the same.

    structure: increased when the module tree or its code computes something else. Graphs, plans and the layout depend
        on it.
    addresses: increased when weights move in memory. Graphs depend on it.
    values: increased when weights change, in place or not. Copies in eight bits and cached deep features depend on it.
    """

    structure: int = 0
    addresses: int = 0
    values: int = 0
