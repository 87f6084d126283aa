"""Training the VAE: first on windows of images, which see more in the same time, then on whole ones."""
from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...quality.judge import Judge, load_judge
from .learner import Learner
from .networks import LATENT_CHANNELS, SCALING_FACTOR, make_vae
from .scenes import Batch, compose
from .setup import Setup
from .sheets import save_sheet

PEAK_RATE = 8e-4
SIDE, WINDOW = 256, 128
WINDOWS_UNTIL = 0.6
ANY_COLOUR_SHARE = 0.3
EDGES, COLOURS, JUDGED, KL = 0.5, 1.0, 0.05, 4e-4
COLOUR_CELLS = (8, 32)
SEED, SEED_OF_CHECK = 21, 22
MEASURED, CHECKED = 2048, 256


def train_vae(setup: Setup) -> None:
    batch, _ = setup.draw(SEED)
    setup.prepare()
    batch = batch.to(setup.device)
    vae: Any = make_vae().to(setup.device, memory_format=torch.channels_last)
    judge = load_judge(setup.judge, setup.device)
    learner = Learner({"vae": vae})
    learner.load(setup.folder, "vae")
    clock = setup.clock("vae")
    sprites, generator = setup.sprites, setup.generator()
    clock.start()
    while clock.goes_on():
        windows = clock.progress < WINDOWS_UNTIL
        count = max(1, setup.batch // (2 if windows else 8))
        rows = batch[torch.randint(len(batch), (count,), generator=generator).to(setup.device)]
        rows = rows.on_any_colour(ANY_COLOUR_SHARE, generator)
        if windows:
            rows = rows.cropped(WINDOW / SIDE, generator)
        side = WINDOW if windows else SIDE
        images = compose(rows, sprites, side, side).contiguous(memory_format=torch.channels_last)
        with setup.autocast():
            posterior = vae.encode(images).latent_dist
            again = vae.decode(posterior.sample()).sample
        losses = losses_of(images, again.float(), posterior, judge)
        rate = clock.rate(PEAK_RATE)
        learner.step(torch.stack(list(losses.values())).sum(), rate)
        clock.step(rate, losses)
    clock.save()
    learner.save(setup.folder, "vae")
    with learner.averaged():
        finish(setup, vae.eval().requires_grad_(False))


def losses_of(images: Tensor, again: Tensor, posterior: Any, judge: Judge) -> dict[str, Tensor]:
    """What is wrong with images that were encoded and decoded, weighted."""
    colours = torch.stack([
        (functional.avg_pool2d(again, cell) - functional.avg_pool2d(images, cell)).abs().mean()
        for cell in COLOUR_CELLS
    ]).mean()
    divergence = -posterior.logvar.float() + posterior.mean.float().square() + posterior.var.float() - 1
    return {
        "pixels": (again - images).abs().mean(),
        "edges": EDGES * torch.stack([
            (steps(again, dimension) - steps(images, dimension)).abs().mean() for dimension in (2, 3)
        ]).mean(),
        "colours": COLOURS * colours,
        "judged": JUDGED * judge.distance(again, images).mean(),
        "kl": KL * 0.5 * divergence.mean(),
    }


def steps(images: Tensor, dimension: int) -> Tensor:
    """From each pixel to the next."""
    return images.diff(dim=dimension)


@torch.no_grad()
def finish(setup: Setup, vae: Any) -> None:
    """Scale the latents, write the VAE, say how good it is."""
    batch, _ = setup.draw(SEED_OF_CHECK, min(MEASURED, setup.scenes))
    batch = batch.to(setup.device)
    scale_latents(vae, latents_of(setup, vae, batch, SIDE, SIDE))
    vae.to(torch.float16).save_pretrained(setup.model / "vae")
    vae.float()
    checked = batch[slice(0, CHECKED)]
    images = compose(checked, setup.sprites, SIDE, SIDE)
    latents = latents_of(setup, vae, checked, SIDE, SIDE)
    again = decoded(setup, vae, latents)
    result = report(images, again, latents)
    (setup.folder / "vae.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("vae", result, flush=True)
    save_sheet(torch.cat([images[:16], again[:16]]), setup.folder / "vae.png", columns=8, side=128)


@torch.no_grad()
def latents_of(setup: Setup, vae: Any, batch: Batch, height: int, width: int) -> Tensor:
    """(n, 4, height / 8, width / 8): the middle of what the VAE makes of scenes, in float32, times SCALING_FACTOR."""
    at_once = max(1, 64 * SIDE * SIDE // (height * width))
    found = []
    for start in range(0, len(batch), at_once):
        images = compose(batch[slice(start, start + at_once)], setup.sprites, height, width)
        with setup.autocast():
            coded: Any = vae.encode(images.contiguous(memory_format=torch.channels_last))
        found.append(coded.latent_dist.mean.float() * SCALING_FACTOR)
    return torch.cat(found)


@torch.no_grad()
def decoded(setup: Setup, vae: Any, latents: Tensor) -> Tensor:
    """Images from -1 to 1 in float32."""
    found = []
    at_once = max(1, 64 * 32 * 32 // (latents.shape[-1] * latents.shape[-2]))
    for part in latents.split(at_once):
        with setup.autocast():
            images: Any = vae.decode(part / SCALING_FACTOR)
        found.append(images.sample.float().clamp(-1, 1))
    return torch.cat(found)


@torch.no_grad()
def scale_latents(vae: Any, latents: Tensor) -> None:
    """Give every channel of the latents a mean of zero and, times SCALING_FACTOR, a deviation of one, by the two 1x1
    convolutions around them: images stay what they are."""
    mean = latents.mean((0, 2, 3)) / SCALING_FACTOR
    factor = 1 / latents.std((0, 2, 3)).clamp_min(1e-6)
    into, out_of = vae.quant_conv, vae.post_quant_conv
    out_of.bias.add_(out_of.weight[:, :, 0, 0] @ mean)
    out_of.weight.div_(factor.view(1, -1, 1, 1))
    into.bias[:LATENT_CHANNELS].sub_(mean).mul_(factor)
    into.weight[:LATENT_CHANNELS].mul_(factor.view(-1, 1, 1, 1))
    # The logarithm of the variance.
    into.bias[LATENT_CHANNELS:].add_(2 * factor.log())


def report(images: Tensor, again: Tensor, latents: Tensor) -> dict[str, Any]:
    """Errors over all and of each colour, and each latent channel's mean and deviation."""
    error = ((again - images) / 2).square().mean((1, 2, 3)).clamp_min(1e-10)
    psnr = -10 * error.log10()
    colour = ((again - images).mean((2, 3)) / 2).abs()

    def rounded(values: Tensor, digits: int = 4) -> list[float]:
        return [round(value, digits) for value in values.tolist()]

    return {
        "psnr_mean": round(psnr.mean().item(), 2), "psnr_worst": round(psnr.min().item(), 2),
        "colour_error_mean_rgb": rounded(colour.mean(0)), "colour_error_worst_rgb": rounded(colour.amax(0)),
        "latent_mean": rounded(latents.mean((0, 2, 3))), "latent_deviation": rounded(latents.std((0, 2, 3))),
        "images": len(images),
    }
