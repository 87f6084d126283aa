"""A whole training of emoji-sd, two steps a stage: every stage goes on from the one before, and the model loads."""
from __future__ import annotations

import csv
import json

import pytest
import torch
from emoji_builders import setup_of

from lib_onediff.demo.folder_parts import load_folder
from lib_onediff.demo.model_folder import read_index
from lib_onediff.demo.train.denoiser_stage import MAIN_SIZE, draw_scenes, make_banks, train_denoiser
from lib_onediff.demo.train.judge_stage import train_judge
from lib_onediff.demo.train.learner import read_progress
from lib_onediff.demo.train.scoring import said, verdicts
from lib_onediff.demo.train.setup import Setup
from lib_onediff.demo.train.vae_stage import train_vae
from lib_onediff.quality.judge import load_judge


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """After each stage once, and the denoiser twice."""
    folder = tmp_path_factory.mktemp("emoji")
    train_judge(setup_of(folder, 2))
    train_vae(setup_of(folder, 1))
    train_denoiser(setup_of(folder, 1))
    train_denoiser(setup_of(folder, 1))
    return setup_of(folder, 1)


def test_every_stage_writes_its_curve_and_what_it_reached(trained: Setup) -> None:
    progress = read_progress(trained.folder)
    assert {name: stage["steps"] for name, stage in progress.items()} == {"judge": 2, "vae": 1, "denoiser": 2}
    for stage in progress:
        rows = list(csv.DictReader((trained.folder / f"{stage}.csv").open(encoding="utf-8")))
        assert rows[0]["step"] == "1" and all(float(value) >= 0 for value in rows[0].values())
    judged = json.loads((trained.folder / "judge.json").read_text(encoding="utf-8"))
    assert judged["chance_top1"] == pytest.approx(33.333) and judged["images"] == 4
    report = json.loads((trained.folder / "vae.json").read_text(encoding="utf-8"))
    assert report["latent_deviation"] == pytest.approx([1] * 4, abs=0.02)
    assert (trained.folder / "vae.png").stat().st_size > 1000


def test_the_model_is_a_folder_that_the_demo_loads_and_draws_with(trained: Setup) -> None:
    assert read_index(trained.model)["_class_name"] == "StableDiffusionPipeline"
    pipeline = load_folder(trained.model, torch.float32)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.vae.config.scaling_factor == 0.18215
    images = pipeline(
        "red apple on a blue background", negative_prompt="cat", num_inference_steps=2, height=64, width=128,
        output_type="pt", generator=torch.Generator().manual_seed(0),
    ).images
    assert images.shape == (1, 3, 64, 128) and images.isfinite().all()


def test_a_second_call_reads_the_latents_of_the_first(trained: Setup) -> None:
    assert trained.cache
    file, = trained.cache.glob("latents_*.pt")
    again = make_banks(trained, {}, file)
    fresh = make_banks(trained, draw_scenes(trained), None)
    assert set(again) == set(fresh) and MAIN_SIZE in again
    for size, bank in again.items():
        torch.testing.assert_close(bank.latents, fresh[size].latents)
        assert torch.equal(bank.tokens, fresh[size].tokens)


def test_its_files_are_halves_and_small(trained: Setup) -> None:
    from safetensors import safe_open

    files = list(trained.model.glob("*/*.safetensors"))
    assert len(files) == 3 and sum(file.stat().st_size for file in files) < 20 * 2**20
    for file in files:
        with safe_open(file, "pt") as read:
            assert {read.get_tensor(name).dtype for name in read.keys()} <= {torch.float16, torch.int64}


def test_its_card_says_licences_and_who_cannot_load_it(trained: Setup) -> None:
    card = (trained.model / "README.md").read_text(encoding="utf-8")
    for needed in ("Apache License 2.0", "MIT License", "Google", "Microsoft", "A1111 and Forge cannot load it",
                   "- squares 1, MIT"):
        assert needed in card
    assert "{" not in card


def test_the_judge_s_verdict_needs_every_emoji_of_the_caption(trained: Setup) -> None:
    judge = load_judge(trained.judge)
    (five, ground), = verdicts(judge, torch.zeros(1, 3, 64, 64))
    assert sorted(five) == ["cat", "red apple", "rocket"] and ground in judge.backgrounds
    assert said((five, "blue"), (five[0],), "blue") == {
        "pair": False, "recognised": True, "top5": True, "background": True, "first": five[0], "second": five[1],
    }
    assert not said((five, "blue"), (five[1],), "red")["recognised"]
    assert said((five, "white"), (five[1], five[0]), "white")["recognised"]
    assert not said((five, "white"), (five[0], five[2]), "white")["recognised"]
