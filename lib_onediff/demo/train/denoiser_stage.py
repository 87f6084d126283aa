"""Training the text encoder and the UNet together, on latents of scenes and the captions of these."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Bank:
    """Latents of one size, in half precision, and the tokens of their captions."""

    latents: Tensor
    tokens: Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.latents), (count,), generator=generator).to(self.latents.device)
        return self.latents[rows].float(), self.tokens[rows].long()


def train_denoiser(setup: Setup) -> None:
    clock = setup.clock("denoiser")
    # Each call draws other scenes: those of one are seen dozens of times.
    drawn = {size: setup.draw(SEED + number + 10 * clock.steps, count, captions=True)
             for number, (size, count) in enumerate(scene_counts(setup.scenes))}
    setup.prepare()
    empty = torch.tensor(tokens_of(read_tokenizer(setup.tokenizer_folder()), [""]), device=setup.device)
    torch.manual_seed(setup.seed + clock.steps)
    banks = make_banks(setup, drawn)
    unet: Any = make_unet().to(setup.device, memory_format=torch.channels_last)
    text: Any = make_text_encoder().to(setup.device)
    learner = Learner({"unet": unet, "text_encoder": text})
    learner.load(setup.folder, "denoiser")
    trainer = Trainer(setup, unet, text, empty)
    generator = torch.Generator().manual_seed(setup.seed + clock.steps)
    trainer.loss(banks[MAIN_SIZE], setup.batch, generator).backward()  # compiled here, outside of the measured time
    clock.start()
    while clock.goes_on():
        bank = banks[MAIN_SIZE]
        if clock.steps % EVERY_OTHER == EVERY_OTHER - 1:
            bank = banks[OTHER_SIZES[clock.steps // EVERY_OTHER % len(OTHER_SIZES)]]
        loss = trainer.loss(bank, setup.batch, generator)
        rate = clock.rate(PEAK_RATE)
        learner.step(loss, rate)
        clock.step(rate, {"loss": loss.detach()})
    clock.save()
    learner.save(setup.folder, "denoiser")
    with learner.averaged():
        export(setup, unet, text)


def scene_counts(scenes: int) -> Iterator[tuple[tuple[int, int], int]]:
    """How many scenes of each size: fewer of the large ones."""
    yield MAIN_SIZE, scenes
    for height, width in OTHER_SIZES:
        yield (height, width), max(1, int(scenes * SHARE_OF_EACH * min(1.0, 1024 / (height * width))))


def make_banks(setup: Setup, drawn: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Bank]:
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(setup.model / "vae", local_files_only=True)
    vae = vae.to(setup.device, torch.float32, memory_format=torch.channels_last).eval().requires_grad_(False)
    banks = {}
    for (height, width), (batch, tokens) in drawn.items():
        latents = latents_of(setup, vae, batch.to(setup.device), height * REDUCTION, width * REDUCTION)
        banks[height, width] = Bank(latents.half(), tokens.to(setup.device))
    main = banks[MAIN_SIZE].latents.float()
    print("latents", len(main), "deviation", main.std((0, 2, 3)).tolist(), flush=True)
    return banks


class Trainer:
    """One loss at a time."""

    def __init__(self, setup: Setup, unet: Any, text: Any, empty: Tensor) -> None:
        self._setup, self._text, self._empty = setup, text, empty
        self._unet = unet
        self._main: Any = torch.compile(unet, dynamic=False) if setup.compiled else unet
        self._signal = make_schedule().alphas_cumprod.to(setup.device)

    def loss(self, bank: Bank, batch: int, generator: torch.Generator) -> Tensor:
        """Of the velocity, with min-SNR weights. batch: at the main size; others have as many pixels."""
        height, width = bank.latents.shape[-2:]
        main = (height, width) == MAIN_SIZE
        count = max(1, batch * MAIN_SIZE[0] * MAIN_SIZE[1] // (height * width))
        latents, tokens = bank.draw(count, generator)
        device = latents.device
        tokens = torch.where(torch.rand(count, 1, device=device) < EMPTY_SHARE, self._empty, tokens)
        steps = torch.randint(len(self._signal), (count,), device=device)
        signal = self._signal[steps].view(-1, 1, 1, 1)
        noise = torch.randn_like(latents)
        noisy = signal.sqrt() * latents + (1 - signal).sqrt() * noise
        velocity = signal.sqrt() * noise - (1 - signal).sqrt() * latents
        with self._setup.autocast():
            context = self._text(tokens).last_hidden_state
            unet = self._main if main else self._unet
            found = unet(noisy.contiguous(memory_format=torch.channels_last), steps, context, return_dict=False)[0]
        ratio = signal / (1 - signal)
        # Of the image's error the velocity's is the ratio + 1 fold: where there is much noise, and what to draw and on
        # which background is decided, all of it counts.
        weight = (MOST_SIGNAL / (ratio + 1)).clamp_max(1)
        return (weight * (found.float() - velocity).square()).mean()
