"""Train emoji-dit: a transformer of Anima's layout (diffusers' CosmosTransformer3DModel) that draws emoji by flow
matching, with the frozen text encoder and VAE of emoji-sd.

    npm pack @iconify-json/noto@1.2.9 @iconify-json/fluent-emoji-flat@1.2.6 emojibase-data@17.0.0   (then unpack each)
    .venv/bin/pip install resvg_py
    PYTHONPATH=. .venv/bin/python .ci/train/pack.py NOTO FLUENT NAMES emoji.json.xz
    PYTHONPATH=. .venv/bin/python .ci/train/train.py --data emoji.json.xz --out FOLDER --seconds 380 --compile

A trial on a CPU: --emoji 8 --steps 4 --batch 8 --scenes 64 --largest 128 --score 8. FOLDER/transformer is what the
package has in lib_onediff/demo/emoji-dit; loss.csv is the curve of its training.
"""
from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from captions import HeldOut
from raster import Sprites, rasterised
from scene_sets import drawn
from scenes import Batch, compose
from sources import read_catalogue
from torch import Tensor, nn
from vocabulary import read_tokenizer, tokens_of

from lib_onediff.bench.images import JUDGE, SHIPPED
from lib_onediff.bench.judge import load_judge

CONFIG = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 10,
    "mlp_ratio": 2.0, "text_embed_dim": 128, "adaln_lora_dim": 16, "max_size": (1, 64, 64), "patch_size": (1, 2, 2),
    "rope_scale": (1.0, 1.0, 1.0), "concat_padding_mask": False, "extra_pos_embed_type": None,
}
SCALING_FACTOR = 0.18215
REDUCTION = 8
MAIN_SIZE = (32, 32)
# (height, width) of the latents of other sizes: 128 to 512 pixels.
OTHER_SIZES = ((16, 16), (24, 24), (32, 48), (48, 32), (48, 48), (64, 64))
EVERY_OTHER = 10
SHARE_OF_EACH = 0.04
SEED = 41
PEAK_RATE = 1e-3
WARMUP_STEPS = 200
EMPTY_SHARE = 0.1
LONGEST_AVERAGE = 0.9995
# The part of noise is the sigmoid of a normally distributed number (Esser et al. 2024) with this mean. It is above
# zero, because the content of emoji images is decided at high noise.
NOISE_MEAN = 0.5
SHIFT = 3.0
GUIDANCE = 4.0
SAMPLING_STEPS = 32
RUNS_BEFORE = 3
Size = tuple[int, int]


@dataclass(frozen=True)
class Bank:
    """Training data of one size: float16 latents (n, 4, height, width), and the tokens of their captions, (n, 77)."""

    latents: Tensor
    tokens: Tensor

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(self.latents), (count,), device=self.latents.device)
        return self.latents[rows].float(), self.tokens[rows].long()


class Trainer:
    """Trains the network step by step. On a GPU, a step is a CUDA graph of forward, backward and update for each size.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, banks: dict[Size, Bank]) -> None:
        from diffusers import CosmosTransformer3DModel
        from transformers import CLIPTextModel

        self.device = device
        self._batch = options.batch
        self._banks = banks
        self.text: Any = CLIPTextModel.from_pretrained(options.emoji_sd / "text_encoder").to(device).eval()
        self.text.float().requires_grad_(False)
        tokenizer = read_tokenizer(options.emoji_sd / "tokenizer")
        self._empty = torch.tensor(tokens_of(tokenizer, [""]), device=device)
        with torch.device(device):
            self.network: Any = CosmosTransformer3DModel(**CONFIG)
        self._main = torch.compile(self.network, dynamic=False) if options.compile else self.network
        self._values = list(self.network.parameters())
        self._average = [value.detach().clone() for value in self._values]
        fused = device.type == "cuda"
        self._rate = torch.zeros((), device=device)
        self._share = torch.zeros((), device=device)
        self._optimizer = torch.optim.AdamW(
            self._values, lr=self._rate if fused else 0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=fused,
            capturable=fused,
        )
        self._loss = torch.zeros((), device=device)
        self._graphs: dict[Size, Any] = {}
        self.steps = 0

    def prepare(self) -> None:
        """Compile the step and capture its graphs, without changing the weights."""
        if self.device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
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

    def step(self, size: Size, rate: float) -> None:
        self.steps += 1
        self._rate.fill_(rate)
        self._share.fill_(1 - min(LONGEST_AVERAGE, (1 + self.steps) / (10 + self.steps)))
        if self.device.type != "cuda":
            for group in self._optimizer.param_groups:
                group["lr"] = rate
        if size in self._graphs:
            self._graphs[size].replay()
        else:
            self._update(size)

    @property
    def loss(self) -> float:
        return self._loss.item()

    def averaged(self) -> Any:
        """A copy of the network with the running average (EMA) of the weights."""
        found = copy.deepcopy(self.network).eval().requires_grad_(False)
        with torch.no_grad():
            for value, average in zip(found.parameters(), self._average, strict=True):
                value.copy_(average)
        return found

    def _update(self, size: Size) -> None:
        loss = self._loss_of(size)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self._values, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            change = torch._foreach_sub([value.detach() for value in self._values], self._average)
            torch._foreach_mul_(change, self._share)
            torch._foreach_add_(self._average, change)
        self._loss.copy_(loss.detach())

    def _loss_of(self, size: Size) -> Tensor:
        """The mean squared error of the velocity, which is noise - image, for a random batch of this size."""
        height, width = size
        count = max(1, self._batch * MAIN_SIZE[0] * MAIN_SIZE[1] // (height * width))
        latents, tokens = self._banks[size].draw(count)
        device = latents.device
        tokens = torch.where(torch.rand(count, 1, device=device) < EMPTY_SHARE, self._empty, tokens)
        share = torch.sigmoid(torch.randn(count, device=device) + NOISE_MEAN)
        noise = torch.randn_like(latents)
        noisy = torch.lerp(latents, noise, share.view(-1, 1, 1, 1))
        network = self._main if size == MAIN_SIZE else self.network
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                context = self.text(tokens).last_hidden_state
            found = velocity(network, noisy, share, context)
        return (found.float() - (noise - latents)).square().mean()


def velocity(network: Any, latents: Tensor, share: Tensor, context: Tensor) -> Tensor:
    """The network's output for latents (n, 4, height, width). share: (n,), the part of noise, which is the timestep, as
    in Anima."""
    output = network(
        hidden_states=latents[:, :, None], timestep=share, encoder_hidden_states=context, return_dict=False
    )
    return output[0][:, :, 0]


def make_banks(options: argparse.Namespace, scenes: dict[Size, tuple[Batch, Tensor]], device: torch.device) -> Any:
    from diffusers import AutoencoderKL

    catalogue = read_catalogue(options.data, options.emoji)
    sprites = Sprites(rasterised(catalogue, options.largest), device)
    say("rasterised", {side: tuple(level.shape) for side, level in sprites.sizes.items()})
    vae: Any = AutoencoderKL.from_pretrained(options.emoji_sd / "vae").to(device).float().eval()
    vae = vae.to(memory_format=torch.channels_last)
    banks = {}
    for (height, width), (batch, tokens) in scenes.items():
        batch = batch.to(device)
        at_once = max(1, 128 * 1024 // (height * width))
        found = []
        for start in range(0, len(batch), at_once):
            images = compose(batch[slice(start, start + at_once)], sprites, height * REDUCTION, width * REDUCTION)
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                coded = vae.encode(images.contiguous(memory_format=torch.channels_last))
            found.append((coded.latent_dist.mean.float() * SCALING_FACTOR).half())
        banks[height, width] = Bank(torch.cat(found), tokens.to(device))
    main = banks[MAIN_SIZE].latents.float()
    say("latents", len(main), "deviation", [round(value, 3) for value in main.std((0, 2, 3)).tolist()])
    return banks, vae


@torch.no_grad()
def draw(network: Any, text: Any, vae: Any, tokens: Tensor, noise: Tensor, empty: Tensor) -> Tensor:
    """Images from -1 to 1, sampled by Euler's method in SAMPLING_STEPS steps with guidance, in float32 under autocast.
    """
    device = noise.device
    steps = torch.linspace(1, 0, SAMPLING_STEPS + 1).tolist()
    shares = [SHIFT * share / (1 + (SHIFT - 1) * share) for share in steps]
    latents = noise
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        context = text(torch.cat([empty.expand(len(tokens), -1), tokens])).last_hidden_state
        for share, next_share in zip(shares, shares[1:], strict=False):
            times = torch.full((2 * len(latents),), share, device=device)
            both = velocity(network, torch.cat([latents, latents]), times, context).float()
            without, with_caption = both.chunk(2)
            latents = latents + (next_share - share) * (without + GUIDANCE * (with_caption - without))
        return torch.cat([
            vae.decode(part / SCALING_FACTOR).sample.float().clamp(-1, 1) for part in latents.split(32)
        ])


def score(options: argparse.Namespace, trainer: Trainer, vae: Any) -> None:
    """Evaluate held-out captions: write a sheet of 48 images, and count how many of options.score images the judge
    recognises."""
    from PIL import Image

    held_out = HeldOut.read()
    captions = held_out.captions()
    shown = held_out.names()
    tokenizer = read_tokenizer(options.emoji_sd / "tokenizer")
    network = trainer.averaged()
    judge = load_judge(options.judge, trainer.device)
    alone = len(held_out.backgrounds)
    order = [*range(32), *range(alone, alone + 16), *range(32, alone), *range(alone + 16, len(captions))]
    cases = [(order[number % len(order)], number // len(order)) for number in range(options.score)]
    hits: dict[str, list[bool]] = {"alone": [], "pairs": [], "background": []}
    sheet = []
    for start in range(0, len(cases), 50):
        part = cases[start:start + 50]
        noise = torch.stack([
            torch.randn(4, *MAIN_SIZE, generator=torch.Generator().manual_seed(seed)) for _, seed in part
        ]).to(trainer.device)
        tokens = torch.tensor(tokens_of(tokenizer, [captions[caption] for caption, _ in part]), device=trainer.device)
        images = draw(network, trainer.text, vae, tokens, noise, trainer._empty)
        pixels = (images * 127.5 + 127.5).round().to(torch.uint8)
        sheet += list(pixels.cpu())
        emoji, ground = judge(pixels)
        for (caption, _), logits, grounds in zip(part, emoji, ground, strict=True):
            names, background = shown[caption]
            found = {judge.names[index] for index in logits.topk(len(names)).indices.tolist()}
            hits["alone" if len(names) == 1 else "pairs"].append(found == set(names))
            hits["background"].append(judge.backgrounds[int(grounds.argmax())] == background)
    result = {name: round(100 * sum(each) / max(1, len(each)), 1) for name, each in hits.items()}
    result["all"] = round(100 * sum(hits["alone"] + hits["pairs"]) / max(1, len(cases)), 1)
    say("score", result, "of", len(cases))
    (options.out / "score.json").write_text(json.dumps({**result, "images": len(cases)}))
    rows = [torch.cat(sheet[start:start + 8], 2) for start in range(0, min(48, len(sheet)) // 8 * 8, 8)]
    if rows:
        Image.fromarray(torch.cat(rows, 1).permute(1, 2, 0).numpy()).resize((1280, 160 * len(rows))).save(
            options.out / "sheet.jpg", quality=90
        )


def save(options: argparse.Namespace, trainer: Trainer) -> None:
    folder = options.out / "transformer"
    trainer.averaged().half().save_pretrained(folder)
    say("saved", sum(file.stat().st_size for file in folder.iterdir()), "bytes")


BEGAN = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - BEGAN:.0f} s]", *words, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--emoji-sd", type=Path, default=SHIPPED)
    parser.add_argument("--judge", type=Path, default=JUDGE)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--emoji", type=int)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--scenes", type=int, default=120_000)
    parser.add_argument("--largest", type=int, default=256)
    parser.add_argument("--score", type=int, default=500)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    tokenizer = options.emoji_sd / "tokenizer"
    counts = {MAIN_SIZE: options.scenes}
    for height, width in OTHER_SIZES:
        counts[height, width] = max(1, int(options.scenes * SHARE_OF_EACH * min(1.0, 1024 / (height * width))))
    # Before the GPU is used, because this forks processes.
    scenes = {
        size: drawn(options.data, options.emoji, SEED + number, count, tokenizer)
        for number, (size, count) in enumerate(counts.items())
    }
    say("scenes", sum(counts.values()))
    banks, vae = make_banks(options, scenes, device)
    trainer = Trainer(options, device, banks)
    say("parameters", sum(value.numel() for value in trainer.network.parameters()))
    trainer.prepare()
    say("ready")
    began = time.monotonic()
    curve = []
    while True:
        elapsed = time.monotonic() - began
        if elapsed > options.seconds or trainer.steps == options.steps:
            break
        size = MAIN_SIZE
        if trainer.steps % EVERY_OTHER == EVERY_OTHER - 1:
            size = OTHER_SIZES[trainer.steps // EVERY_OTHER % len(OTHER_SIZES)]
        rise = min(1.0, (trainer.steps + 1) / WARMUP_STEPS)
        fall = max(0.0, (elapsed / options.seconds - 0.5) / 0.5)
        trainer.step(size, PEAK_RATE * rise * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * fall))))
        if trainer.steps % 250 == 1 or trainer.steps == options.steps:
            curve.append((trainer.steps, round(elapsed, 1), round(trainer.loss, 5)))
            say("step", *curve[-1])
            if not math.isfinite(curve[-1][-1]):
                sys.exit("the loss is not finite")
    if device.type == "cuda":
        torch.cuda.synchronize()
    say("trained", trainer.steps, "steps")
    with (options.out / "loss.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("step", "seconds", "loss"), *curve])
    save(options, trainer)
    score(options, trainer, vae)


if __name__ == "__main__":
    main()
