"""The networks of emoji-sd, how they learn and go on, and the judge."""
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lib_onediff.demo.train import networks
from lib_onediff.demo.train.denoiser_stage import MAIN_SIZE, Bank, Trainer
from lib_onediff.demo.train.drawing import denoised
from lib_onediff.demo.train.judge_stage import shares, worsened
from lib_onediff.demo.train.learner import Clock, Learner, read_progress
from lib_onediff.demo.train.scenes import Batch
from lib_onediff.demo.train.setup import Setup
from lib_onediff.demo.train.vae_stage import scale_latents
from lib_onediff.model.read_diffusers import read_diffusers
from lib_onediff.model.vae import read_diffusers as read_vae
from lib_onediff.quality.judge import Judge, load_judge


def test_all_networks_together_have_at_most_ten_million_parameters() -> None:
    unet, text, vae = networks.make_unet(), networks.make_text_encoder(), networks.make_vae()
    counts = {name: networks.size_of(network) for name, network in (("unet", unet), ("text", text), ("vae", vae))}
    assert counts == {"unet": 7_540_708, "text": 867_072, "vae": 1_471_447}
    assert sum(counts.values()) <= networks.MOST_PARAMETERS
    assert networks.size_of(Judge(["x"] * 1239, ["x"] * 10)) < 1_050_000


def test_they_are_in_the_layout_of_stable_diffusion() -> None:
    unet, text, vae = networks.make_unet(), networks.make_text_encoder(), networks.make_vae()
    layout = read_diffusers(unet)
    assert layout.context_width == text.config.hidden_size <= 192 and layout.in_channels == 4
    assert read_vae.read_diffusers_encoder(vae.encoder).reduction == networks.REDUCTION
    assert read_vae.read_diffusers(vae.decoder).in_channels == networks.LATENT_CHANNELS
    assert text.config.vocab_size <= 4096


@pytest.mark.parametrize("height, width", [(16, 16), (32, 48), (64, 64)])
def test_the_unet_takes_latents_of_every_size(height: int, width: int) -> None:
    with torch.no_grad():
        found = networks.make_unet()(
            torch.randn(1, 4, height, width), torch.tensor([500]), torch.randn(1, 77, networks.TEXT_WIDTH)
        )
    assert found.sample.shape == (1, 4, height, width)


def test_scaled_latents_have_unit_deviation_and_the_same_images() -> None:
    torch.manual_seed(0)
    vae = networks.make_vae().eval().requires_grad_(False)
    images = torch.rand(4, 3, 64, 64) * 2 - 1
    before = vae.encode(images).latent_dist
    scale_latents(vae, before.mean * networks.SCALING_FACTOR)
    after = vae.encode(images).latent_dist
    scaled = after.mean * networks.SCALING_FACTOR
    torch.testing.assert_close(scaled.mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(scaled.std((0, 2, 3)), torch.ones(4), atol=1e-3, rtol=0)
    # What is drawn from the posterior is scaled as its middle is.
    factor = after.mean.std((0, 2, 3)) / before.mean.std((0, 2, 3))
    torch.testing.assert_close(after.std, before.std * factor.view(1, 4, 1, 1), rtol=1e-3, atol=1e-5)
    fresh = networks.make_vae().eval().requires_grad_(False)
    fresh.load_state_dict(vae.state_dict())
    assert (before.mean - after.mean).abs().max() > 0.1
    unscaled = (after.mean / factor.view(1, 4, 1, 1)) + before.mean.mean((0, 2, 3)).view(1, 4, 1, 1)
    torch.testing.assert_close(unscaled, before.mean, atol=1e-3, rtol=1e-3)


def test_decoding_scaled_latents_gives_the_same_images() -> None:
    torch.manual_seed(0)
    vae = networks.make_vae().eval().requires_grad_(False)
    images = torch.rand(2, 3, 64, 64) * 2 - 1
    latents = vae.encode(images).latent_dist.mean
    before = vae.decode(latents).sample
    scale_latents(vae, latents * networks.SCALING_FACTOR)
    torch.testing.assert_close(vae.decode(vae.encode(images).latent_dist.mean).sample, before, atol=1e-3, rtol=1e-3)


def test_learning_goes_on_from_its_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    goal = inputs @ torch.randn(8, 1)

    def taught(learner: Learner, network: nn.Module, steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(steps):
            loss = (network(inputs) - goal).square().mean()
            learner.step(loss, 0.05)
        return loss.item()

    network = nn.Linear(8, 1)
    learner = Learner({"net": network})
    assert not learner.load(tmp_path, "stage")
    first, late = taught(learner, network, 1), taught(learner, network, 60)
    learner.save(tmp_path, "stage")
    assert {file.name for file in tmp_path.iterdir()} == {
        f"stage_{kind}.safetensors" for kind in ("weights", "average", "squares")
    }
    for left_out in ("", "squares"):
        if left_out:
            (tmp_path / f"stage_{left_out}.safetensors").unlink()
        other = nn.Linear(8, 1)
        again = Learner({"net": other})
        assert again.load(tmp_path, "stage")
        torch.testing.assert_close(other.weight, network.weight, atol=1e-3, rtol=1e-3)
        with learner.averaged(), again.averaged():
            torch.testing.assert_close(other.weight, network.weight, atol=1e-3, rtol=1e-3)
        assert taught(again, other, 20) < late < first


def test_second_moments_come_back_with_the_strides_of_their_weights(tmp_path: Path) -> None:
    """AdamW's fused step, on a GPU, refuses others."""
    def channels_last() -> tuple[nn.Conv2d, Learner]:
        network = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        return network, Learner({"net": network})

    network, learner = channels_last()
    learner.step(network(torch.ones(1, 4, 5, 5)).sum(), 0.01)
    learner.save(tmp_path, "stage")
    other, again = channels_last()
    assert again.load(tmp_path, "stage")
    state = again._optimizer.state[other.weight]
    assert state["exp_avg_sq"].stride() == state["exp_avg"].stride() == other.weight.stride()
    assert other.weight.stride() != other.weight.contiguous().stride()


def test_the_average_is_there_within_and_gone_after() -> None:
    network = nn.Linear(2, 1)
    learner = Learner({"net": network})
    for _ in range(5):
        learner.step(network(torch.ones(1, 2)).sum(), 0.1)
    own = network.weight.detach().clone()
    with learner.averaged():
        assert (network.weight - own).abs().max() > 0.01
    torch.testing.assert_close(network.weight.detach(), own)


def test_a_clock_counts_over_calls_and_writes_the_curve(tmp_path: Path) -> None:
    for call in (1, 2):
        clock = Clock(tmp_path, "stage", seconds=100, total=1000, steps=30)
        clock.start()
        while clock.goes_on():
            clock.step(clock.rate(1.0), {"loss": torch.tensor(2.0)})
        clock.save()
        assert read_progress(tmp_path)["stage"]["steps"] == 30 * call
    lines = (tmp_path / "stage.csv").read_text().splitlines()
    assert lines[0] == "step,seconds,rate,loss" and [line.split(",")[0] for line in lines[1:]] == ["1", "25", "50"]


def test_the_rate_rises_stays_and_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(tmp_path, "stage", seconds=100, total=100)
    assert clock.rate(1.0) == pytest.approx(0.01)
    clock.steps = 500
    rates = []
    for progress in (0.1, 0.5, 0.75, 1.0):
        monkeypatch.setattr(Clock, "progress", property(lambda self, now=progress: now))
        rates.append(clock.rate(1.0))
    assert rates == pytest.approx([1.0, 1.0, 0.51, 0.02])


class Knower(nn.Module):
    """Answers the true velocity of the one latent that there is, and remembers the context."""

    def __init__(self, latent: Tensor, signal: Tensor, wrong_by: float) -> None:
        super().__init__()
        self.latent, self.signal, self.wrong_by = latent, signal, wrong_by

    def forward(self, noisy: Tensor, steps: Tensor, context: Tensor, return_dict: bool) -> tuple[Tensor]:
        signal = self.signal[steps].view(-1, 1, 1, 1)
        noise = (noisy - signal.sqrt() * self.latent) / (1 - signal).sqrt()
        # Learning needs something that the context changes.
        found = signal.sqrt() * noise - (1 - signal).sqrt() * self.latent + 0 * context.sum()
        return (found + self.wrong_by,)


@pytest.mark.parametrize("wrong_by", [0.0, 1.0])
def test_the_loss_is_zero_for_the_true_velocity_alone(tmp_path: Path, wrong_by: float) -> None:
    torch.manual_seed(0)
    latent = torch.randn(1, 4, *MAIN_SIZE)
    setup = Setup(folder=tmp_path, data=tmp_path, seconds=1, total=1, batch=64)
    knower = Knower(latent, networks.make_schedule().alphas_cumprod, wrong_by)
    tokens = torch.full((1, 77), 5, dtype=torch.int16)
    text, empty = networks.make_text_encoder(), torch.zeros(1, 77, dtype=torch.long)
    banks = {MAIN_SIZE: Bank(latent.half().float(), tokens)}
    loss = Trainer(setup, knower, text, empty, banks, Learner({"text_encoder": text})).step(MAIN_SIZE, 0.0).item()
    assert loss < 1e-3 if not wrong_by else 0.1 < loss < 1


def test_drawing_by_the_true_velocity_gives_the_image() -> None:
    torch.manual_seed(0)
    latent = torch.randn(1, 4, 8, 8)
    knower = Knower(latent, networks.make_schedule().alphas_cumprod, 0.0)
    drawn = denoised(knower, torch.randn(2, 4, 8, 8), torch.zeros(4, 77, 1), steps=20, guidance=4.0)
    # Stable Diffusion's schedule ends with three hundredths of the noise.
    assert (drawn - latent).abs().mean() < 0.04


def test_a_clock_ends_at_the_time_of_day(tmp_path: Path) -> None:
    late, early = (Clock(tmp_path, "stage", 100, 100, until=time.time() + seconds) for seconds in (-1, 50))
    assert early.goes_on() and not late.goes_on()


def test_a_judge_comes_back_from_its_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    judge = Judge(["red apple", "cat"], ["white", "blue"]).eval()
    judge.save(tmp_path / "judge.safetensors")
    again = load_judge(tmp_path / "judge.safetensors")
    assert (again.names, again.backgrounds) == (judge.names, judge.backgrounds)
    images = torch.rand(3, 3, 256, 256) * 2 - 1
    with torch.no_grad():
        for one, other in zip(judge(images), again(images), strict=True):
            assert (one - other).abs().max() < 0.05 * one.abs().max()


def test_a_judge_s_distance_is_a_distance() -> None:
    torch.manual_seed(0)
    judge = Judge(["x"], ["white"]).eval().requires_grad_(False)
    first = torch.rand(2, 3, 64, 64) * 2 - 1
    near, far = first + 0.02 * torch.randn_like(first), torch.rand_like(first) * 2 - 1
    assert judge.distance(first, first).tolist() == [0, 0]
    torch.testing.assert_close(judge.distance(first, far), judge.distance(far, first))
    assert (judge.distance(first, near) < 0.5 * judge.distance(first, far)).all()


def test_two_emoji_share_the_target() -> None:
    nothing: Any = torch.zeros(2)
    batch = Batch(torch.tensor([[2, -1], [0, 1]]), nothing, nothing, nothing, nothing, nothing)
    assert shares(batch, 3).tolist() == [[0, 0, 1], [0.5, 0.5, 0]]


def test_worsened_images_are_near_and_not_the_same() -> None:
    images = torch.rand(8, 3, 32, 32) * 2 - 1
    assert 0.001 < (worsened(images, torch.Generator().manual_seed(0)) - images).abs().mean() < 0.4
