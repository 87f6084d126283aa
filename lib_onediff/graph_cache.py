"""The graphs of every UNet in our care: made when a shape is used again, dropped when memory is asked for."""
from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping

import torch
from torch import nn

from .backends.cudagraph import CudaGraphs, OverBudget
from .care import Care
from .ops import Operators
from .shapes.table import Entry, ShapeTable, State
from .unet.call import UNetCall
from .unet.forward import Conditioning

log = logging.getLogger("onediff")


class GraphCache:
    """Keeps each UNet's graphs with its Care, and the table's states true to them."""

    def __init__(self, table: ShapeTable, cares: Mapping[nn.Module, Care]) -> None:
        self._table = table
        self._cares = cares
        self._graphs = CudaGraphs()

    def capture(
        self, care: Care, entry: Entry, budget: int, ops: Operators, call: UNetCall, conditioning: Conditioning
    ) -> None:
        """Make the graph of a shape; where it does not fit into the budget (MiB), entry.no_graph says so.

        Raises torch.cuda.OutOfMemoryError, and RuntimeError where the forward cannot be captured.
        """
        began = time.perf_counter()
        try:
            runner = self._graphs.prepare_within(budget, self.free, care.bound.binding, ops, call, conditioning)
        except OverBudget as refusal:
            entry.no_graph = str(refusal)
            return
        log.debug("captured %s in %.0f ms", entry.key, (time.perf_counter() - began) * 1e3)
        if runner.bytes:
            # What the plain calls before it left in torch's cache is not needed beside the graph's own memory.
            torch.cuda.empty_cache()
        care.keep(entry.key, conditioning, runner)
        entry.state, entry.bytes = State.READY, runner.bytes

    def note_lost(self) -> None:
        """Graphs go with their UNet when a host unloads it: let the table say so."""
        held = set().union(*(care.ready_keys() for care in self._cares.values()))
        for entry in self._table.entries():
            if entry.state is State.READY and entry.key not in held:
                entry.state, entry.bytes = State.PROVED, 0

    def free(self) -> None:
        """Drop every graph and hand the memory back to the driver; the next call at a shape captures again."""
        for care in self._cares.values():
            care.drop_runners()
        for entry in self._table.entries():
            entry.bytes = 0
            if entry.state is State.READY:
                entry.state = State.PROVED
        self._give_memory_back()

    def forget(self, resolutions: Collection[str] | None) -> int:
        """Drop the graphs and the entries of these resolutions, or of all. Returns the bytes that torch gave back.

        Graphs share one pool: its memory comes back with the last of them.
        """
        reserved = reserved_bytes()
        doomed = {
            entry.key for entry in self._table.entries() if resolutions is None or entry.key.resolution in resolutions
        }
        for care in self._cares.values():
            care.drop_runners(doomed)
        self._table.forget(doomed)
        self._give_memory_back()
        return max(0, reserved - reserved_bytes())

    def _give_memory_back(self) -> None:
        if not any(entry.state is State.READY for entry in self._table.entries()):
            self._graphs.forget_pools()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def reserved_bytes() -> int:
    """What torch holds of the GPUs' memory."""
    return sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))


