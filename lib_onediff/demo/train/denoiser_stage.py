"""Training the text encoder and the UNet together, on latents of scenes and the captions of these."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .export import export
from .learner import Learner
from .networks import REDUCTION, make_schedule, make_text_encoder, make_unet
from .setup import Setup
from .vae_stage import latents_of
from .vocabulary import read_tokenizer, tokens_of

PEAK_RATE = 1e-3
EMPTY_SHARE = 0.1
# An image's error counts at most so many times where there is little noise (min-SNR, Hang et al. 2023).
MOST_SIGNAL = 5.0
MAIN_SIZE = (32, 32)
# Latents' height and width: 128 to 512 pixels.
OTHER_SIZES = ((16, 16), (24, 24), (32, 48), (48, 32), (48, 48), (64, 64))
EVERY_OTHER = 8
SHARE_OF_EACH = 0.05
SEED = 31
RUNS_BEFORE = 3
Size = tuple[int, int]


@dataclass(frozen=True)
class Bank:
    """Latents of one size, in half precision, and the tokens of their captions."""

    latents: Tensor
    tokens: Tensor

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.latents), (count,), device=self.latents.device)
        return self.latents[rows].float(), self.tokens[rows].long()


def train_denoiser(setup: Setup) -> None:
    clock = setup.clock("denoiser")
    file = setup.cache and setup.cache / f"latents_{setup.scenes}_{setup.seed}.pt"
    drawn = {} if file and file.is_file() else draw_scenes(setup)
    setup.prepare()
    empty = torch.tensor(tokens_of(read_tokenizer(setup.tokenizer_folder()), [""]), device=setup.device)
    torch.manual_seed(setup.seed + clock.steps)
    banks = make_banks(setup, drawn, file)
    unet: Any = make_unet().to(setup.device, memory_format=torch.channels_last)
    text: Any = make_text_encoder().to(setup.device)
    learner = Learner({"unet": unet, "text_encoder": text})
    learner.load(setup.folder, "denoiser")
    trainer = Trainer(setup, unet, text, empty, banks, learner)
    trainer.prepare()
    clock.start()
    while clock.goes_on():
        size = MAIN_SIZE
        if clock.steps % EVERY_OTHER == EVERY_OTHER - 1:
            size = OTHER_SIZES[clock.steps // EVERY_OTHER % len(OTHER_SIZES)]
        rate = clock.rate(PEAK_RATE)
        clock.step(rate, {"loss": trainer.step(size, rate)})
    clock.save()
    learner.save(setup.folder, "denoiser")
    with learner.averaged():
        export(setup, unet, text)


def draw_scenes(setup: Setup) -> dict[Size, Any]:
    return {size: setup.draw(SEED + number, count, captions=True)
            for number, (size, count) in enumerate(scene_counts(setup.scenes))}


def scene_counts(scenes: int) -> Iterator[tuple[Size, int]]:
    """How many scenes of each size: fewer of the large ones."""
    yield MAIN_SIZE, scenes
    for height, width in OTHER_SIZES:
        yield (height, width), max(1, int(scenes * SHARE_OF_EACH * min(1.0, 1024 / (height * width))))


def make_banks(setup: Setup, drawn: dict[Size, Any], file: Path | None) -> dict[Size, Bank]:
    """Latents of all scenes; kept in a file for the next call, and read from it where no scenes are given: a
    cache folder belongs to one VAE."""
    if file and not drawn:
        return {size: Bank(*pair) for size, pair in torch.load(file, map_location=setup.device).items()}
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(setup.model / "vae", local_files_only=True)
    vae = vae.to(setup.device, torch.float32, memory_format=torch.channels_last).eval().requires_grad_(False)
    banks = {}
    for (height, width), (batch, tokens) in drawn.items():
        latents = latents_of(setup, vae, batch.to(setup.device), height * REDUCTION, width * REDUCTION)
        banks[height, width] = Bank(latents.half(), tokens.to(setup.device))
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save({size: (bank.latents.cpu(), bank.tokens.cpu()) for size, bank in banks.items()}, file)
    main = banks[MAIN_SIZE].latents.float()
    print("latents", len(main), "deviation", main.std((0, 2, 3)).tolist(), flush=True)
    return banks


class Trainer:
    """One step at a time: on a GPU a CUDA graph a size, because Python takes longer for a step than the GPU does."""

    def __init__(
        self, setup: Setup, unet: Any, text: Any, empty: Tensor, banks: dict[Size, Bank], learner: Learner
    ) -> None:
        self._setup, self._text, self._empty, self._banks, self._learner = setup, text, empty, banks, learner
        self._unet = unet
        self._main: Any = torch.compile(unet, dynamic=False) if setup.compiled else unet
        self._signal = make_schedule().alphas_cumprod.to(setup.device)
        self._graphs: dict[Size, torch.cuda.CUDAGraph] = {}
        self._loss = torch.zeros((), device=setup.device)

    def prepare(self) -> None:
        """Compile and record before time is measured."""
        self._learner.hold()
        if self._setup.device.type != "cuda":
            return
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in self._banks:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(RUNS_BEFORE):
                    self._update(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._update(size)
            self._graphs[size] = graph

    def step(self, size: Size, rate: float) -> Tensor:
        """Learn from other scenes of this size; their loss, which the next step overwrites."""
        self._learner.schedule(rate)
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._update(size)
        return self._loss

    def _update(self, size: Size) -> None:
        loss = self._loss_of(size)
        self._learner.update(loss)
        self._loss.copy_(loss.detach())

    def _loss_of(self, size: Size) -> Tensor:
        """Of the velocity, with min-SNR weights. Larger images are fewer at a time."""
        height, width = size
        count = max(1, self._setup.batch * MAIN_SIZE[0] * MAIN_SIZE[1] // (height * width))
        latents, tokens = self._banks[size].draw(count)
        device = latents.device
        tokens = torch.where(torch.rand(count, 1, device=device) < EMPTY_SHARE, self._empty, tokens)
        steps = torch.randint(len(self._signal), (count,), device=device)
        signal = self._signal[steps].view(-1, 1, 1, 1)
        noise = torch.randn_like(latents)
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        velocity = signal.sqrt() * noise - (1 - signal).sqrt() * latents
        with self._setup.autocast():
            context = self._text(tokens).last_hidden_state
            unet = self._main if size == MAIN_SIZE else self._unet
            found = unet(noisy.contiguous(memory_format=torch.channels_last), steps, context, return_dict=False)[0]
        ratio = signal / (1 - signal)
        # Of the image's error the velocity's is the ratio + 1 fold: where there is much noise, and what to draw and on
        # which background is decided, all of it counts.
        weight = (MOST_SIGNAL / (ratio + 1)).clamp_max(1)
        return (weight * (found.float() - velocity).square()).mean()
