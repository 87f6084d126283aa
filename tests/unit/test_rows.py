"""The rows of the Cache page's table: which shapes belong to a row, what it shows of them, and that reading the rows
does not wait for a call."""
from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import torch
from builders import a_call, served
from torch import nn

from lib_onediff.core.key import ShapeKey
from lib_onediff.core.table import Entry, State, Verdict
from lib_onediff.families.unet.call import UNetCall
from lib_onediff.runtime.rows import ResolutionRow, rows_of
from lib_onediff.runtime.runtime import runtime

SECONDS = 60


def an_entry(
    width: int = 64, height: int = 64, batch: int = 2, tokens: int = 77, model: str = "SD1", **others: Any
) -> Entry:
    """An entry of the runtime's table. others: fields of the entry, or of its verdict."""
    call = UNetCall(
        latent=torch.empty(batch, 4, height // 8, width // 8), timestep=torch.empty(batch),
        context=torch.empty(batch, tokens, 48),
    )
    found = {name: others.pop(name) for name in set(others) & {part.name for part in fields(Verdict)}}
    return Entry(ShapeKey.of(model, torch.float16, call), model=model, verdict=Verdict(**found), **others)


def test_each_model_and_resolution_has_one_row_and_the_last_used_row_comes_first() -> None:
    rows = rows_of([
        an_entry(64, 72, last_used=10), an_entry(64, 72, batch=1, last_used=40), an_entry(72, 64, last_used=20),
        an_entry(64, 72, model="SDXL", last_used=30), an_entry(64, 72, tokens=154, last_used=5),
    ])
    assert [(row.model, row.resolution, row.last_used) for row in rows] == [
        ("SD1", "64x72", 40), ("SDXL", "64x72", 30), ("SD1", "72x64", 20),
    ]
    assert [(shape.batch, shape.tokens) for shape in rows[0].shapes] == [(1, 77), (2, 77), (2, 154)]


def test_a_row_has_the_best_state_and_the_latest_reason_of_its_shapes() -> None:
    """The states from worst to best: "failed", "cold" (not checked yet), "proved" (checked against the host), "ready"
    (has a graph as well). The reason is that of the most recently used shape that has one, even if another shape is
    ready."""

    def row_of(*entries: Entry) -> ResolutionRow:
        (row,) = rows_of(entries)
        return row

    failed = an_entry(batch=4, state=State.FAILED, reason="differs by 3", last_used=9)
    cold = an_entry(batch=1)
    proved = an_entry(state=State.PROVED)
    ready = an_entry(batch=3, state=State.READY)
    assert (row_of(failed).state, row_of(failed).reason) == ("failed", "differs by 3")
    assert row_of(failed, cold).state == "cold"
    assert row_of(cold, proved, failed).state == "proved"
    mixed = row_of(proved, ready, failed)
    assert (mixed.state, mixed.reason) == ("ready", "differs by 3")
    assert row_of(an_entry(state=State.PROVED, no_graph="no room")).reason == "no room"
    assert row_of(ready, proved).reason == ""


def a_decode(model: str, batch: int, last_used: float) -> Entry:
    key = ShapeKey.of_decode(model, torch.empty(batch, 4, 9, 8), False, "eager", torch.float16, (), ())
    return Entry(key, model=model, last_used=last_used)


def test_shapes_of_the_vae_are_in_the_row_of_the_unet_or_transformer_at_their_resolution() -> None:
    """A row's time of last use is that of the model's calls alone, not of decodes or encodes. If no model has a row at
    this resolution, the VAE's decoder and encoder have a row each."""
    decodes = [a_decode("VAE decoder", 1, 50), a_decode("VAE encoder", 2, 10)]
    (row,) = rows_of([an_entry(64, 72, last_used=20), *decodes])
    assert (row.model, row.last_used) == ("SD1", 20)
    assert [(shape.batch, shape.tokens) for shape in row.shapes] == [(2, 77), (1, 0), (2, 0)]
    assert [row.model for row in rows_of(decodes)] == ["VAE decoder", "VAE encoder"]


def test_reading_the_rows_does_not_wait_for_a_call_in_progress(unet: nn.Module) -> None:
    """Another thread holds the runtime's lock, as a call in progress does."""
    for _ in range(3):
        served(unet, a_call(unet))
    before = [row.bytes for row in runtime.rows()], runtime.totals().vram
    held = threading.Event()
    done = threading.Event()

    def call() -> None:
        with runtime.services.lock:
            held.set()
            done.wait(SECONDS)

    thread = threading.Thread(target=call)
    thread.start()
    held.wait(SECONDS)
    try:
        assert ([row.bytes for row in runtime.rows()], runtime.totals().vram) == before
        assert thread.is_alive(), "the page had to wait for the end of the call"
    finally:
        done.set()
        thread.join()
