"""What every stage needs: where its files are, the emoji, the device."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from .learner import Clock
from .raster import LARGEST, Sprites, rasterised
from .scene_sets import drawn
from .scenes import Batch
from .sources import Catalogue, read_catalogue
from .vocabulary import read_tokenizer, write_tokenizer

MODEL, JUDGE = "emoji-sd", "judge.safetensors"


@dataclass(frozen=True)
class Setup:
    """folder: what a stage writes, and what it goes on from. data: the emoji, as sources.write_catalogue writes them.

    seconds, total, steps, until: see learner.Clock.
    most_emoji, batch, scenes: less than everything, for a trial. cache: a folder for the pixels of all emoji.
    """

    folder: Path
    data: Path
    seconds: float
    total: float
    steps: int | None = None
    most_emoji: int | None = None
    batch: int = 256
    scenes: int = 100_000
    largest: int = LARGEST
    seed: int = 0
    compiled: bool = False
    cache: Path | None = None
    until: float | None = None

    def clock(self, stage: str) -> Clock:
        return Clock(self.folder, stage, self.seconds, self.total, self.steps, self.until)

    @cached_property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def catalogue(self) -> Catalogue:
        return read_catalogue(self.data, self.most_emoji)

    @cached_property
    def sprites(self) -> Sprites:
        return Sprites(rasterised(self.catalogue, self.largest, self.cache), self.device)

    @property
    def model(self) -> Path:
        return self.folder / MODEL

    @property
    def judge(self) -> Path:
        return self.folder / JUDGE

    def draw(self, seed: int, number: int | None = None, captions: bool = False) -> tuple[Batch, Tensor]:
        """Scenes, and their captions' tokens by a tokenizer for all emoji, on the CPU: processes that draw many must be
        forked before the GPU is used."""
        tokenizer = self.tokenizer_folder() if captions else None
        return drawn(self.data, self.most_emoji, self.seed + seed, number or self.scenes, tokenizer)

    def tokenizer_folder(self) -> Path:
        folder = self.model / "tokenizer"
        if not (folder / "vocab.json").is_file():
            write_tokenizer(read_catalogue(self.data), folder)
            read_tokenizer(folder)
        return folder

    def generator(self) -> torch.Generator:
        """On the CPU, for what all devices draw alike."""
        return torch.Generator().manual_seed(self.seed)

    def prepare(self) -> None:
        """Arithmetic of the device, and its random numbers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(self.seed)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
            torch.backends.cudnn.allow_tf32 = True
            torch.backends.cudnn.benchmark = True

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
