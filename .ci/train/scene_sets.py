"""Chooses many scenes, and tokenises their captions, in parallel on all cores."""
from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy
import torch
from captions import HeldOut, SceneSource
from numpy.typing import NDArray
from scenes import Batch, batch_of
from sources import Catalogue, read_catalogue
from torch import Tensor
from vocabulary import POSITIONS, read_tokenizer, tokens_of

PART, FEW_PARTS = 2000, 2
# As arrays: tensors would travel between processes in shared memory, of which there may be little.
Part = tuple[list[NDArray[Any]], NDArray[Any] | None]


def drawn(data: Path, most_emoji: int | None, seed: int, number: int, tokenizer: Path | None) -> tuple[Batch, Tensor]:
    """`number` scenes, and the tokens (number, POSITIONS) of their captions if a tokenizer is given. On the CPU."""
    sizes = [min(PART, number - start) for start in range(0, number, PART)]
    tasks = [(data, most_emoji, seed * 1_000_003 + part, size, tokenizer) for part, size in enumerate(sizes)]
    if len(tasks) <= FEW_PARTS:
        parts = list(map(draw_part, tasks))
    else:
        if tokenizer is not None:
            read_tokenizer(tokenizer)  # imported once, before the processes are forked
        with ProcessPoolExecutor(min(os.cpu_count() or 1, len(tasks))) as pool:
            parts = list(pool.map(draw_part, tasks))
    names = [each.name for each in fields(Batch)]
    columns = [numpy.concatenate([arrays[place] for arrays, _ in parts]) for place in range(len(names))]
    batch = Batch(*map(torch.from_numpy, columns))
    found = [tokens for _, tokens in parts if tokens is not None]
    tokens = numpy.concatenate(found) if found else numpy.zeros((number, POSITIONS), numpy.int16)
    return batch, torch.from_numpy(tokens)


def draw_part(task: tuple[Path, int | None, int, int, Path | None]) -> Part:
    data, most_emoji, seed, number, tokenizer = task
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)
    catalogue: Catalogue = read_catalogue(data, most_emoji)
    source = SceneSource(catalogue, HeldOut.read(), seed)
    scenes = [source.draw() for _ in range(number)]
    batch = batch_of(scenes)
    tokens = None
    if tokenizer is not None:
        rows = tokens_of(read_tokenizer(tokenizer), [scene.caption for scene in scenes])
        tokens = numpy.array(rows, dtype=numpy.int16)
    return [getattr(batch, each.name).numpy() for each in fields(Batch)], tokens
